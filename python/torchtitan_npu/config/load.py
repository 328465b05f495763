"""From a file and overrides to a checked :class:`Config`; every problem is found before any is reported."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .coerce import Mismatch, coerce, plain, show
from .errors import ConfigError, Problem
from .keys import KEYS, NO_DEFAULT, SECTIONS, fields_with_types, unknown_key
from .overrides import parse_overrides
from .presets import PRESET_FIELDS, PRESETS
from .rules import HINTS, RULES
from .schema import PRESET, Config
from .unsupported import REFUSED
from .yaml_file import YamlFile, read_yaml


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, complete and check a configuration file.

    Args:
        path: the YAML file.
        overrides: ``["--training.max_steps", "5", "--model.dim=256"]``; they replace the file's values.

    Raises:
        ConfigError: with all problems of file and overrides.
    """
    return _Loading(str(path), read_yaml(Path(path), str(path)), overrides).run()


def config_from_dict(values: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "configuration") -> Config:
    """The same for nested mappings: what :func:`to_dict` gave, or a test's own. Raises ConfigError."""
    return _Loading(source, YamlFile(dict(values)), overrides).run()


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as nested plain values (lists for tuples), ready for YAML or JSON.

    Loading it again gives an equal :class:`Config`.
    """

    return {name: plain(getattr(config, name)) for name in SECTIONS if "." not in name}


class _Loading:
    """The steps of one load. ``values`` holds only what is valid, so that one mistake is not reported twice."""

    def __init__(self, source: str, file: YamlFile, overrides: Sequence[str]) -> None:
        self.source = source
        self.file = file
        self.problems: list[Problem] = []
        self.given: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.preset_overrides: dict[str, tuple[Any, Any]] = {}
        self.flags, flag_problems = parse_overrides(overrides)
        self._flatten(file.values, "")
        self.given |= self.flags
        self.flag_problems = flag_problems

    def run(self) -> Config:
        self._convert_given()
        self._apply_preset()
        self._apply_defaults()
        self._check_rules()
        problems = [*self.file.problems, *sorted(self.problems, key=self._line), *self.flag_problems]
        if problems:
            raise ConfigError(self.source, problems)
        return self._build(
            Config, "", preset_overrides=self.preset_overrides, warnings=self._warnings(), source=self.source
        )

    def _problem(self, key: str, what: str) -> None:
        if key in self.flags:
            self.problems.append(Problem(f"--{key}", what))
        else:
            line = f" (line {self.file.lines[key]})" if key in self.file.lines else ""
            self.problems.append(Problem(key, what + line))

    def _line(self, problem: Problem) -> float:
        """For the file's order; what is not in the file comes last."""
        return self.file.lines.get(problem.where, float("inf"))

    def _flatten(self, mapping: Mapping[Any, Any], prefix: str) -> None:
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            if "." in str(key):
                self._problem(name, "keys are nested in the file, not dotted; put the last part below its section")
            elif name in SECTIONS:
                if isinstance(value, Mapping):
                    self._flatten(value, f"{name}.")
                elif value is not None:  # a section without keys is null
                    self._problem(name, f"{show(value)} is not a section; put its keys below it, indented")
            elif name in KEYS:
                self.given[name] = value
            else:
                self._problem(name, unknown_key(name))

    def _convert_given(self) -> None:
        for name, value in self.given.items():
            try:
                self.values[name] = coerce(value, KEYS[name].type)
            except Mismatch as mismatch:
                self._problem(name, str(mismatch))
        for refusal in REFUSED:
            if refusal.key in self.values and refusal.matches(self.values[refusal.key]):
                shown = show(self.values[refusal.key])
                self._problem(refusal.key, f"{shown} is not supported yet; {refusal.way_out}")

    def _apply_preset(self) -> None:
        name = self.values.get("model.name")
        if name is None:
            return
        if name not in PRESETS:
            close = difflib.get_close_matches(name, PRESETS, n=1)
            nearest = f"did you mean {close[0]}? " if close else ""
            self._problem("model.name", f"{show(name)} is not a known model; {nearest}known: {', '.join(PRESETS)}")
            return
        for field in PRESET_FIELDS:
            key, preset_value = f"model.{field}", PRESETS[name][field]
            if key not in self.given:
                self.values[key] = preset_value
            elif key in self.values and self.values[key] != preset_value:
                self.preset_overrides[key] = (preset_value, self.values[key])

    def _apply_defaults(self) -> None:
        for key in KEYS.values():
            if key.name in self.given:
                continue
            if key.required:
                self._problem(key.name, "required, and not given")
            elif key.default is not NO_DEFAULT:
                self.values[key.name] = key.default
            elif key.default_from != PRESET and key.default_from in self.values:
                self.values[key.name] = self.values[key.default_from]

    def _origin(self, key: str) -> str:
        if key in self.given:
            return ""
        if KEYS[key].default_from == PRESET:
            return f" (from {self.values['model.name']})"
        return " (the default)"

    def _check_rules(self) -> None:
        for rule in RULES:
            keys = (rule.key, *rule.others)
            if not all(key in self.values for key in keys):
                continue
            value, *others = (self.values[key] for key in keys)
            if rule.holds(value, *others):
                continue
            context = ", ".join(
                f"{key} is {show(other)}{self._origin(key)}" for key, other in zip(rule.others, others, strict=True)
            )
            what = f"{show(value)}{self._origin(rule.key)} {rule.text}; {context}; {rule.way_out}"
            # Named after the flag where only the other side of the rule was given by one.
            by_flag = [key for key in keys if key in self.flags]
            if by_flag and rule.key not in self.flags:
                what += f" (set by {', '.join(f'--{key}' for key in by_flag)})"
            self._problem(rule.key, what)

    def _warnings(self) -> list[str]:
        warnings = []
        for hint in HINTS:
            values = [self.values[key] for key in hint.keys]
            if hint.applies(*values):
                warnings.append(hint.text.format(*map(show, values)))
        return warnings

    def _build(self, cls: Any, prefix: str, **more: Any) -> Any:
        for field, hint in fields_with_types(cls):
            name = prefix + field.name
            if name in SECTIONS:
                more[field.name] = self._build(hint, f"{name}.")
            elif name in KEYS:
                more[field.name] = self.values[name]
        return cls(**more)

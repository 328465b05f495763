"""Reading the YAML itself: text to nested mappings, with line numbers and duplicate keys noticed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, Problem


class _Loader(yaml.SafeLoader):
    """A safe loader with YAML 1.2's plain scalars.

    PyYAML follows YAML 1.1, where ``3e-4`` is text, ``010`` is 8, ``1:30`` is 90, ``1_000`` is 1000, ``no`` is false
    and dates are objects. Here numbers and booleans are what they look like, the rest stays text for the type check.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}


_NUMBERS_FIRST = "-+.0123456789"
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", _NUMBERS_FIRST),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", _NUMBERS_FIRST),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", _NUMBERS_FIRST),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


@dataclass
class YamlFile:
    """A parsed file."""

    values: dict[Any, Any]
    lines: dict[str, int] = field(default_factory=dict)
    """Line number of each key by its dotted name."""
    problems: list[Problem] = field(default_factory=list)
    """Duplicate keys."""


def parse_scalar(text: str) -> Any:
    """One value as it would stand in the YAML after ``key: ``. Raises ``yaml.YAMLError`` or ``ValueError``."""
    return yaml.load(text, _Loader)  # _Loader is a SafeLoader


def read_yaml(path: Path, source: str) -> YamlFile:
    """Read and parse ``path``.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is empty, or is not a mapping.
    """

    def fail(what: str) -> ConfigError:
        return ConfigError(source, [Problem("--config", what)])

    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise fail(f"not UTF-8 text (byte {error.start}); is it a YAML file?") from error
    except FileNotFoundError as error:
        raise fail(f"no such file (looked in {path.absolute().parent})") from error
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}") from error

    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        values = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise fail(f"not valid YAML: {place}{error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise fail(f"not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()
    if values is None:
        raise fail("the file is empty; it needs at least the sections model and training")
    if not isinstance(values, dict):
        raise fail(f"holds a {type(values).__name__}, not sections such as 'model:' and 'training:'")
    parsed = YamlFile(values)
    _note_lines(root, "", parsed, set())
    return parsed


def _note_lines(node: yaml.Node | None, prefix: str, parsed: YamlFile, parents: set[int]) -> None:
    """Fill ``lines`` and report keys that a mapping has twice (YAML would silently keep the last)."""
    if not isinstance(node, yaml.MappingNode) or id(node) in parents:
        return
    own: dict[str, int] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        name, line = prefix + key_node.value, key_node.start_mark.line + 1
        if name in own:
            parsed.problems.append(Problem(name, f"given twice, in line {own[name]} and line {line}; keep one"))
        own[name] = line
        _note_lines(value_node, f"{name}.", parsed, parents | {id(node)})
    parsed.lines.update(own)

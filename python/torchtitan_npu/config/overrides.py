"""``--section.key value`` and ``--section.key=value``: settings that replace the YAML's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from .errors import Problem
from .keys import KEYS, SECTIONS, unknown_key
from .yaml_file import parse_scalar

_FLAG = re.compile(r"--(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Command-line arguments as (overrides with their values, all the others), each in order."""
    overrides: list[str] = []
    others: list[str] = []
    position = 0
    while position < len(arguments):
        match = _FLAG.fullmatch(arguments[position])
        length = 1
        if match and match["value"] is None and position + 1 < len(arguments):
            length = 1 if arguments[position + 1].startswith("--") else 2
        (overrides if match else others).extend(arguments[position : position + length])
        position += length
    return overrides, others


def parse_overrides(arguments: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Overrides as key → value, in the YAML's scalars; of a key given twice the last value counts.

    Returns the values and the problems: unknown keys, missing values, text that is not YAML.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    position = 0
    while position < len(arguments):
        flag = arguments[position]
        position += 1
        match = _FLAG.fullmatch(flag)
        if match is None:
            problems.append(Problem(flag, "not an override; write --section.key value"))
            continue
        key, text = match["key"], match["value"]
        if text is None and position < len(arguments) and not arguments[position].startswith("--"):
            text = arguments[position]
            position += 1
        if key in SECTIONS:
            problems.append(Problem(f"--{key}", f"is a section; set one of its keys: --{key}.<key> <value>"))
        elif key not in KEYS:
            problems.append(Problem(f"--{key}", unknown_key(key)))
        elif text is None:
            problems.append(Problem(f"--{key}", f"needs a value: --{key} <value>"))
        elif KEYS[key].type is str:  # text is taken as it is: a path may look like YAML
            values[key] = text
        else:
            try:
                values[key] = parse_scalar(text)
            except (yaml.YAMLError, ValueError, RecursionError):
                problems.append(Problem(f"--{key}", f"{text!r} is not a YAML value"))
    return values, problems

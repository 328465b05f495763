"""Values of the YAML become values of the declared types, strictly: what is not meant for sure is refused."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .bounds import Bounds

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_BOOLEAN_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_INT64_MAX = 2**63 - 1


class Mismatch(ValueError):
    """A value that its key does not take; ``str()`` gives value, rule and way out."""


class OutOfRange(Mismatch):
    """A value of the right kind outside its range."""


def show(value: object) -> str:
    """A value as the YAML would have it, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = plain(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain(value: Any) -> Any:
    """A value of a key as YAML and JSON have it: lists for tuples, mappings for dataclasses."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _members(declared: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a type that is none is its only one."""
    return get_args(declared) if get_origin(declared) in (Union, types.UnionType) else (declared,)


def describe(declared: Any) -> str:
    """The declared type in words: "an integer", "one of fp32, bf16", "a number or null"."""
    alternatives = _members(declared)
    if len(alternatives) > 1:
        return " or ".join(describe(alternative) for alternative in alternatives)
    if get_origin(declared) is Annotated:
        return describe(get_args(declared)[0])
    if get_origin(declared) is Literal:
        choices = get_args(declared)
        return str(choices[0]) if len(choices) == 1 else f"one of {', '.join(choices)}"
    if dataclasses.is_dataclass(declared):
        return f"a mapping of {', '.join(field.name for field in dataclasses.fields(declared))}"
    if is_list(declared):
        return f"a list, each item {describe(get_args(declared)[0])}"
    if get_origin(declared) is tuple:
        return f"a list of {len(get_args(declared))} numbers"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words[declared]


def is_list(declared: Any) -> bool:
    """Whether the type is a list of any length: ``tuple[X, ...]``."""
    return get_origin(declared) is tuple and get_args(declared)[-1] is Ellipsis


def bounds_of(declared: Any) -> Bounds | None:
    """The range that a type carries, wherever in it."""
    for alternative in _members(declared):
        if get_origin(alternative) is tuple:
            return bounds_of(get_args(alternative)[0])
        if get_origin(alternative) is Annotated:
            return next(extra for extra in get_args(alternative)[1:] if isinstance(extra, Bounds))
    return None


def coerce(value: object, declared: Any) -> Any:
    """``value``, as YAML gave it, converted to the type ``declared``.

    Numbers may be quoted (``"3e-4"``), as YAML 1.1 programs write them; nothing else changes its kind.

    Raises:
        Mismatch: the value is of another kind or outside the type's range.
    """
    alternatives = _members(declared)
    if len(alternatives) > 1:
        return _coerce_union(value, declared, alternatives)
    if get_origin(declared) is Annotated:
        converted = coerce(value, get_args(declared)[0])
        bounds = bounds_of(declared)
        if bounds is not None and not bounds.contains(converted):
            raise OutOfRange(f"{show(converted)} is out of range; it must be {bounds}")
        return converted
    if get_origin(declared) is Literal:
        return _coerce_choice(value, declared)
    if dataclasses.is_dataclass(declared):
        return _coerce_mapping(value, declared)
    if is_list(declared):
        return _coerce_list(value, declared)
    if get_origin(declared) is tuple:
        return _coerce_tuple(value, declared)
    return _SCALARS[declared](value)


def _refuse(value: object, declared: Any, way_out: str = "") -> Mismatch:
    return Mismatch(f"{show(value)} is not {describe(declared)}" + (f"; {way_out}" if way_out else ""))


def _coerce_union(value: object, declared: Any, alternatives: tuple[Any, ...]) -> Any:
    way_out = ""
    for alternative in alternatives:
        try:
            return coerce(value, alternative)
        except OutOfRange:
            raise
        except Mismatch as mismatch:
            way_out = way_out or str(mismatch).partition("; ")[2]
    raise _refuse(value, declared, way_out)


def _coerce_choice(value: object, declared: Any) -> str:
    choices = get_args(declared)
    if isinstance(value, str) and value in choices:
        return value
    close = difflib.get_close_matches(str(value), choices, n=1)
    raise _refuse(value, declared, f"did you mean {close[0]}?" if close else "")


def _coerce_tuple(value: object, declared: Any) -> tuple[Any, ...]:
    items = get_args(declared)
    if not isinstance(value, (list, tuple)):
        raise _refuse(value, declared)
    if len(value) != len(items):
        raise _refuse(value, declared)
    return tuple(coerce(item, item_type) for item, item_type in zip(value, items, strict=True))


def _coerce_list(value: object, declared: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _refuse(value, declared)
    items = []
    for index, item in enumerate(value):
        try:
            items.append(coerce(item, get_args(declared)[0]))
        except Mismatch as mismatch:
            raise type(mismatch)(f"item {index + 1}: {mismatch}") from mismatch
    return tuple(items)


def _coerce_mapping(value: object, declared: Any) -> Any:
    """A dataclass of the mapping's values; unlike sections, the first problem is all that is reported."""
    if not isinstance(value, dict):
        raise _refuse(value, declared)
    types_by_name = get_type_hints(declared, include_extras=True)
    given = {}
    for name, item in value.items():
        if name not in types_by_name:
            close = difflib.get_close_matches(str(name), types_by_name, n=1)
            known = f"did you mean {close[0]}?" if close else f"valid: {', '.join(types_by_name)}"
            raise Mismatch(f"unknown key {show(name)}; {known}")
        try:
            given[name] = coerce(item, types_by_name[name])
        except Mismatch as mismatch:
            raise type(mismatch)(f"{name}: {mismatch}") from mismatch
    for field in dataclasses.fields(declared):
        if field.name not in given and field.default is dataclasses.MISSING:
            raise Mismatch(f"{show(value)} lacks {field.name}")
    return declared(**given)


def _coerce_int(value: object) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value) and len(value) <= 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        exact = isinstance(value, float) and value.is_integer() and abs(value) <= _INT64_MAX
        raise _refuse(value, int, f"write {int(value)}" if exact and isinstance(value, float) else "")
    if abs(value) > _INT64_MAX:
        raise OutOfRange(f"{show(value)} is out of range; it must fit in 64 bits")
    return value


def _coerce_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _refuse(value, float)
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        raise _refuse(value, float)
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise OutOfRange(f"{show(value)} is out of range; it must be finite")
    return number


def _coerce_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = _BOOLEAN_WORDS.get(str(value).lower())
    raise _refuse(value, bool, f"write {word}, without quotes" if word else "")


def _coerce_text(value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(value, str)
    if not value.strip():
        raise Mismatch("empty; leave the key out to use its default")
    return value


def _coerce_null(value: object) -> None:
    if value is not None:
        raise _refuse(value, type(None))


_SCALARS: dict[Any, Callable[[object], Any]] = {
    int: _coerce_int,
    float: _coerce_float,
    bool: _coerce_bool,
    str: _coerce_text,
    type(None): _coerce_null,
}

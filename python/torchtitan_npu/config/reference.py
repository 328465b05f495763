"""The page about all keys, from the dataclasses and rules.

``python -m torchtitan_npu.config.reference > docs/configuration.md``
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from .coerce import bounds_of, describe, is_list, show
from .keys import KEYS, NO_DEFAULT, SECTIONS, Key, fields_with_types, members
from .presets import PRESET_FIELDS, PRESETS
from .rules import RULES
from .schema import PRESET
from .unsupported import REFUSED

_HEAD = """\
<!-- Generated: python -m torchtitan_npu.config.reference > docs/configuration.md -->
# Configuration

A run is described by one YAML file. Unknown sections and keys, duplicate keys, values of the wrong type and
combinations that cannot work are errors; all problems of a file are reported together.

* `--section.key value` or `--section.key=value` on the command line replaces a value of the file and is
  checked like it; of a key given twice the last value counts.
* Plain scalars follow YAML 1.2: `3e-4` is a number, `yes` is text, `010` and `1_000` are no numbers.
  Numbers may be quoted.
* A key that asks for something that is not built yet is refused: "not yet" below.
* Paths are not in the file: `--data_dir`, `--checkpoint_dir` and `--log_dir` are flags.
* `parallel.dp_degree` x `parallel.tp_degree` must be the number of ranks (`WORLD_SIZE`).
"""


_COLUMNS = "| key | type | default | rule | meaning |\n|---|---|---|---|---|\n"


def render_reference() -> str:
    """The whole page in Markdown."""
    parts = [_HEAD]
    for section, cls in SECTIONS.items():
        parts.append(f"\n## `{section}`\n\n{_COLUMNS}")
        parts += _rows(cls, [KEYS[name] for name in members(section) if name in KEYS])
    for name, key in KEYS.items():
        if is_list(key.type):
            parts.append(f"\n## An item of `{name}`\n\n{_COLUMNS}")
            parts += _item_rows(get_args(key.type)[0])
    return "".join([*parts, _presets()])


def _rows(cls: type, keys: list[Key]) -> Iterator[str]:
    docs = _field_docs(cls)
    for key in keys:
        leaf = key.name.rpartition(".")[2]
        yield f"| `{leaf}` | {_type(key)} | {_default(key)} | {_rules(key)} | {docs[leaf]} |\n"


def _item_rows(cls: type) -> Iterator[str]:
    keys = []
    for field, declared in fields_with_types(cls):
        default = NO_DEFAULT if field.default is dataclasses.MISSING else field.default
        keys.append(Key(field.name, declared, default))
    return _rows(cls, keys)


def _field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            docs[field.target.id] = str(text.value.value)
    return docs


def _type(key: Key) -> str:
    return "text" if get_origin(key.type) is Literal else describe(key.type).removeprefix("an ").removeprefix("a ")


def _default(key: Key) -> str:
    if key.required:
        return "required"
    if key.default is NO_DEFAULT:
        return "preset's" if key.default_from == PRESET else f"`{key.default_from}`"
    return f"`{key.default if isinstance(key.default, str) else show(key.default)}`"


def _rules(key: Key) -> str:
    def parts() -> Iterator[str]:
        if get_origin(key.type) is Literal:
            yield " \\| ".join(get_args(key.type))
        if bounds := bounds_of(key.type):
            yield str(bounds)
        yield from (rule.text for rule in RULES if rule.key == key.name)
        yield from (f"not yet: {row.values}" for row in REFUSED if row.key == key.name)

    return "; ".join(parts())


def _presets() -> str:
    rows = [f"\n## Presets\n\n| `model.name` | {' | '.join(PRESET_FIELDS)} |\n|---|{'---|' * len(PRESET_FIELDS)}\n"]
    for name, values in PRESETS.items():
        rows.append(f"| `{name}` | {' | '.join(show(values[field]) for field in PRESET_FIELDS)} |\n")
    rows.append(
        "\nKeys in the file replace the preset's values; the log says which. Llama 3 has no 7B and no 13B: they are\n"
    )
    rows.append("Llama 2's shapes with Llama 3's vocabulary and rotary base.\n")
    return "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(render_reference())

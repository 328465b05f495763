"""The list of all keys, read from the dataclasses, and the search for the nearest valid one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from .schema import DEFAULT_FROM, Config


class _NoDefault:
    def __repr__(self) -> str:
        return "NO_DEFAULT"


NO_DEFAULT = _NoDefault()


@dataclass(frozen=True)
class Key:
    """One key of the YAML."""

    name: str
    """With its sections: ``training.checkpoint.max_keep``."""
    type: Any
    """The declared type, with its :class:`~.bounds.Bounds`."""
    default: Any = NO_DEFAULT
    default_from: str | None = None
    """Where the value comes from when the YAML leaves it out: ``preset`` or another key's name."""

    @property
    def required(self) -> bool:
        return self.default is NO_DEFAULT and self.default_from is None


@functools.cache
def fields_with_types(cls: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """Each field of a dataclass with its resolved type."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(cls))


def _walk(cls: type, prefix: str) -> Iterator[tuple[str, type | Key]]:
    """Sections and keys below ``cls`` in the dataclasses' order."""
    for field, hint in fields_with_types(cls):
        name = prefix + field.name
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield name, hint
            yield from _walk(hint, f"{name}.")
        elif cls is not Config:  # Config's own other fields are results of loading, not keys
            default = NO_DEFAULT if field.default is dataclasses.MISSING else field.default
            yield name, Key(name, hint, default, field.metadata.get(DEFAULT_FROM))


_ALL = dict(_walk(Config, ""))
KEYS: dict[str, Key] = {name: entry for name, entry in _ALL.items() if isinstance(entry, Key)}
SECTIONS: dict[str, type] = {name: entry for name, entry in _ALL.items() if isinstance(entry, type)}

# What other projects call our keys, where the spelling alone would not lead there.
_OTHER_NAMES = {
    "lr": "training.learning_rate",
    "hidden_size": "model.dim",
    "num_hidden_layers": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "intermediate_size": "model.ffn_dim",
    "max_position_embeddings": "model.max_seq_len",
}


def members(section: str) -> list[str]:
    """Full names of the keys and sub-sections directly in ``section`` (``""`` is the top level)."""
    prefix = f"{section}." if section else ""
    return [name for name in _ALL if name.startswith(prefix) and "." not in name[len(prefix) :]]


def unknown_key(name: str) -> str:
    """What to say about a key that does not exist: the nearest valid one, or all that its section has."""
    section, _, leaf = name.rpartition(".")
    kind = "key" if section else "section"
    siblings = {sibling.rpartition(".")[2]: sibling for sibling in members(section)}
    elsewhere = {known.rpartition(".")[2]: known for known in _ALL}
    nearest = elsewhere.get(leaf.replace("-", "_"))
    if nearest is None and (close := difflib.get_close_matches(leaf, siblings, n=1)):
        nearest = siblings[close[0]]
    if nearest is None:
        nearest = _OTHER_NAMES.get(leaf)
    if nearest is None and (close := difflib.get_close_matches(leaf, elsewhere, n=1, cutoff=0.75)):
        nearest = elsewhere[close[0]]
    if nearest is not None:
        return f"unknown {kind}; did you mean {nearest}?"
    return f"unknown {kind}; valid in {section or 'the file'}: {', '.join(siblings)}"

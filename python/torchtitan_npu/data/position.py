"""Whether a data position out of a checkpoint means the same place now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "order": "the version of the order of samples",
    "fingerprints": "the data's fingerprint",
    "shares": "data.mixture (shares)",
    "seed": "training.seed",
    "seq_len": "training.seq_len",
    "shuffle": "data.shuffle",
    "pack": "data.pack",
    "eos_id": "the appended EOS id (data.append_eos)",
}


def saved_position(saved: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    """The global sample of ``saved``. Both are states of a PackedLoader; what they say beside it must be equal.

    Errors: ValueError with what differs and the way out.
    """
    way_out = "begin at the first sample on purpose: start without resuming, in another checkpoint directory"
    if "order" not in saved and "global_sample" in saved:
        raise ValueError(
            f"the data position (global sample {saved['global_sample']}) was saved by a release that took the samples "
            f"in another order: it means another place now. Go on with that release, or {way_out}"
        )
    missing = [key for key in own if key not in saved]
    if missing:
        raise ValueError(f"the saved data position lacks {', '.join(missing)}: it is not a PackedLoader's state")
    changed = [
        f"{name} was {_shown(saved[key])}, is {_shown(own[key])}"
        for key, name in _NAMES.items()
        if saved[key] != own[key]
    ]
    if changed:
        raise ValueError(
            f"the data position (global sample {saved['global_sample']}) belongs to other data or settings: "
            f"{'; '.join(changed)}. Go on with the saved ones, or {way_out}"
        )
    position = saved["global_sample"]
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
        raise ValueError(f"the saved data position is {position!r}: must be an integer, 0 or more")
    return position


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else repr(value)

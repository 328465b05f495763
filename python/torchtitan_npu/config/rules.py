"""Rules between keys. Ranges of single keys are in the types (:mod:`.bounds`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """``holds(value of key, values of others…)`` must be true; checked where all of them have valid values."""

    key: str
    """The key the problem is reported under."""
    others: tuple[str, ...]
    holds: Callable[..., bool]
    text: str
    """The rule, so that "<key> <text>" reads as a sentence."""
    way_out: str


@dataclass(frozen=True)
class Hint:
    """A legal combination that the user should know about; ``text`` is formatted with the values in key order."""

    keys: tuple[str, ...]
    applies: Callable[..., bool]
    text: str


def _divides(divisor: int, *numbers: int) -> bool:
    return all(number % divisor == 0 for number in numbers)


def _heads_divide(n_heads: int, dim: int, head_dim: int | None) -> bool:
    return head_dim is not None or dim % n_heads == 0


def _even_head_width(n_heads: int, dim: int, head_dim: int | None) -> bool:
    return head_dim is not None or dim % n_heads != 0 or (dim // n_heads) % 2 == 0


RULES: tuple[Rule, ...] = (
    Rule(
        "model.n_heads",
        ("model.dim", "model.head_dim"),
        _heads_divide,
        "must divide model.dim where model.head_dim is null",
        "change one of them or set model.head_dim",
    ),
    Rule(
        "model.head_dim",
        (),
        lambda width: width is None or width % 2 == 0,
        "must be even (the rotary embedding turns pairs)",
        "change it",
    ),
    Rule(
        "model.n_heads",
        ("model.dim", "model.head_dim"),
        _even_head_width,
        "must leave heads of even width (model.dim / model.n_heads; the rotary embedding turns pairs)",
        "change one of them",
    ),
    Rule("model.n_kv_heads", ("model.n_heads",), _divides, "must divide model.n_heads", "set both to match"),
    Rule(
        "model.rope_low_freq_factor",
        ("model.rope_high_freq_factor",),
        lambda low, high: low < high,
        "must be < model.rope_high_freq_factor",
        "change one of them",
    ),
    Rule(
        "training.optimizer_state_dtype",
        ("training.optimizer",),
        lambda dtype, optimizer: dtype == "fp32" or optimizer == "adamw",
        "must be fp32 where training.optimizer is not adamw: not supported for others",
        "set it to fp32 or training.optimizer to adamw",
    ),
    Rule(
        "training.optimizer_state_offload",
        ("training.optimizer",),
        lambda offload, optimizer: not offload or optimizer == "adamw",
        "must be false where training.optimizer is not adamw: not supported for others",
        "set it to false or training.optimizer to adamw",
    ),
    Rule(
        "training.seq_len",
        ("model.max_seq_len",),
        lambda seq_len, longest: seq_len <= longest,
        "must be <= model.max_seq_len",
        "lower training.seq_len or raise model.max_seq_len",
    ),
    Rule(
        "training.min_lr",
        ("training.learning_rate",),
        lambda minimum, peak: minimum <= peak,
        "must be <= training.learning_rate",
        "lower training.min_lr",
    ),
    Rule(
        "parallel.tp_degree",
        ("model.n_heads", "model.n_kv_heads", "model.ffn_dim", "model.vocab_size"),
        _divides,
        "must divide model.n_heads, model.n_kv_heads, model.ffn_dim and model.vocab_size",
        "choose a common divisor",
    ),
    Rule(
        "parallel.tp_degree",
        ("parallel.strategy",),
        lambda degree, strategy: degree == 1 or strategy != "ddp",
        "must be 1 where parallel.strategy is ddp (not supported yet)",
        "set parallel.strategy to fsdp, or to hsdp with parallel.replicate_degree = the data-parallel degree, where "
        "each data-parallel rank holds whole parameters, too",
    ),
    Rule(
        "training.seq_len",
        ("parallel.tp_degree",),
        lambda seq_len, degree: seq_len % degree == 0,
        "must be a multiple of parallel.tp_degree (between the layers each rank has one part of the sequence)",
        "change one of them",
    ),
    Rule(
        "training.decay_steps",
        ("training.lr_schedule",),
        lambda steps, schedule: steps is not None or schedule != "wsd",
        "must be a number where training.lr_schedule is wsd",
        "set it, to a tenth of training.max_steps for example",
    ),
    Rule(
        "parallel.reduce_dtype",
        ("parallel.strategy",),
        lambda dtype, strategy: dtype == "fp32" or strategy != "ddp",
        "must be fp32 where parallel.strategy is ddp",
        "set parallel.reduce_dtype to fp32 or parallel.strategy to fsdp",
    ),
    Rule(
        "parallel.replicate_degree",
        ("parallel.strategy",),
        lambda degree, strategy: degree == 1 or strategy == "hsdp",
        "must be 1 where parallel.strategy is not hsdp",
        "set parallel.strategy to hsdp",
    ),
    Rule(
        "parallel.replicate_degree",
        ("parallel.strategy", "parallel.dp_degree"),
        lambda degree, strategy, dp: strategy != "hsdp" or dp == -1 or dp % degree == 0,
        "must divide parallel.dp_degree",
        "change one of them",
    ),
    Rule(
        "validation.interval",
        ("validation.data_dir",),
        lambda interval, data_dir: interval == 0 or data_dir is not None,
        "needs validation.data_dir",
        "name the held-out data there, or set validation.interval to 0",
    ),
    Rule(
        "data.append_eos",
        ("data.eos_id",),
        lambda append, eos_id: not append or eos_id is not None,
        "needs data.eos_id",
        "set data.eos_id to the tokenizer's end-of-text id, or prepare the data with --eos",
    ),
    Rule(
        "data.eos_id",
        ("model.vocab_size",),
        lambda eos_id, vocab_size: eos_id is None or eos_id < vocab_size,
        "must be < model.vocab_size",
        "check the tokenizer's end-of-text id",
    ),
    Rule(
        "profile.ranks",
        ("profile.steps",),
        lambda ranks, steps: steps == 0 or len(ranks) > 0,
        "must name a rank where profile.steps is > 0",
        "set profile.steps to 0, or profile.ranks to [0]",
    ),
    Rule(
        "profile.memory_snapshot",
        ("profile.steps",),
        lambda snapshot, steps: not snapshot or steps > 0,
        "needs profile.steps > 0",
        "set profile.steps to the number of steps to record",
    ),
    Rule(
        "profile.memory_snapshot",
        ("parallel.device",),
        lambda snapshot, device: not snapshot or device != "cpu",
        "must be false where parallel.device is cpu",
        "set it to false: mem_bytes in metrics.jsonl has the peak of every step",
    ),
)

HINTS: tuple[Hint, ...] = (
    Hint(
        ("validation.interval", "validation.data_dir"),
        lambda interval, data_dir: interval == 0 and data_dir is not None,
        "validation.interval is {}, so validation.data_dir {} has no effect",
    ),
    Hint(
        ("model.use_flash_attention", "training.seq_len"),
        lambda flash, seq_len: not flash and seq_len >= 2048,
        "model.use_flash_attention is {} with training.seq_len {}: true saves memory and time",
    ),
    Hint(
        ("parallel.strategy", "parallel.reshard_after_forward"),
        lambda strategy, reshard: strategy == "ddp" and reshard is not None,
        "parallel.strategy is {}, so parallel.reshard_after_forward {} has no effect",
    ),
    Hint(
        ("parallel.strategy", "parallel.replicate_degree"),
        lambda strategy, degree: strategy == "hsdp" and degree == 1,
        "parallel.strategy is {} with parallel.replicate_degree {}: the model is sharded over all ranks, as by fsdp",
    ),
    Hint(
        ("parallel.strategy", "parallel.prefetch"),
        lambda strategy, prefetch: strategy == "ddp" and prefetch != 1,
        "parallel.strategy is {}, so parallel.prefetch {} has no effect",
    ),
    Hint(  # no error: a short trial of a long run's file is common
        ("training.warmup_steps", "training.max_steps"),
        lambda warmup, steps: warmup > steps,
        "training.warmup_steps is {}, so training.max_steps {} ends before the learning rate reaches its peak",
    ),
    Hint(  # likewise
        ("training.lr_schedule", "training.warmup_steps", "training.decay_steps", "training.max_steps"),
        lambda schedule, warmup, decay, steps: schedule == "wsd" and warmup <= steps < warmup + (decay or 0),
        "training.lr_schedule is {} with training.warmup_steps {} and training.decay_steps {}, more than "
        "training.max_steps {} together: the decay is shorter, and nothing is between the two",
    ),
    Hint(
        ("training.optimizer", "training.momentum"),
        lambda optimizer, momentum: optimizer != "sgd" and momentum != 0.9,
        "training.optimizer is {}, so training.momentum {} has no effect",
    ),
    Hint(
        ("training.optimizer", "training.betas"),
        lambda optimizer, betas: optimizer != "adamw" and betas != (0.9, 0.95),
        "training.optimizer is {}, so training.betas {} has no effect",
    ),
    Hint(
        ("training.lr_schedule", "training.decay_steps"),
        lambda schedule, steps: schedule != "wsd" and steps is not None,
        "training.lr_schedule is {}, so training.decay_steps {} has no effect",
    ),
    Hint(
        ("training.lr_schedule", "training.min_lr"),
        lambda schedule, minimum: schedule == "constant" and minimum > 0,
        "training.lr_schedule is {}, so training.min_lr {} has no effect",
    ),
    Hint(
        ("profile.start", "training.max_steps", "profile.steps"),
        lambda start, max_steps, steps: steps > 0 and start > max_steps,
        "profile.start is {}, after the end of training (training.max_steps {}), so profile.steps {} has no effect",
    ),
    Hint(
        ("data.append_eos", "data.eos_id"),
        lambda append, eos_id: not append and eos_id is not None,
        "data.append_eos is {}, so data.eos_id {} has no effect",
    ),
)

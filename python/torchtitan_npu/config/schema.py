"""The YAML's sections as dataclasses: field names are the YAML's keys, a docstring under each says what it means.

Types carry ranges (:mod:`.bounds`); rules between keys are in :mod:`.rules`. A field without a default is required,
unless its metadata names where the value comes from when the YAML leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .bounds import (
    AtLeastOne,
    DegreeOrRest,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitsAhead,
)

CONFIG_VERSION = 1
"""Of the keys and their meaning, as checkpoints record them."""

DEFAULT_FROM = "default_from"
PRESET = "preset"

_LOSS_CHUNK_TOKENS = 1024

_FROM_PRESET = {DEFAULT_FROM: PRESET}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The section ``model``: a preset by name, and what differs from it."""

    name: str
    """The preset, which also says the architecture: Llama 3 (llama3_8b, ...) or Qwen3 (qwen3_8b, ...)."""
    dim: PositiveInt = field(metadata=_FROM_PRESET)
    """Width of the residual stream."""
    n_layers: PositiveInt = field(metadata=_FROM_PRESET)
    """Number of transformer blocks."""
    n_heads: PositiveInt = field(metadata=_FROM_PRESET)
    """Number of query heads."""
    n_kv_heads: PositiveInt = field(metadata=_FROM_PRESET)
    """Number of key/value heads; fewer than `n_heads` is grouped-query attention."""
    head_dim: PositiveInt | None = field(metadata=_FROM_PRESET)
    """Width of a head; null is `dim / n_heads`."""
    ffn_dim: PositiveInt = field(metadata=_FROM_PRESET)
    """Hidden width of the feed-forward network (SwiGLU)."""
    vocab_size: PositiveInt = field(metadata=_FROM_PRESET)
    """Number of token ids; at least 1 + the largest id in the data."""
    max_seq_len: PositiveInt = field(metadata=_FROM_PRESET)
    """Longest sequence the model is built for, in tokens."""
    rope_theta: PositiveFloat = field(metadata=_FROM_PRESET)
    """Base of the rotary position embedding."""
    norm_eps: PositiveFloat = field(metadata=_FROM_PRESET)
    """Epsilon of the RMS norms."""
    tie_embeddings: bool = field(metadata=_FROM_PRESET)
    """Whether the output projection is the token embedding's own tensor."""
    rope_scaling_factor: AtLeastOne = 1.0
    """Llama 3.1's scaling of the rotary embedding: slow rotations are this much slower; 1 is off."""
    rope_original_max_seq_len: PositiveInt = 8192
    """The length in tokens that the model was trained at before it was scaled."""
    rope_low_freq_factor: PositiveFloat = 1.0
    """Rotations that turn fewer times than this in `rope_original_max_seq_len` are scaled in full."""
    rope_high_freq_factor: PositiveFloat = 4.0
    """Rotations that turn more times than this in `rope_original_max_seq_len` are left alone; in between, a mixture."""
    use_flash_attention: bool = False
    """Fused attention; the same result as the plain path within tolerance, with less memory."""

    @property
    def head_width(self) -> int:
        """``head_dim``, or what stands for it."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The section ``training.checkpoint``: when to save, and how much to keep."""

    async_save: bool = False
    """Write in the background; training stops for one copy of the rank's tensors in host memory, held all the time."""
    save_interval: NonNegativeInt = 500
    """Optimizer steps between saves; 0 saves only at the end."""
    save_interval_minutes: NonNegativeFloat = 0.0
    """Also save when this many minutes have passed since the last save, by rank 0's clock; 0 is off."""
    max_keep: NonNegativeInt = 3
    """How many complete checkpoints stay on disk; 0 keeps all."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this stay for ever, and do not count in `max_keep`; 0 is off."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """What a save that failed does to training; the exit status is not zero either way."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """One item of ``training.parameter_groups``: what is different for the parameters that it matches."""

    match: str
    """A parameter's name, or several by `*`, `?` and `[...]` as in file names: `layers.*.attention.w[qk].weight`."""
    learning_rate_scale: NonNegativeFloat = 1.0
    """Factor of the learning rate at every step; 0 does not train the parameters (weight decay included)."""
    weight_decay: NonNegativeFloat | None = None
    """In place of `training.weight_decay`, on parameters of any shape; null changes nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The section ``training``: batch, optimizer, schedule, and the run's length."""

    batch_size: PositiveInt = 1
    """Sequences per card and micro-batch."""
    seq_len: PositiveInt = field(metadata={DEFAULT_FROM: "model.max_seq_len"})
    """Tokens per sequence."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step. Global batch = batch_size x data-parallel degree x this, in sequences."""
    learning_rate: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at which the schedule ends."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Decay from `learning_rate` to `min_lr` after the warm-up; constant has none, wsd only at the end."""
    decay_steps: NonNegativeInt | None = None
    """Optimizer steps at the end over which wsd (warm-up, stable, decay) falls linearly to `min_lr`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay; never on norms, biases and other 1-D parameters. AdamW's is decoupled, sgd adds it to gradients."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW (two fp32 moments per parameter) or stochastic gradient descent (one, or none without `momentum`)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    momentum: Fraction = 0.9
    """The decay rate of sgd's momentum; 0 keeps none."""
    optimizer_impl: Literal["fused", "foreach"] = "fused"
    """One kernel for the whole update, or a kernel per operation; they round differently, foreach needs more memory."""
    optimizer_state_dtype: Literal["fp32", "bf16"] = "fp32"
    """How adamw's moments are kept; bf16 halves them, rounded at random so that the mean stays. Updates are in fp32."""
    optimizer_state_offload: bool = False
    """Keep adamw's moments in the host's memory: less on the card, slower steps. Refused on the CPU."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Other settings for some parameters, by name; of those that match one, the first counts."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global 2-norm; null is off."""
    max_steps: PositiveInt
    """Length of the run in optimizer steps."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the data's order."""
    deterministic: bool = False
    """Use PyTorch's deterministic algorithms; an operator without one is an error."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute each block's activations in backward; selective keeps what is dear: attention, every second product."""
    log_interval: PositiveInt = 10
    """Optimizer steps between log lines; step 1 is always logged."""
    resume: str = "auto"
    """auto continues from the newest complete checkpoint, none starts afresh, anything else is a checkpoint's path."""
    loss_chunk_tokens: NonNegativeInt | None = None
    """Tokens whose logits are held at a time: same loss, less memory. 0 holds all; null: 1024."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the squared log of the softmax's denominator, added to the loss of each token; 0 is off."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save, and how much to keep."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The section ``parallel``: how ranks share the work, and in which number formats."""

    device: Literal["auto", "cpu", "npu"] = "auto"
    """Where ranks train: auto is an NPU each where torch_npu finds them, else the CPU."""
    dp_degree: DegreeOrRest = -1
    """Data-parallel degree; -1 is the ranks that the other degrees leave."""
    tp_degree: PositiveInt = 1
    """Tensor-parallel degree: neighbouring ranks compute each layer together, on sequences cut between the layers."""
    cp_degree: PositiveInt = 1
    """Context-parallel degree; reserved."""
    pp_degree: PositiveInt = 1
    """Pipeline-parallel degree; reserved."""
    ep_degree: PositiveInt = 1
    """Expert-parallel degree; reserved."""
    strategy: Literal["fsdp", "ddp", "hsdp"] = "fsdp"
    """fsdp shards parameters, gradients and optimizer; ddp replicates them; hsdp shards inside each group of ranks."""
    replicate_degree: PositiveInt = 1
    """Replicas of the sharded model, for hsdp; each has dp_degree / replicate_degree ranks, neighbours."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Number format of compute and of the gathered parameters; the master copy stays fp32. fp16 scales the loss."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which gradients are summed over ranks."""
    reshard_after_forward: bool | None = None
    """Free gathered parameters after each forward; null frees all but the root unit's."""
    bucket_cap_mb: PositiveFloat | None = 25.0
    """Largest collective in MiB of `dtype`; null is one bucket per unit. Speed and memory only, never numerics."""
    prefetch: UnitsAhead = 1
    """Units gathered ahead of use, in forward and in backward; each takes the memory of the largest one."""


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One item of ``data.mixture``: a corpus, and how many of the samples come from it."""

    path: str
    """A file, a directory or a glob of token files; relative to `--data_dir` where that is given."""
    weight: PositiveFloat = 1.0
    """The share of the samples is this divided by the sum over all items, whatever the corpora's sizes."""
    name: str | None = None
    """What the log calls it; null is the path."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The section ``data``: how documents become samples."""

    pack: bool = True
    """Join documents into full sequences; false gives each sample one document, padded."""
    append_eos: bool = False
    """Put `eos_id` after every document; for data that was prepared without it."""
    eos_id: NonNegativeInt | None = None
    """The token id that `append_eos` appends."""
    document_mask: bool = False
    """Keep attention inside a document when several share a sequence; false lets it reach back into earlier ones."""
    shuffle: bool = True
    """Take the samples in random order, another one each epoch, by `training.seed`; false takes the files' order."""
    mixture: tuple[MixturePart, ...] = ()
    """Several corpora, each with its share of the samples and epochs of its own; `--data_dir` is where they lie."""
    num_workers: NonNegativeInt = 1
    """Threads that hold the batches of one more optimizer step ready; 0 reads a batch when it is needed."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """The section ``validation``: the loss on held-out data."""

    interval: NonNegativeInt = 0
    """Optimizer steps between validations; the last step validates too. 0 is off."""
    data_dir: str | None = None
    """The held-out data: a file, a directory or a glob of prepared JSONL, as `--data_dir`."""
    max_samples: PositiveInt | None = None
    """Validate on the first so many samples of `training.seq_len` tokens; null takes all, each once."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The section ``profile``: steps to record, into `--log_dir`/profile."""

    start: PositiveInt = 10
    """First optimizer step that is recorded; the first few of a run are not typical."""
    steps: NonNegativeInt = 0
    """How many steps are recorded; 0 is off. Traces are large: a few steps are enough."""
    ranks: Literal["all"] | tuple[NonNegativeInt, ...] = (0,)
    """The ranks that record, each into a file of its own."""
    memory_snapshot: bool = False
    """Also record the allocations of these steps, for PyTorch's memory_viz; accelerators only."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run's configuration, checked and complete: presets and defaults are filled in."""

    model: ModelConfig
    training: TrainingConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    preset_overrides: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys whose value differs from the preset's: ``{"model.dim": (preset's value, value used)}``."""
    warnings: list[str] = field(default_factory=list)
    """What the user should know before the run starts, one line each; the command line logs them."""
    source: str = field(default="configuration", compare=False)
    """The file's name, for messages."""

    @property
    def loss_chunk_tokens(self) -> int:
        """``training.loss_chunk_tokens``, or what null stands for; 0: the loss reads the model's logits.

        Tensor-parallel ranks, which have some columns of the logits each, take all tokens as one chunk then.
        """
        training = self.training
        if training.loss_chunk_tokens is None:
            return _LOSS_CHUNK_TOKENS
        if training.loss_chunk_tokens == 0 and self.parallel.tp_degree > 1:
            return training.batch_size * training.seq_len
        return training.loss_chunk_tokens

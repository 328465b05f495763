"""Rules that need the number of ranks, which the file does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .errors import ConfigError, Problem
from .schema import Config

T = TypeVar("T")


@dataclass(frozen=True)
class Degrees:
    """How many ranks each kind of parallelism has; their product is the world size.

    Ranks are numbered along a mesh replicate x shard x tp, the last fastest: those that talk most are neighbours, which
    share a machine as a rule.
    """

    dp: int
    tp: int
    replicate: int = 1
    """Of the data-parallel ranks: copies of the sharded model."""

    @property
    def shard(self) -> int:
        """Ranks that shard one copy of the model."""
        return self.dp // self.replicate

    def dp_rank(self, rank: int) -> int:
        """Whose data ``rank`` reads: tensor-parallel ranks read the same."""
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        """Which part of each layer ``rank`` computes."""
        return rank % self.tp

    def once_per_dp_rank(self, rows: Sequence[T]) -> Sequence[T]:
        """Of something that every rank has told, what each data-parallel rank has: without tensor-parallel copies."""
        return rows[:: self.tp]


def validate_world(config: Config, world_size: int) -> Degrees:
    """The degrees of ``config.parallel`` on ``world_size`` ranks, with ``dp_degree: -1`` resolved.

    Raises:
        ConfigError: the degrees do not multiply to the world size.
    """
    dp, tp = config.parallel.dp_degree, config.parallel.tp_degree

    def fail(key: str, what: str) -> ConfigError:
        return ConfigError(config.source, [Problem(key, what)])

    if world_size < 1:
        raise fail("WORLD_SIZE", f"{world_size} is out of range; it must be >= 1")
    ranks = config.profile.ranks if config.profile.steps > 0 and config.profile.ranks != "all" else ()
    if ranks and max(ranks) >= world_size:
        raise fail(
            "profile.ranks", f"{max(ranks)} must be < WORLD_SIZE, which is {world_size}; name other ranks, or all"
        )
    if dp == -1:
        if world_size % tp != 0:
            raise fail(
                "parallel.tp_degree",
                f"{tp} must divide WORLD_SIZE, which is {world_size}; "
                f"start a multiple of {tp} ranks or change parallel.tp_degree",
            )
        return _with_replicas(config, world_size // tp, tp)
    if dp * tp != world_size:
        raise fail(
            "parallel.dp_degree",
            f"{dp} x parallel.tp_degree {tp} = {dp * tp}, but WORLD_SIZE is {world_size}; "
            f"start {dp * tp} ranks (torchrun --nproc_per_node) or set parallel.dp_degree to -1 (the rest)",
        )
    return _with_replicas(config, dp, tp)


def _with_replicas(config: Config, dp: int, tp: int) -> Degrees:
    replicate = config.parallel.replicate_degree
    if dp % replicate != 0:
        what = (
            f"{replicate} must divide the data-parallel degree, which is {dp} (WORLD_SIZE {dp * tp} / "
            f"parallel.tp_degree {tp}); start a multiple of {replicate * tp} ranks or change parallel.replicate_degree"
        )
        raise ConfigError(config.source, [Problem("parallel.replicate_degree", what)])
    return Degrees(dp=dp, tp=tp, replicate=replicate)


def configured_world_size(config: Config) -> int:
    """The number of ranks that the file alone asks for; 1 where ``dp_degree`` is -1 and nothing else is set."""
    parallel = config.parallel
    dp = parallel.replicate_degree if parallel.dp_degree == -1 else parallel.dp_degree
    return dp * parallel.tp_degree

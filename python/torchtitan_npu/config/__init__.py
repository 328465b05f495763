"""Configuration: one dataclass per YAML section; load, override, validate. Needs neither torch nor the native core."""

from __future__ import annotations

from .errors import ConfigError, Problem
from .load import config_from_dict, load_config, to_dict
from .parameter_groups import match_parameter_groups
from .presets import PRESETS, preset
from .run_args import RunArgs
from .schema import (
    CONFIG_VERSION,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    ParameterGroup,
    TrainingConfig,
)
from .world import Degrees, configured_world_size, validate_world

__all__ = [
    "CONFIG_VERSION",
    "PRESETS",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "Degrees",
    "ModelConfig",
    "ParallelConfig",
    "ParameterGroup",
    "Problem",
    "RunArgs",
    "TrainingConfig",
    "config_from_dict",
    "configured_world_size",
    "load_config",
    "match_parameter_groups",
    "preset",
    "to_dict",
    "validate_world",
]

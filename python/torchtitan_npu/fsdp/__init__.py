"""Fully sharded data parallel on the native engine."""

from torchtitan_npu._C import PeerError
from torchtitan_npu.fsdp.activation_checkpointing import recompute_activations
from torchtitan_npu.fsdp.average import MovingAverage
from torchtitan_npu.fsdp.clip import clip_grad_norm as clip_grad_norm_
from torchtitan_npu.fsdp.forward_method import register_forward_method
from torchtitan_npu.fsdp.full_params import full_params, walk_full_params
from torchtitan_npu.fsdp.grad_scaler import GradScaler
from torchtitan_npu.fsdp.grouping import fully_shard
from torchtitan_npu.fsdp.initialize import materialize
from torchtitan_npu.fsdp.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from torchtitan_npu.fsdp.piece import Piece
from torchtitan_npu.fsdp.plan import FSDPPlan, UnitInfo, plan_model
from torchtitan_npu.fsdp.policy import MixedPrecisionPolicy
from torchtitan_npu.fsdp.state_dict import StateDictType, save_full
from torchtitan_npu.fsdp.wrap import FSDP

__all__ = [
    "FSDP",
    "FSDPPlan",
    "GradScaler",
    "MixedPrecisionPolicy",
    "MovingAverage",
    "PeerError",
    "Piece",
    "StateDictType",
    "UnitInfo",
    "clip_grad_norm_",
    "full_params",
    "fully_shard",
    "load_optimizer_state_dict",
    "materialize",
    "optimizer_state_dict",
    "plan_model",
    "recompute_activations",
    "register_forward_method",
    "save_full",
    "walk_full_params",
]

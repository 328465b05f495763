"""First values of the sharded parameters: from the model as built, or, for a meta-device model, made unit by unit."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_npu.fsdp.mesh import RankGroup

logger = logging.getLogger(__name__)

ParamInitFn = Callable[[nn.Module], None]


def agree_on_seed(init_seed: int | None, ranks: RankGroup) -> int:
    """``init_seed``, or rank 0's ``torch.initial_seed()``: the same on all ranks."""
    if init_seed is not None:
        return init_seed
    seed = [torch.initial_seed()]
    if ranks.group is not None:
        dist.broadcast_object_list(seed, src=ranks.ranks[0], group=ranks.group)
    return seed[0]


def make_ranks_agree(tensors: dict[str, torch.Tensor], ranks: RankGroup) -> None:
    """Overwrites tensors that differ between ranks with those of the first rank, and says so. Collective."""
    if ranks.group is None or ranks.size == 1:
        return
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    everyone: list[dict[str, str]] = [{} for _ in range(ranks.size)]
    dist.all_gather_object(everyone, mine, group=ranks.group)
    differing = [name for name in mine if any(other.get(name) != everyone[0].get(name) for other in everyone)]
    if not differing:
        return
    if ranks.index == 0:
        logger.warning(
            "%d of %d parameters and buffers differed between ranks (first: %s): rank %d's values are used on all "
            "ranks. Seed all "
            "ranks alike before building the model to avoid this broadcast",
            len(differing),
            len(mine),
            differing[0],
            ranks.ranks[0],
        )
    for name in differing:
        with torch.no_grad():
            data = tensors[name].detach().contiguous()
            dist.broadcast(data, src=ranks.ranks[0], group=ranks.group)
            if data.data_ptr() != tensors[name].data_ptr():
                tensors[name].detach().copy_(data)


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).cpu().numpy().data, digest_size=16).hexdigest()


class MetaInitializer:
    """Makes the values of one unit at a time on the CPU, the same on every rank and for every grouping into units.

    Each module that holds parameters or buffers directly is materialised alone and initialised by ``param_init_fn`` or
    its own ``reset_parameters()``, with a random state that depends only on the seed and the module's name.
    """

    def __init__(self, model: nn.Module, seed: int, param_init_fn: ParamInitFn | None) -> None:
        self._seed = seed
        self._init = param_init_fn
        self._name_of = {module: name for name, module in model.named_modules()}
        # Parameters that several modules share stay shared. Keyed by the meta parameter, kept so that its id stays its
        # own.
        self._meta: list[nn.Parameter] = []
        self._made: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()

    def materialize(self, modules: Iterable[nn.Module]) -> None:
        """Gives real, initialised tensors to the meta parameters and buffers that ``modules`` hold directly."""
        for module in modules:
            tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
            if any(t.is_meta for t in tensors):
                self._materialize_one(module)

    def _materialize_one(self, module: nn.Module) -> None:
        name = self._name_of[module]
        where = f"module '{name}' ({type(module).__name__})" if name else f"the root module ({type(module).__name__})"
        made: list[str] = []
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                replacement = self._made.get(id(parameter))
                if replacement is None:
                    # A DTensor's whole: the values must not depend on how it is cut.
                    full = _unwritten(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu"))
                    replacement = nn.Parameter(full, requires_grad=parameter.requires_grad)
                    replacement.__dict__.update(parameter.__dict__)
                    self._made[id(parameter)] = replacement
                    self._meta.append(parameter)
                module._parameters[key] = replacement
                made.append(key)
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = _unwritten(torch.empty_like(buffer, device="cpu"))
                made.append(key)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_module_seed(self._seed, name))
            if self._init is not None:
                self._init(module)
            else:
                reset = getattr(module, "reset_parameters", None)
                if reset is None:
                    raise ValueError(
                        f"{where} is on the meta device and has no reset_parameters(): give FSDP a "
                        "param_init_fn(module), or build the model on the CPU"
                    )
                reset()
        for key in made:
            tensor = module._parameters.get(key, None) if key in module._parameters else module._buffers[key]
            if tensor is not None and tensor.numel() > 0 and _is_unwritten(tensor.detach()):
                raise ValueError(
                    f"'{name + '.' if name else ''}{key}' was on the meta device and was not initialised by "
                    f"{'param_init_fn' if self._init else 'reset_parameters'} of {where}: initialise it there "
                    f"(non-persistent "
                    "buffers too), or build the model on the CPU"
                )


def materialize(model: nn.Module, seed: int) -> nn.Module:
    """Initialises a whole meta-device model on the CPU with the values that ``FSDP(model, init_seed=seed)`` would
    give it.
    """
    MetaInitializer(model, seed, None).materialize(model.modules())
    return model


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        else:
            tensor.fill_(False)
    return tensor


def _is_unwritten(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return False  # no value could tell
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _module_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

"""Random programs: a model, its options and how it is used, as data; and what they must do, beside a plain copy.

``run_program`` runs one on every rank of a group. The plain copy on each rank sees the batches of all ranks one after
the other, and adds their gradients in the order in which the engine promises to: every number is compared bit for bit.
``fuzz.py`` draws them; the ``repr`` of a program is all that it takes to run it again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pool import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint
from twin import floats_for, part_of

from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy, StateDictType, fully_shard
from torchtitan_npu.fsdp.state import state_of

WIDTH = 7
"""Of every activation, (3, WIDTH): divides by no number of ranks."""

# ---- the model -------------------------------------------------------------------------------------------------------

LEAVES = ("linear", "mlp", "norm", "scalar", "odd", "lora", "experts", "sometimes", "silent") + (
    ("double",) if DEVICE == "cpu" else ()  # NPUs multiply no float64 matrices
)
CONTAINERS = ("list", "dict", "attributes")


@dataclass(frozen=True)
class Leaf:
    """A module without children that a program knows."""

    kind: str = "linear"
    unit: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Group:
    """A module that runs its children one after the other."""

    children: tuple[Leaf | Group, ...]
    container: str = "list"
    reverse: bool = False
    """Runs them in the reverse of the order in which they are registered."""
    output: str = "tensor"
    """``"tensor"``, or that in a ``"tuple"`` or ``"dict"``."""
    unit: bool = False


@dataclass(frozen=True)
class Options:
    grouping: str = "policy"
    """``"policy"``, ``"marks"`` (fully_shard), or ``"default"`` (items of the outermost lists)."""
    communicator: str = "auto"
    bucket_cap_mb: float | None = None
    reshard_after_forward: bool | None = None
    bfloat16: bool = False
    """param_dtype=bfloat16, reduce_dtype=float32."""


# ---- its use ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One forward of the root: runs the children ``path[0]``, ``path[1]``, …; ``~i`` runs child i and drops the output."""

    path: tuple[int, ...] = (0,)
    checkpoint: str = ""
    """``"children"``: each child under activation checkpointing; ``"pairs"``: two at a time; ``"whole"``: the root."""


@dataclass(frozen=True)
class Train:
    """Forwards, then backwards."""

    calls: tuple[Call, ...] = (Call(),)
    sync: bool = True
    backward: str = "sum"
    """``"sum"`` of all losses; ``"each"``, or ``"reversed"``: one by one; ``"twice"`` with retain_graph; ``"input"``:
    torch.autograd.grad with respect to the input; ``"drop"``: none."""
    between: str = ""
    """An evaluation between forward and backward, as ``Evaluate.mode``."""


@dataclass(frozen=True)
class Evaluate:
    call: Call = Call()
    mode: str = "no_grad"
    """``"no_grad"`` or ``"inference"``."""


@dataclass(frozen=True)
class Alone:
    """One child called by itself, where it is a unit; ``grad``: with a backward."""

    child: int = 0
    grad: bool = True


@dataclass(frozen=True)
class Fail:
    """An exception of the user's in a child's ``"forward"``, ``"backward"`` or ``"recompute"``; then zero_grad."""

    call: Call = Call()
    child: int = 0
    where: str = "forward"


@dataclass(frozen=True)
class Step:
    """optimizer.step()"""


@dataclass(frozen=True)
class Zero:
    set_to_none: bool = True


@dataclass(frozen=True)
class Reload:
    """Saves a state dict, compares it, halves its values and loads it."""

    kind: str = "sharded"
    """``"sharded"``, ``"local"`` or ``"full"``."""


Action = Train | Evaluate | Alone | Fail | Step | Zero | Reload


@dataclass(frozen=True)
class Program:
    model: Group
    actions: tuple[Action, ...]
    options: Options = Options()
    ties: tuple[tuple[int, int], ...] = ()
    """Pairs of leaves of kind "linear", by number: the second gets the weight of the first."""
    optimizer: str = "adamw"
    world_size: int = 2


# ---- modules ---------------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return torch.tanh(self.inner(x.to(self.inner.weight.dtype))).to(x.dtype)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.norm(x)


class Scalar(nn.Module):
    """A 0-d parameter, one of one element, and none else: fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return x * self.scale + self.shift


class Odd(nn.Module):
    """Empty and integer parameters beside an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 5))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.steps = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.flags = nn.Parameter(torch.arange(3, dtype=torch.int32), requires_grad=False)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        counts = (self.steps.sum() + self.flags.sum()).to(x.dtype) / 100
        return torch.tanh(x + self.bias) + counts + self.nothing.sum() + self.no_rows.sum()


class Lora(nn.Module):
    """A frozen weight and two small ones that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


class Experts(nn.Module):
    """Ranks use different parameters of it; one is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return torch.tanh(x @ self.weights[choice])


class Sometimes(nn.Module):
    """One parameter that only some ranks use: their gradients are complete earlier than the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        return x + self.extra if choice else x


class Silent(nn.Module):
    """Uses its parameter in a way that gives it no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return x * (1 + 0.1 * torch.tanh(self.weight.detach()))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "linear": Linear,
    "mlp": MLP,
    "norm": Norm,
    "scalar": Scalar,
    "odd": Odd,
    "lora": Lora,
    "experts": Experts,
    "sometimes": Sometimes,
    "double": lambda: Linear(torch.float64),
    "silent": Silent,
}


def unwrap(output: Any) -> torch.Tensor:
    if isinstance(output, tuple):
        return output[1]
    return output["hidden"] if isinstance(output, dict) else output


class Chain(nn.Module):
    """A ``Group``."""

    def __init__(self, spec: Group, children: list[nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        if spec.container == "list":
            self.items: Any = nn.ModuleList(children)
        elif spec.container == "dict":
            self.items = nn.ModuleDict({f"item{i}": child for i, child in enumerate(children)})
        else:
            for i, child in enumerate(children):
                setattr(self, f"child{i}", child)

    def child(self, index: int) -> nn.Module:
        if self.spec.container == "list":
            return self.items[index]
        return self.items[f"item{index}"] if self.spec.container == "dict" else getattr(self, f"child{index}")

    def forward(self, x: torch.Tensor, choice: int) -> Any:
        order = range(len(self.spec.children))
        for i in reversed(order) if self.spec.reverse else order:
            x = unwrap(self.child(i)(x, choice))
        return {"tensor": x, "tuple": (None, x), "dict": {"hidden": x, "none": None}}[self.spec.output]


class Root(Chain):
    """Runs the children that it is told to."""

    def __init__(self, spec: Group, children: list[nn.Module]) -> None:
        super().__init__(spec, children)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, choice: int, path: tuple[int, ...], checkpointed: str) -> torch.Tensor:
        def run(x: torch.Tensor, part: tuple[int, ...]) -> torch.Tensor:
            for i in part:
                output = self.child(max(i, ~i))(x, choice)
                x = unwrap(output) if i >= 0 else x
            return x

        width = {"children": 1, "pairs": 2}.get(checkpointed)
        if width is None:
            x = run(x, path)
        else:
            for begin in range(0, len(path), width):
                x = checkpoint(run, x, path[begin : begin + width], use_reentrant=False)
        return x * self.gain


def build(program: Program) -> Root:
    """The plain model, always with the same values."""
    torch.manual_seed(0)
    leaves: list[nn.Module] = []

    def make(spec: Leaf | Group) -> nn.Module:
        if isinstance(spec, Group):
            module: nn.Module = Chain(spec, [make(child) for child in spec.children])
        else:
            module = MAKERS[spec.kind]()
            if spec.frozen:
                module.requires_grad_(False)
            leaves.append(module)
        module.is_unit = spec.unit  # type: ignore[assignment]
        return module

    root = Root(program.model, [make(child) for child in program.model.children])
    for first, second in program.ties if leaves else ():
        a, b = leaves[first % len(leaves)], leaves[second % len(leaves)]
        if type(a) is type(b) is Linear and a.inner.weight.dtype == b.inner.weight.dtype:
            b.inner.weight = a.inner.weight
    return root.to(DEVICE)


def wrap(program: Program) -> Any:
    options = program.options
    model = build(program)
    arguments: dict[str, Any] = {
        "communicator": options.communicator,
        "bucket_cap_mb": options.bucket_cap_mb,
        "reshard_after_forward": options.reshard_after_forward,
    }
    if options.bfloat16:
        arguments["mixed_precision"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if options.grouping == "policy":
        arguments["auto_wrap_policy"] = lambda module: getattr(module, "is_unit", False)
    elif options.grouping == "marks":
        for module in model.modules():
            if getattr(module, "is_unit", False):
                fully_shard(module)
    return FSDP(model, **arguments)


# ---- running one -----------------------------------------------------------------------------------------------------


class Boom(Exception):
    """The user's exception."""


class Run:
    """One program on this rank."""

    def __init__(self, program: Program) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.program = program
        self.plain = build(program)
        # What the plain side computes with: under mixed precision a copy in bfloat16, filled before each use.
        self.compute = copy.deepcopy(self.plain).to(torch.bfloat16) if program.options.bfloat16 else self.plain
        self.model = wrap(program)
        self.state = state_of(self.model)
        self.masters = dict(self.plain.named_parameters())
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in range(self.size)]
        self.batch = 0
        make = torch.optim.AdamW if program.optimizer == "adamw" else torch.optim.SGD
        extra: dict[str, Any] = {} if program.optimizer == "adamw" else {"momentum": 0.9}
        self.ours = make([p for p in self.model.parameters() if p.requires_grad], lr=1e-2, **extra)
        self.theirs = make([p for p in self.plain.parameters() if p.requires_grad], lr=1e-2, **extra)

    def run(self) -> None:
        for number, action in enumerate(self.program.actions):
            try:
                getattr(self, f"do_{type(action).__name__.lower()}")(action)
                self.check_state()
            except Exception as error:
                raise AssertionError(f"in action {number}: {action}") from error

    # ---- the plain side

    def fill_compute(self) -> None:
        if self.compute is not self.plain:
            with torch.no_grad():
                for name, p in self.compute.named_parameters():
                    p.copy_(self.masters[name])

    def inputs(self, batch: int, rank: int) -> tuple[torch.Tensor, int]:
        return floats_for(batch, rank, 3, WIDTH).requires_grad_(), (batch + rank) % 2

    def forward(self, model: Any, call: Call, x: torch.Tensor, choice: int) -> torch.Tensor:
        if self.compute is not self.plain and model is self.compute:
            x = x.to(torch.bfloat16)
        if call.checkpoint == "whole":
            return checkpoint(model, x, choice, self.clipped(call), "", use_reentrant=False)
        return model(x, choice, self.clipped(call), call.checkpoint)

    def clipped(self, call: Call) -> tuple[int, ...]:
        n = len(self.program.model.children)
        return tuple(i % n if i >= 0 else ~(~i % n) for i in call.path) if n else ()

    def plain_gradients(self) -> dict[str, torch.Tensor]:
        """What the last backward gave, taken away from the parameters."""
        found = {n: p.grad for n, p in self.compute.named_parameters() if p.grad is not None}
        for p in self.compute.parameters():
            p.grad = None
        return found

    def end_round(self, of_ranks: list[dict[str, torch.Tensor]], sync: bool, kept: dict[str, Any]) -> None:
        """Adds what a backward gave on each rank to the plain gradients ``kept``, as the engine promises to."""
        for name, master in self.masters.items():
            parts = []
            for held, new in zip(self.held, of_ranks, strict=True):
                gradient = new.get(name)
                narrow = gradient is not None and gradient.dtype.itemsize < 4
                if not sync:
                    if gradient is not None:
                        gradient = gradient.float() if narrow else gradient
                        held[name] = held[name] + gradient if name in held else gradient
                    continue
                if name in held:
                    before = held.pop(name)
                    total = before if gradient is None else gradient.to(before.dtype) + before
                    gradient = total.to(torch.bfloat16) if self.compute is not self.plain else total
                parts.append(gradient)
            if sync and any(part is not None for part in parts):
                wide = torch.float64 if parts_dtype(parts) == torch.float64 else torch.float32
                summed = sum_in_order(parts, master.shape, wide) / self.size
                summed = summed.to(master.dtype)
                kept[name] = kept[name] + summed if kept.get(name) is not None else summed

    # ---- actions

    def do_train(self, action: Train) -> None:
        batches = [self.batch + i for i in range(len(action.calls))]
        self.batch += len(batches)
        self.fill_compute()
        kept: dict[str, Any] = {n: p.grad for n, p in self.masters.items()}
        for p in self.plain.parameters():
            p.grad = None

        def losses_of(model: Any, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            inputs = [self.inputs(batch, rank) for batch in batches]
            outputs = [self.forward(model, c, *i) for c, i in zip(action.calls, inputs, strict=True)]
            return [o.float().pow(2).mean() for o in outputs], [x for x, _ in inputs]

        def backwards(losses: list[torch.Tensor], xs: list[torch.Tensor]) -> list[Callable[[], Any]]:
            if action.backward == "sum":
                return [lambda: torch.stack(losses).sum().backward()]
            if action.backward == "twice":
                total = torch.stack(losses).sum()
                return [lambda: total.backward(retain_graph=True), total.backward]
            if action.backward == "input":
                return [lambda: torch.autograd.grad(torch.stack(losses).sum(), xs)]
            if action.backward == "drop":
                return []
            order = losses if action.backward == "each" else losses[::-1]
            return [loss.backward for loss in order]

        with nullcontext() if action.sync else self.model.no_sync():
            losses, xs = losses_of(self.model, self.rank)
            if action.between:
                self.do_evaluate(Evaluate(action.calls[0], action.between))
            input_gradients = [run() for run in backwards(losses, xs)]

        rounds: list[list[dict[str, torch.Tensor]]] = []
        for rank in range(self.size):
            plain_losses, plain_xs = losses_of(self.compute, rank)
            if rank == self.rank:
                for ours, theirs in zip(losses, plain_losses, strict=True):
                    assert torch.equal(ours, theirs), f"loss {ours.item()}, plain {theirs.item()}"
            for i, run in enumerate(backwards(plain_losses, plain_xs)):
                want = run()
                if rank == self.rank and want is not None:
                    assert all(torch.equal(a, b) for a, b in zip(input_gradients[i], want, strict=True)), "input grads"
                rounds[i:] = rounds[i:] or [[]]
                rounds[i].append(self.plain_gradients())
            if rank == self.rank and action.backward not in ("drop", "input"):
                for ours, theirs in zip(xs, plain_xs, strict=True):
                    assert torch.equal(ours.grad, theirs.grad), "gradient of the input"
        for of_ranks in rounds:
            self.end_round(of_ranks, action.sync, kept)
        for n, p in self.masters.items():
            p.grad = kept.get(n)

    def do_evaluate(self, action: Evaluate) -> None:
        x, choice = self.inputs(self.batch, self.rank)
        self.batch += 1
        self.fill_compute()
        with torch.no_grad() if action.mode == "no_grad" else torch.inference_mode():
            ours = self.forward(self.model, action.call, x.detach(), choice)
            theirs = self.forward(self.compute, action.call, x.detach(), choice)
        assert torch.equal(ours, theirs), f"output is off by {(ours - theirs).abs().max().item()}"

    def do_alone(self, action: Alone) -> None:
        children = self.program.model.children
        if not children or self.program.ties:
            return
        index = action.child % len(children)
        module = self.model.child(index)
        if not any(module in unit.modules for unit in self.plan_units()[1:]):
            return
        batch, self.batch = self.batch, self.batch + 1
        self.fill_compute()
        dtype = torch.bfloat16 if self.program.options.bfloat16 else torch.float32

        def run(child: nn.Module, rank: int) -> torch.Tensor:
            x, choice = self.inputs(batch, rank)
            return unwrap(child(x.to(dtype) if child is not module else x, choice)).float().pow(2).mean()

        with nullcontext() if action.grad else torch.no_grad():
            loss = run(module, self.rank)
            kept: dict[str, Any] = {n: p.grad for n, p in self.masters.items()}
            for p in self.plain.parameters():
                p.grad = None
            of_ranks = []
            for rank in range(self.size):
                theirs = run(self.compute.child(index), rank)
                if rank == self.rank:
                    assert torch.equal(loss, theirs), f"loss {loss.item()}, plain {theirs.item()}"
                if action.grad:
                    theirs.backward()
                of_ranks.append(self.plain_gradients())
        if action.grad:
            loss.backward()
            self.end_round(of_ranks, True, kept)
        for n, p in self.masters.items():
            p.grad = kept.get(n)

    def plan_units(self) -> Any:
        return self.state.plan.module_units

    def do_fail(self, action: Fail) -> None:
        children = self.program.model.children
        path = self.clipped(action.call)
        child = action.child % len(children) if children else -1
        if child not in [max(i, ~i) for i in path]:
            return

        def trip(*_: Any) -> None:
            raise Boom

        def trip_in_backward(module: nn.Module, args: Any, output: Any) -> None:
            if unwrap(output).requires_grad:
                unwrap(output).register_hook(trip)

        def trip_in_recompute(*_: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                raise Boom

        module = self.model.child(child)
        if action.where == "forward":
            handle = module.register_forward_hook(trip)
        elif action.where == "backward":
            handle = module.register_forward_hook(trip_in_backward)
        else:
            handle = module.register_forward_pre_hook(trip_in_recompute)
        x, choice = self.inputs(self.batch, self.rank)
        self.batch += 1
        in_backward = False
        try:
            loss = self.forward(self.model, action.call, x, choice).float().pow(2).mean()
            in_backward = True
            loss.backward()
        except Boom:
            assert in_backward == (action.where != "forward")
        handle.remove()
        if in_backward:  # finished or not
            for held in self.held:
                held.clear()
        self.do_zero(Zero())

    def do_step(self, action: Step) -> None:
        self.ours.step()
        self.theirs.step()

    def do_zero(self, action: Zero) -> None:
        self.model.zero_grad(set_to_none=action.set_to_none)
        for p in self.plain.parameters():
            if action.set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def do_reload(self, action: Reload) -> None:
        kind = {
            "full": StateDictType.FULL_STATE_DICT,
            "sharded": StateDictType.SHARDED_STATE_DICT,
            "local": StateDictType.LOCAL_STATE_DICT,
        }[action.kind]
        with FSDP.state_dict_type(self.model, kind):
            saved = self.model.state_dict()
        want = self.plain.state_dict()
        if kind is StateDictType.FULL_STATE_DICT:
            assert list(saved) == (list(want) if self.rank == 0 else [])
            assert all(torch.equal(saved[key], want[key].cpu()) for key in saved)
            halved = {key: value * 0.5 if value.is_floating_point() else value for key, value in want.items()}
            self.model.load_state_dict(halved)
        else:
            assert list(saved) == list(want)
            with torch.no_grad():
                for p in self.model.parameters():  # what was saved must be a picture of before, or alias: load decides
                    if p.is_floating_point():
                        p.mul_(0.5)
            with FSDP.state_dict_type(self.model, kind):
                self.model.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            for p in self.plain.parameters():
                if p.is_floating_point():
                    p.mul_(0.5)

    # ---- what must hold after each action

    def check_state(self) -> None:
        assert not self.state.engine.in_backward
        for param in self.state.params:
            plain = self.masters[param.name]
            got, want = param.sharded.detach(), part_of(param, plain)
            assert torch.equal(got, want), f"'{param.name}' is off by {(got - want).abs().max().item()}"
            gradient = param.sharded.grad
            if plain.grad is None:
                assert gradient is None, f"'{param.name}' has a gradient, the plain model none"
                continue
            assert gradient is not None, f"'{param.name}' has no gradient"
            want = part_of(param, plain.grad)
            assert torch.equal(gradient, want), f"gradient of '{param.name}' is off by {(gradient - want).abs().max()}"
        for name, p in self.model.named_parameters():
            assert p is self.state_param(name).sharded, f"the module holds the gathered '{name}'"

    def state_param(self, name: str) -> Any:
        return next(param for param in self.state.params if name in param.names)


def parts_dtype(parts: list[torch.Tensor | None]) -> torch.dtype:
    return next(part.dtype for part in parts if part is not None)


def sum_in_order(parts: list[torch.Tensor | None], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(shape, dtype=dtype, device=DEVICE)
    for part in parts:
        if part is not None:
            total = total + part.to(dtype)
    return total


def run_program(program: Program) -> None:
    """On every rank of a group of ``program.world_size``."""
    Run(program).run()

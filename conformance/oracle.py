"""The unsharded truth: all ranks of a scenario, one after the other, on one parameter set.

Virtual ranks share the parameters; each has its own batches, buffers and random number stream.
The gradient is the sum over ranks, in rank order, of the gradient of each rank's mean loss, divided
by the number of ranks; then one optimizer steps once. Imports no wrapper.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conformance import models
from conformance.adapter import (
    Adapter,
    BuildConfig,
    Conventions,
    LossFn,
    OptimizerFactory,
    StateKind,
    StepResult,
    Wrapped,
    clean_fqn,
    named_parameters,
    to_cpu,
)
from conformance.names import CAPABILITIES
from conformance.oracle_precision import Precision, in_full, nudged
from conformance.per_rank import PerRank

BufferKey = tuple[str, str]  # (path of the owning module, name of the buffer)


@dataclass(kw_only=True)
class VirtualState:
    """What the virtual ranks of one model hold apart from each other.

    What the model consists of is noted once: its modules and parameters stay, and to find them
    again takes longer than a small model's forward.

    Attributes:
        owners: path to each module of the model.
        parameters: the model's, each once.
        named: the same with their FQNs, a tied one once per name.
        buffers: per rank, (module path, buffer name) to tensor.
        rng: per rank, the state of the CPU and of the accelerator generator.
        gradients: per rank, one entry per trainable parameter, accumulated over micro-batches.
        waiting: the part of them that no reduction has taken, in the dtype in which it waits.
        last_micro: the same, of the newest backward only.
        reduces: whether a backward ends in a reduction.
        unit_classes: of the modules that are units.
        exact: parameters as they were built, without any rounding error; ``None`` if nobody asks.
    """

    owners: Mapping[str, nn.Module]
    parameters: Sequence[nn.Parameter]
    named: Sequence[tuple[str, nn.Parameter]]
    buffers: list[dict[BufferKey, Tensor | None]]
    rng: list[tuple[Tensor, Tensor | None]]
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    waiting: list[list[Tensor | None]] = field(default_factory=list)
    last_micro: list[list[Tensor | None]] = field(default_factory=list)
    reduces: bool = True
    unit_classes: tuple[type[nn.Module], ...] = ()
    exact: list[Tensor] | None = None

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters that take gradients now."""
        return [p for p in self.parameters if p.requires_grad]


class InMemory(Adapter):
    """Optimizer states of any kind are copies of one and the same."""

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> Any:
        """A copy of the optimizer's state dict, whatever the kind."""
        return copy.deepcopy(w.optimizer.state_dict())

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Any) -> None:
        """Load it."""
        w.optimizer.load_state_dict(state)


class VirtualRanks(InMemory):
    """The oracle, in the shape of an adapter, so that it runs the very same scenarios.

    Batches and losses are `PerRank`. `reverse` accumulates ranks in the other order: same
    mathematics, other rounding, which is how the oracle's own noise is measured. So is it with
    `nudge`, where a low dtype rounds: what it may round to either side goes to the other one.
    """

    def __init__(  # noqa: PLR0913 - whose truth, and what tells one run of it from another
        self,
        world: int,
        conventions: Conventions,
        capabilities: frozenset[str],
        *,
        seed: int,
        reverse: bool = False,
        nudge: bool = False,
        saved: dict[Path, tuple[Any, Any]] | None = None,
    ) -> None:
        """An oracle of `world` ranks that keeps the conventions of the adapter compared with it.

        Another one that is given the same `saved` loads what this one saves.
        """
        self.world = world
        # who divides the loss makes no difference to the truth: here the caller always does
        self.conventions = replace(conventions, loss_divided_by_accumulation=False)
        self.capabilities = frozenset(CAPABILITIES) & (
            capabilities | {"gradients", "model_state.full", "optim_state.full"}
        )
        self.seed = seed
        self.precision = Precision.of(conventions)
        self._nudge = torch.Generator().manual_seed(seed) if nudge else None
        self._saved = {} if saved is None else saved
        self.order = range(world - 1, -1, -1) if reverse else range(world)

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """The bare model with its optimizer, and fresh virtual ranks around them."""
        self.precision.prepare(model, config.units)
        state = VirtualState(
            owners=dict(model.named_modules()),
            parameters=list(model.parameters()),
            named=list(named_parameters(model)),
            buffers=[_clone_buffers(model) for _ in range(self.world)],
            rng=[_seeded(self.seed, rank) for rank in range(self.world)],
            unit_classes=config.units,
        )
        if self._nudge is not None:
            state.exact = [p.detach().clone() for p in model.parameters()]
        optimizer = make_optimizer(p for p in model.parameters())
        wrapped = Wrapped(module=model, optimizer=optimizer, native=state)
        self._reset(wrapped)
        return wrapped

    def step(
        self,
        w: Wrapped,
        micro_batches: Sequence[Any],
        loss_fn: LossFn,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> StepResult:
        """The adapter's step over virtual ranks."""
        self._take_over_buffers(w)
        return super().step(w, micro_batches, loss_fn, max_norm=max_norm, norm_type=norm_type)

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Any:
        """The loss of every rank."""
        losses = []
        for rank in range(self.world):
            with _as_rank(w.native, rank), self._computing(w):
                losses.append(loss_fn(w.module, batch.values[rank]))
        return PerRank(tuple(losses))

    def backward(self, w: Wrapped, loss: Any) -> None:
        """Accumulate every rank's gradient, then set ``.grad`` to what reduction would leave."""
        parameters = w.native.trainable
        low = self.precision.lowers  # rounds what waits, and at each reduction
        for rank in range(self.world):
            with self._computing(w):  # a part may be computed again
                own = torch.autograd.grad(loss.values[rank], parameters, allow_unused=True)
            fresh = [self.precision.arrived(gradient) for gradient in own]
            w.native.last_micro[rank] = fresh
            w.native.gradients[rank] = [
                add(old, new) for old, new in zip(w.native.gradients[rank], fresh, strict=True)
            ]
            if low:
                w.native.waiting[rank] = [
                    self._added(old, new)
                    for old, new in zip(w.native.waiting[rank], own, strict=True)
                ]
        if not w.native.reduces:
            return
        reduced = self.reduced(w, w.native.waiting if low else w.native.gradients)
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.grad = add(parameter.grad, gradient) if low else gradient
        w.native.waiting = self._none(w)

    @contextmanager
    def no_sync(self, w: Wrapped) -> Iterator[None]:
        """Inside, gradients wait."""
        w.native.reduces = False
        try:
            yield
        finally:
            w.native.reduces = True

    def reduced(
        self, w: Wrapped, of_rank: Sequence[Sequence[Tensor | None]]
    ) -> list[Tensor | None]:
        """What reduction makes of every rank's gradients of all trainable parameters."""
        parameters = w.native.trainable
        found = [
            self._reduced_as_sent(parameter, [of_rank[rank][index] for rank in self.order])
            for index, parameter in enumerate(parameters)
        ]
        if all(gradient is not None for gradient in found):
            return found
        units = units_of(w.module, w.native.unit_classes)
        return with_declared_zeros(found, parameters, units, self.conventions)

    def _reduced_as_sent(
        self, parameter: nn.Parameter, parts: Sequence[Tensor | None]
    ) -> Tensor | None:
        """The ranks' gradients of `parameter`, reduced in the declared dtype, in its own."""
        own = parameter.dtype
        found = self.reduce([self.precision.sent(part, own) for part in parts])
        if found is None:
            return None
        if self._nudge is not None and found.dtype != own:
            found = nudged(found, self._nudge)
        return found.to(own)

    def reduce(self, parts: Sequence[Tensor | None]) -> Tensor | None:
        """What reduction makes of the ranks' gradients of one parameter."""
        total: Tensor | None = None
        for part in parts:
            total = add(total, part)
        if total is None:
            return None
        # never a rank's own gradient, which clipping would then change
        return total.clone() if self.conventions.gradients == "sum" else total / self.world

    def zero_grad(self, w: Wrapped) -> None:
        """Drop the reduced gradients and every rank's own."""
        super().zero_grad(w)
        self._reset(w)

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Any:
        """The evaluation loss of every rank."""
        self._take_over_buffers(w)
        w.module.eval()
        with torch.no_grad():
            losses = self.forward(w, batch, loss_fn)
        w.module.train()
        return losses

    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        """See `Adapter`; names are known, and nothing is cut."""
        return dict[str, Tensor](w.native.named)

    def full_gradients(self, w: Wrapped) -> dict[str, Tensor | None]:
        """As above."""
        return {fqn: parameter.grad for fqn, parameter in w.native.named}

    def full_optimizer_state(self, w: Wrapped) -> dict[str, dict[str, Any]]:
        """As above."""
        states = ((fqn, w.optimizer.state.get(parameter)) for fqn, parameter in w.native.named)
        return {fqn: dict(state) for fqn, state in states if state is not None}

    def buffers(self, w: Wrapped) -> Any:
        """Every rank's buffers."""
        return PerRank(
            tuple(
                {
                    clean_fqn(f"{path}.{name}" if path else name): to_cpu(value)
                    for (path, name), value in buffers.items()
                    if value is not None
                }
                for buffers in w.native.buffers
            )
        )

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> Any:
        """Every rank's state dict: the shared parameters with that rank's buffers."""
        states: list[dict[str, Tensor]] = []
        for rank in range(self.world):
            with _as_rank(w.native, rank):
                held = {} if rank0_only and rank else w.module.state_dict()
                states.append(
                    {k: to_cpu(v) if cpu else v.detach().clone() for k, v in held.items()}
                )
        return PerRank(tuple(states))

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Any) -> None:
        """Load every rank's state dict, or rank 0's on ranks without one."""
        for rank in range(self.world):
            own = state.values[rank] if rank < len(state.values) else {}
            with _as_rank(w.native, rank):
                w.module.load_state_dict(own or state.values[0])

    def save(self, w: Wrapped, directory: Path) -> None:
        """Keep both states in memory, under the directory's name."""
        self._saved[directory] = (self.model_state(w, "full"), self.optim_state(w, "full"))

    def load(self, w: Wrapped, directory: Path) -> None:
        """Load what `save` kept, perhaps that of another oracle."""
        model, optimizer = self._saved[directory]
        self.load_model_state(w, "full", model)
        self.load_optim_state(w, "full", optimizer)

    def losses_of(self, module: nn.Module, batch: Any, loss_fn: LossFn) -> PerRank:
        """Every rank's loss, outside any rank's random numbers."""
        with self.precision.computing(module):
            return PerRank(tuple(loss_fn(module, b) for b in batch.values))

    def losses_in_full(self, module: nn.Module, batch: Any, loss_fn: LossFn) -> PerRank | None:
        """The same with the master weights, if wrappers compute with copies in a low dtype."""
        if self.precision.computed is None:
            return None
        full = in_full(module)
        return PerRank(tuple(loss_fn(full, b) for b in batch.values))

    def big_batch(
        self, w: Wrapped, module: nn.Module, batches: Sequence[Any], loss_fn: LossFn
    ) -> list[Tensor | None]:
        """Reduced gradient of one batch that holds all `batches` of a rank."""
        parameters = trainable(module)
        of_rank: list[list[Tensor | None]] = []
        for rank in range(self.world):
            with self.precision.computing(module):
                loss = loss_fn(module, models.concatenate([b.values[rank] for b in batches]))
                of_rank.append(list(torch.autograd.grad(loss, parameters, allow_unused=True)))
        return self.reduced(w, of_rank)

    def rank_gradients(self, w: Wrapped) -> PerRank:
        """Every rank's own gradients before reduction, FQN to tensor."""
        return PerRank(tuple(_by_fqn(w.native, grads) for grads in w.native.gradients))

    def newest_gradients(self, w: Wrapped) -> PerRank:
        """The same, of the newest micro-batch alone."""
        return PerRank(tuple(_by_fqn(w.native, grads) for grads in w.native.last_micro))

    def reduced_last_micro(self, w: Wrapped) -> dict[str, Tensor]:
        """What reduction would leave if the newest micro-batch were the only one."""
        return _by_fqn(w.native, self.reduced(w, w.native.last_micro))

    def _added(self, old: Tensor | None, new: Tensor | None) -> Tensor | None:
        """What waits after a backward: a sum that is rounded once, to the dtype in which it waits.

        Right is also who rounds what comes before adding it, and who adds a unit that is called
        twice in another order.
        """
        waiting = self.precision.waiting
        if old is None or new is None or waiting is None:
            return add(old, self.precision.arrived(new))
        if self._nudge is None:
            return (old + new).to(waiting)
        return nudged(old + new.to(waiting), self._nudge)

    def _computing(self, w: Wrapped) -> AbstractContextManager[None]:
        return self.precision.computing(w.module, w.native.exact)

    def _reset(self, w: Wrapped) -> None:
        w.native.gradients, w.native.last_micro = self._none(w), self._none(w)
        w.native.waiting = self._none(w)

    def _none(self, w: Wrapped) -> list[list[Tensor | None]]:
        count = len(w.native.trainable)
        return [[None] * count for _ in range(self.world)]

    def _take_over_buffers(self, w: Wrapped) -> None:
        if self.conventions.buffers == "rank0":
            for rank in range(1, self.world):
                w.native.buffers[rank] = {
                    key: None if b is None else b.clone() for key, b in w.native.buffers[0].items()
                }


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that take gradients, each once."""
    return [p for p in module.parameters() if p.requires_grad]


def by_fqn(module: nn.Module, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """FQN to gradient on CPU, of `module`'s trainable parameters that have one.

    Not a copy if it is there: nothing changes a rank's gradient in place.
    """
    return _named(trainable(module), named_parameters(module), gradients)


def _by_fqn(state: VirtualState, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The same of the model that `state` belongs to."""
    return _named(state.trainable, state.named, gradients)


def _named(
    parameters: Sequence[nn.Parameter],
    named: Iterable[tuple[str, nn.Parameter]],
    gradients: Sequence[Tensor | None],
) -> dict[str, Tensor]:
    by_id = {id(p): g for p, g in zip(parameters, gradients, strict=True)}
    found = {fqn: by_id.get(id(p)) for fqn, p in named}
    return {fqn: g.detach().to("cpu") for fqn, g in found.items() if g is not None}


def with_declared_zeros(
    found: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
    units: Sequence[str],
    conventions: Conventions,
) -> list[Tensor | None]:
    """Reduced gradients `found`, with zeros where `conventions` declares them for unused ones.

    `units` holds the path of the unit around each parameter.
    """
    declared = conventions.unused_grad
    pairs = zip(units, found, strict=True)
    used = {unit for unit, gradient in pairs if gradient is not None}
    return [
        torch.zeros_like(parameter)
        if gradient is None and (declared == "zero" or (declared == "unit" and unit in used))
        else gradient
        for parameter, gradient, unit in zip(parameters, found, units, strict=True)
    ]


def units_of(module: nn.Module, units: tuple[type[nn.Module], ...]) -> list[str]:
    """Path of the innermost unit around each trainable parameter; empty for the root."""
    inner = [path for path, part in module.named_modules() if isinstance(part, units)]
    paths = [f"{path}." for path in inner if path]
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    return [max((p for p in paths if name.startswith(p)), key=len, default="") for name in names]


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Sum of two gradients, either of which may be missing."""
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _clone_buffers(module: nn.Module) -> dict[BufferKey, Tensor | None]:
    return {
        (path, name): None if buffer is None else buffer.clone()
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
    }


def _seeded(seed: int, rank: int) -> tuple[Tensor, Tensor | None]:
    """Generator states as a rank has them after `torch.manual_seed` with its own seed."""
    with torch.random.fork_rng():
        if torch.accelerator.is_available():
            torch.manual_seed(rank_seed(seed, rank))
        else:  # torch.manual_seed would note its caller's stack for every absent accelerator
            torch.default_generator.manual_seed(rank_seed(seed, rank))
        return _rng_state()


def rank_seed(seed: int, rank: int) -> int:
    """Seed of one rank's random number stream."""
    return seed * 1000 + rank


def _rng_state() -> tuple[Tensor, Tensor | None]:
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(accelerator).get_rng_state()


def _set_rng_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        accelerator = torch.accelerator.current_accelerator()
        torch.get_device_module(accelerator).set_rng_state(state[1])


@contextmanager
def _as_rank(state: VirtualState, rank: int) -> Iterator[None]:
    """Inside, the model has the buffers of `rank` and random numbers are that rank's."""
    owners = state.owners
    outside = _rng_state()
    for (path, name), buffer in state.buffers[rank].items():
        owners[path]._buffers[name] = buffer
    _set_rng_state(state.rng[rank])
    try:
        yield
    finally:
        state.buffers[rank] = {
            (path, name): owners[path]._buffers[name] for path, name in state.buffers[rank]
        }
        state.rng[rank] = _rng_state()
        _set_rng_state(outside)

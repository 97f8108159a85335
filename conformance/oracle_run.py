"""A run of a scenario for the truth: the common program, plus what helps to name a cause."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from conformance.adapter import (
    LossFn,
    OptimizerFactory,
    Wrapped,
    ignore,
    named_parameters,
    to_cpu,
)
from conformance.oracle import trainable, units_of
from conformance.scenarios.run import Clip, Run, Watch, Writer


class Truth(Protocol):
    """What an adapter offers that says what is right: the oracle's, or the baseline's on one rank.

    What differs between ranks is `PerRank` in the oracle.
    """

    def losses_of(self, module: nn.Module, batch: Any, loss_fn: LossFn) -> Any:
        """The loss of `module`, which is not the wrapped one."""

    def losses_in_full(self, module: nn.Module, batch: Any, loss_fn: LossFn) -> Any:
        """The same without low dtypes; ``None`` if there are none."""

    def big_batch(
        self, w: Wrapped, module: nn.Module, batches: Sequence[Any], loss_fn: LossFn
    ) -> list[Tensor | None]:
        """Reduced gradient of the trainable parameters for one batch that holds all `batches`."""

    def rank_gradients(self, w: Wrapped) -> Any:
        """Each rank's own gradients before reduction, FQN to tensor."""

    def newest_gradients(self, w: Wrapped) -> Any:
        """The same, of the newest micro-batch alone."""

    def reduced_last_micro(self, w: Wrapped) -> dict[str, Tensor]:
        """What reduction would leave if the newest micro-batch were the only one."""


@dataclass(kw_only=True)
class OracleWatch(Watch):
    """Also copies every rank's own gradient before reduction.

    Attributes:
        of_rank: every rank's own gradients.
        last_micro: what reduction would leave of the newest micro-batch alone.
        of_micro: every rank's own gradients of each micro-batch of the first step.
        weights: those with which the gradients were made.
        doubled: what would be left if every backward added to what was there what was there.
    """

    of_rank: Any = None
    last_micro: dict[str, Tensor] = field(default_factory=dict)
    of_micro: list[Any] = field(default_factory=list)
    weights: list[Tensor] | None = None
    doubled: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, moment: str, index: int = 0) -> None:
        """See `Watch`."""
        super().__call__(moment, index)
        truth = cast(Truth, self.run.adapter)
        if moment == "backward" and self.run.case.accumulation > 1:
            if self.step == 0:
                self.of_micro.append(truth.newest_gradients(self.wrapped))
            self.last_micro = newest = truth.reduced_last_micro(self.wrapped)
            before = {fqn: 2 * gradient for fqn, gradient in self.doubled.items()}
            added = {k: newest[k] + before[k] if k in before else newest[k] for k in newest}
            self.doubled = {**before, **added}
        if moment == "gradients":
            self.of_rank = truth.rank_gradients(self.wrapped)
            self.last_micro = self.last_micro or truth.reduced_last_micro(self.wrapped)
            self.weights = _copies(self.run.adapter.bare(self.wrapped))


class Tape:
    """Writes with a writer, and keeps the calls, so that another one can be given them again."""

    def __init__(self, writer: Writer) -> None:
        """Nothing is kept yet."""
        self._writer = writer
        self.calls: list[Callable[[Writer], None]] = []

    def begin_phase(self, name: str) -> None:
        """See `Writer`."""
        self._keep(lambda writer: writer.begin_phase(name))

    def end_phase(self, error: str | None = None, traceback: str = "") -> None:
        """See `Writer`."""
        self._keep(lambda writer: writer.end_phase(error, traceback))

    def write(self, what: str, value: Any, **where: Any) -> None:
        """See `Writer`."""
        self._keep(lambda writer: writer.write(what, value, **where))

    def _keep(self, call: Callable[[Writer], None]) -> None:
        call(self._writer)
        self.calls.append(call)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What running a part of a program came to.

    Attributes:
        written: its calls of a writer.
        left: the pair after it, and the weights before its last step; to be copied.
    """

    written: Sequence[Callable[[Writer], None]]
    left: tuple[Wrapped, list[Tensor] | None]


@dataclass(kw_only=True)
class OracleRun(Run):
    """A `Run` whose adapter is a `Truth`.

    Attributes:
        suspects: whether to record what defects would have produced; one of the runs does.
        parts: by name, what was run for an earlier case and comes out alike in this one; ``None``
            runs every part in every case.
    """

    suspects: bool = False
    parts: MutableMapping[str, Part] | None = None
    _before: list[Tensor] | None = field(default=None, init=False)
    _big: dict[str, Tensor | None] | None = field(default=None, init=False)

    def shared(self, name: str, part: Callable[[Run], Wrapped]) -> Wrapped:
        """What `part` leaves: the first case that has it runs it, others write what it wrote."""
        if self.parts is None:
            return super().shared(name, part)
        if name in self.parts:
            known = self.parts[name]
            for call in known.written:
                call(self.writer)
            w, self._before = _copied_pair(*known.left)
            return w
        writer = self.writer
        self.writer = tape = Tape(writer)
        w = super().shared(name, part)
        self.writer = writer
        w.observe = ignore  # the observer of its last step holds this run
        self.parts[name] = Part(written=tape.calls, left=_copied_pair(w, self._before))
        return w

    def build(
        self,
        *,
        optimizer: OptimizerFactory | None = None,
        perturbed: bool = False,
        meta: bool = False,
        clip: Clip | None = None,
    ) -> Wrapped:
        """A fresh pair; a stale loss of its first step is that of the weights it was built with."""
        w = super().build(optimizer=optimizer, perturbed=perturbed, meta=meta, clip=clip)
        if perturbed and self.suspects:
            self._before = _copies(self.adapter.bare(w))
        return w

    def train_step(self, w: Wrapped, step: int, clip: Clip | None = None) -> None:
        """One step, with the values that known defects would have given."""
        several = step == 0 and self.case.accumulation > 1 and self.model.concatenate
        self._big = self._big_batch(w) if several else None
        if not self.suspects:
            super().train_step(w, step, clip)
            return
        self._stale_losses(w, step)
        if step == 0:
            self._losses_in_full(w)
        super().train_step(w, step, clip)

    def watch(self, w: Wrapped, step: int) -> Watch:
        """The observer of one step."""
        return (
            OracleWatch(run=self, wrapped=w, step=step) if self.suspects else super().watch(w, step)
        )

    def observe_gradients(self, seen: Watch, step: int) -> None:
        """Reduced gradients, and each rank's own."""
        if self._big is not None:
            self.writer.write("gradients_big_batch", self._big, step=step)
            self._big = None  # a step of another kind has none
        super().observe_gradients(seen, step)
        if isinstance(seen, OracleWatch):
            self._before = seen.weights
            self.writer.write("gradients_of_rank", seen.of_rank, step=step)
            self.writer.write("gradients_last_micro", seen.last_micro, step=step)
            for micro, own in enumerate(seen.of_micro):
                self.writer.write("gradients_of_micro", own, step=step, micro=micro)
            if seen.doubled:
                self.writer.write("gradients_doubled", seen.doubled, step=step)

    def observe_unreduced(self, w: Wrapped) -> None:
        """As a reduction would have left it."""
        if self.suspects:
            unreduced = cast(Truth, self.adapter).reduced_last_micro(w)
            self.writer.write("gradients_unreduced", unreduced)

    def _stale_losses(self, w: Wrapped, step: int) -> None:
        """Losses of this step's batches with the parameters of the step before.

        In the second step also with those of one unit alone, for the first micro-batch.
        """
        if self._before is None:
            return
        truth, module = cast(Truth, self.adapter), self.adapter.bare(w)
        with torch.no_grad(), torch.random.fork_rng(), kept(module) as now:
            _set(module, self._before)
            for micro, batch in enumerate(self.micro_batches(step)):
                losses = truth.losses_of(module, batch, self.model.loss)
                self.writer.write("stale_loss", losses, step=step, micro=micro)
            units = positions_of_units(module, self.model.units) if step == 1 else {}
            for unit, inside in units.items() if len(units) > 1 else ():
                _set(module, [self._before[i] if i in inside else own for i, own in enumerate(now)])
                losses = truth.losses_of(module, self.batch(step, 0), self.model.loss)
                self.writer.write("stale_loss_of_unit", losses, step=step, micro=0, unit=unit)

    def _losses_in_full(self, w: Wrapped) -> None:
        """Losses of the first step as no low dtype would give them, where one is declared."""
        truth, module = cast(Truth, self.adapter), self.adapter.bare(w)
        with torch.no_grad(), torch.random.fork_rng():
            for micro, batch in enumerate(self.micro_batches(0)):
                losses = truth.losses_in_full(module, batch, self.model.loss)
                if losses is not None:
                    self.writer.write("loss_in_full", losses, step=0, micro=micro)

    def _big_batch(self, w: Wrapped) -> dict[str, Tensor | None]:
        """Reduced gradient of one batch that holds all micro-batches of the step."""
        truth, module = cast(Truth, self.adapter), self.adapter.bare(w)
        with torch.random.fork_rng(), kept(module):
            reduced = truth.big_batch(w, module, self.micro_batches(0), self.model.loss)
        by_id = {id(p): g for p, g in zip(trainable(module), reduced, strict=True)}
        return {
            fqn: None if by_id.get(id(p)) is None else to_cpu(cast(Tensor, by_id[id(p)]))
            for fqn, p in named_parameters(module)
        }


def positions_of_units(
    module: nn.Module, units: tuple[type[nn.Module], ...]
) -> dict[str, set[int]]:
    """Path of each unit to the positions of its trainable parameters among all of `module`'s."""
    own = iter(units_of(module, units))
    found: dict[str, set[int]] = {}
    for position, parameter in enumerate(module.parameters()):
        if parameter.requires_grad:
            found.setdefault(next(own), set()).add(position)
    return found


@contextmanager
def kept(module: nn.Module) -> Iterator[list[Tensor]]:
    """Gives the values of the parameters; `module` has them and its buffers again afterwards.

    Inside, passes change copies of the buffers, and parameters may be given other values.
    """
    values = [(parameter, parameter.data) for parameter in module.parameters()]
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for owner, name, buffer in buffers:
        owner._buffers[name] = buffer.clone()
    try:
        yield [own for _, own in values]
    finally:
        for parameter, own in values:
            parameter.data = own
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer


def _set(module: nn.Module, values: Iterable[Tensor]) -> None:
    """Give the parameters these values, without a copy."""
    for parameter, value in zip(module.parameters(), values, strict=True):
        parameter.data = value


def _copied_pair(w: Wrapped, before: list[Tensor] | None) -> tuple[Wrapped, list[Tensor] | None]:
    known = _copies_known(w.module)
    states = (value for state in w.optimizer.state.values() for value in state.values())
    for tensor in (*states, *w.module.buffers(), *(before or ())):
        if isinstance(tensor, Tensor):
            known[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy((w, before), known)


def _copies_known(module: nn.Module) -> dict[int, Any]:
    """Object to copy, for `copy.deepcopy` of `module` or of what holds it: what takes it longest.

    Each part has a dozen tables of hooks, nearly all empty, and a tensor is copied by its storage.
    """
    tables = (value for part in module.modules() for value in vars(part).values())
    known: dict[int, Any] = {id(t): type(t)() for t in tables if type(t) is OrderedDict and not t}
    for own in module.parameters():
        if type(own) is nn.Parameter:
            known[id(own)] = nn.Parameter(own.detach().clone(), requires_grad=own.requires_grad)
    return known


def _copies(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]

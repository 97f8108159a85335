"""What a scenario works with: phases, building, training steps, and what is recorded when.

The same code runs on a rank with a wrapped model and in the oracle with all ranks at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from conformance.adapter import (
    Adapter,
    BuildConfig,
    OptimizerFactory,
    StepResult,
    Wrapped,
    clean_fqn,
)
from conformance.case import Case
from conformance.gather import held
from conformance.history import flatten
from conformance.models import ModelCase
from conformance.optimizers import optimizer_named
from conformance.per_rank import each
from conformance.scenarios.returned import refuse_unless_due

PERTURBATION = 0.25
"""By how much a fresh model's weights differ from the model's, before a checkpoint is loaded."""

Kind = TypeVar("Kind")

UNFROZEN = "unfrozen"
"""Name of the scenario in which parameters take part in some steps only, in any model."""

BUILT = -1  # the "step" of what is observed before the first step


class Writer(Protocol):
    """The part of `HistoryWriter` that a scenario uses; the oracle has one for all ranks."""

    def begin_phase(self, name: str) -> None:
        """Start a phase."""

    def end_phase(self, error: str | None = None, traceback: str = "") -> None:
        """End it."""

    def write(self, what: str, value: Any, **where: Any) -> None:
        """Record a value."""


class Recorder(Protocol):
    """The part of the collective recorder that a scenario uses."""

    def mark(self, phase: str) -> None:
        """Label the collectives to come."""

    def unjudged(self) -> AbstractContextManager[Any]:
        """Collectives inside are side-door traffic."""

    def name_modules(self, root: nn.Module) -> None:
        """Names for the modules that issue collectives."""


class Carrier(Protocol):
    """Takes the full states of model and optimizer from one job to the next."""

    def put(self, states: tuple[Any, Any]) -> None:
        """Called in the first job, on all ranks."""

    def take(self) -> tuple[Any, Any]:
        """What was put, in the second job, on all ranks."""
        ...


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Clipping of one step: threshold and p."""

    max_norm: float
    norm_type: float

    @property
    def capability(self) -> str:
        """The capability that a wrapper must claim for it."""
        return f"clip.p{self.norm_type:g}"


@dataclass(kw_only=True)
class Run:
    """One run of one scenario.

    Attributes:
        adapter: drives the wrapper, or is the oracle.
        case: what is run.
        model: the model case.
        writer: where observations go.
        batch: (step, micro-batch) to what `Adapter.step` takes as one micro-batch.
        device: where the model computes.
        world: ranks.
        options: of the adapter's variant.
        scratch: a directory that all ranks share, for checkpoints.
        carrier: of states between the two jobs of a case that has two.
        recorder: sees the collectives; ``None`` in the oracle.
        dtype: of parameters and floating inputs, when the oracle measures its noise; ``None`` is
            the model's own.
        before_optimizer: called in every step between backward and clipping; None does nothing.
    """

    adapter: Adapter
    case: Case
    model: ModelCase
    writer: Writer
    batch: Callable[[int, int], Any]
    device: torch.device
    world: int
    options: Mapping[str, Any] = field(default_factory=dict)
    scratch: Path
    carrier: Carrier
    recorder: Recorder | None = None
    dtype: torch.dtype | None = None
    before_optimizer: Callable[[], None] | None = None

    # -- phases -----------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named part; its exception is recorded, then ends the scenario on this rank."""
        self.writer.begin_phase(name)
        self.mark(name)
        try:
            yield
        except BaseException as error:  # errors of torch's checkpoint package are no Exceptions
            summary = f"{type(error).__name__}: {error}"
            self.writer.end_phase(summary, traceback.format_exc())
            raise
        self.writer.end_phase()

    def mark(self, label: str) -> None:
        """Label the collectives to come."""
        if self.recorder is not None:
            self.recorder.mark(label)

    def side_door(self) -> AbstractContextManager[Any]:
        """Collectives inside are ours, not the wrapper's."""
        return nullcontext() if self.recorder is None else self.recorder.unjudged()

    def claims(self, capability: str) -> bool:
        """Whether the adapter claims `capability`."""
        return capability in self.adapter.capabilities

    def shared(self, name: str, part: Callable[[Run], Wrapped]) -> Wrapped:
        """What `part` leaves, of which a model's cases have all that is called `name` in common.

        Wrappers run it in every case, the oracle once for all: it may depend on nothing in which
        these cases differ.
        """
        return part(self)

    # -- building ---------------------------------------------------------------------------------

    @property
    def optimizer(self) -> OptimizerFactory:
        """The optimizer that the case names."""
        return optimizer_named(self.case.optimizer)

    def bare_model(self, *, perturbed: bool = False) -> nn.Module:
        """The model without wrapper; `perturbed` moves every floating weight and buffer."""
        model = self.model.build().to(self.device)
        if perturbed:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    if tensor.is_floating_point():
                        tensor.add_(PERTURBATION)
        return model if self.dtype is None else model.to(self.dtype)

    def build(
        self,
        *,
        optimizer: OptimizerFactory | None = None,
        perturbed: bool = False,
        meta: bool = False,
        clip: Clip | None = None,
    ) -> Wrapped:
        """Wrap a fresh model, perhaps one without storage, and name what issues collectives."""
        config = BuildConfig(
            device=self.device,
            world_size=self.world,
            units=self.model.units,
            options=self.options,
            accumulation=self.case.accumulation,
            unused_parameters=self.model.leaves_out or self.case.scenario == UNFROZEN,
            unused_on_some_ranks=self.model.routes and self.world > 1,
            max_norm=clip.max_norm if clip else None,
            norm_type=clip.norm_type if clip else 2.0,
        )
        model = self.bare_model(perturbed=perturbed)
        if meta and self.recorder is not None:  # the truth is loaded into storage of its own
            give_up_storage(model)
        built = self.adapter.build(model, optimizer or self.optimizer, config)
        wrapped = self._of_kind(Wrapped, "build", built, "module=..., optimizer=...")
        self.writer.write("remarks", list(wrapped.remarks))
        if self.recorder is not None:
            self.recorder.name_modules(self.asked("bare", wrapped))
        return wrapped

    def asked(self, verb: str, w: Wrapped, *given: Any, **options: Any) -> Any:
        """What a verb of the adapter returns, if it is of the kind that is due."""
        got = getattr(self.adapter, verb)(w, *given, **options)
        self._refuse_unless_due(verb, got)
        return got

    def _refuse_unless_due(self, verb: str, got: object, at: str = "") -> None:
        each(got, partial(refuse_unless_due, type(self.adapter).__name__, verb, at=at))

    def _of_kind(self, kind: type[Kind], verb: str, got: object, arguments: str) -> Kind:
        """What an adapter's verb returned, if it is of the kind that is due."""
        if not isinstance(got, kind):
            found = "None" if got is None else f"an object of type {type(got).__name__}"
            raise TypeError(
                f"{type(self.adapter).__name__}.{verb}() returned {found}, expected a"
                f" conformance.{kind.__name__}: end it with"
                f" `return {kind.__name__}({arguments})`"
            )
        return got

    # -- training ---------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> list[Any]:
        """The micro-batches of one step."""
        return [self.batch(step, micro) for micro in range(self.case.accumulation)]

    def train_step(self, w: Wrapped, step: int, clip: Clip | None = None) -> None:
        """One optimizer step, and everything observed of it, in the order in which it happens."""
        seen = self.watch(w, step)
        w.observe = seen
        self.mark(f"step {step}/micro 0")
        done = self.adapter.step(
            w,
            self.micro_batches(step),
            self.model.loss,
            max_norm=clip.max_norm if clip else None,
            norm_type=clip.norm_type if clip else 2.0,
        )
        result = self._of_kind(StepResult, "step", done, "losses=[...], grad_norm=...")
        self.mark(f"step {step}/after")
        for micro, loss in enumerate(result.losses):
            self._refuse_unless_due("step", loss, at=f".losses[{micro}]")
            self.writer.write("loss", loss, step=step, micro=micro)
        self.observe_gradients(seen, step)
        if clip is not None:
            norm = {"p": f"{clip.norm_type:g}", "max_norm": clip.max_norm}
            self.writer.write("grad_norm", result.grad_norm, step=step, **norm)
        if seen.clipped is not None:
            self.writer.write("clipped", seen.clipped, step=step)
        self.observe_state(w, step)

    def train_on_two(self, w: Wrapped, step: int) -> None:
        """Two forwards, then two backwards, then an optimizer step; the state is not observed."""
        seen = self.watch(w, step)
        self.mark(f"step {step}/both")
        losses = [self.adapter.forward(w, self.batch(step, i), self.model.loss) for i in (0, 1)]
        for micro, loss in enumerate(losses):
            self.writer.write("loss", loss.detach(), step=step, micro=micro)
            self.adapter.backward(w, loss / 2)
        seen("gradients")
        self.observe_gradients(seen, step)
        self.adapter.optimizer_step(w)
        self.adapter.zero_grad(w)

    def watch(self, w: Wrapped, step: int) -> Watch:
        """The observer of one step."""
        return Watch(run=self, wrapped=w, step=step)

    def observe_gradients(self, seen: Watch, step: int) -> None:
        """Full gradients as they were before clipping."""
        if seen.gradients is not None:
            self.writer.write("gradients", seen.gradients, step=step)

    def observe_unreduced(self, w: Wrapped) -> None:
        """What a backward under ``no_sync`` has left, which only the truth can show."""

    def observe_state(self, w: Wrapped, step: int, *, prefix: str = "") -> None:
        """Parameters, optimizer state and buffers after `step`, through the side doors."""
        with self.side_door():
            parameters = held(self.asked("full_parameters", w))
            state = held(flatten(self.asked("full_optimizer_state", w)))
        self.writer.write(f"{prefix}parameters", parameters, step=step)
        self.writer.write(f"{prefix}optimizer_state", state, step=step)
        self.writer.write(f"{prefix}hyperparameters", self.asked("hyperparameters", w), step=step)
        self.writer.write(f"{prefix}buffers", self.asked("buffers", w), step=step)

    def observe_built(self, w: Wrapped) -> None:
        """Parameters and buffers before the first step."""
        self.observe_parameters(w, step=BUILT)
        self.writer.write("buffers", self.asked("buffers", w), step=BUILT)

    def observe_parameters(self, w: Wrapped, what: str = "parameters", **where: Any) -> None:
        """Parameters as they are now, through the side door."""
        with self.side_door():
            self.writer.write(what, held(self.asked("full_parameters", w)), **where)

    def observe_stored(self, w: Wrapped, step: int) -> None:
        """Bytes of the storages that this rank holds for parameters and optimizer state."""
        tensors = self.asked("local_tensors", w)
        self.writer.write(
            "stored", flatten({k: stored_bytes(v) for k, v in tensors.items()}), step=step
        )

    def evaluate(
        self,
        w: Wrapped,
        index: int,
        *,
        batch: tuple[int, int] = (99, 0),
        inference: bool = False,
    ) -> None:
        """An evaluation pass, perhaps in inference mode, and what it left."""
        with torch.inference_mode(inference):
            loss = self.asked("evaluate", w, self.batch(*batch), self.model.loss)
        self.writer.write("eval_loss", loss, index=index)
        self.observe_parameters(w, "parameters_after_eval", index=index)
        self.writer.write("buffers_after_eval", self.asked("buffers", w), index=index)


@dataclass(kw_only=True)
class Watch:
    """The observer of one training step: labels collectives, copies gradients at their moments."""

    run: Run
    wrapped: Wrapped
    step: int
    gradients: Any = None
    clipped: Any = None

    def __call__(self, moment: str, index: int = 0) -> None:
        """See `Wrapped.observe`."""
        if moment == "backward":
            self.run.mark(f"step {self.step}/micro {index + 1}")
        elif moment == "gradients":
            self.gradients = self._copy()
            if self.run.before_optimizer is not None:
                self.run.before_optimizer()
            self.run.mark(f"step {self.step}/clip")
        elif moment == "clipped":
            if self.run.claims("clip.gradients"):
                self.clipped = self._copy()
            self.run.mark(f"step {self.step}/optimizer")

    def _copy(self) -> Any:
        if not self.run.claims("gradients"):
            return None
        with self.run.side_door():
            return held(self.run.asked("full_gradients", self.wrapped))


def give_up_storage(model: nn.Module) -> None:
    """Move what a state holds to the meta device; ``model.to("meta")`` would untie parameters."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for owner in model.modules():
        for name, own in owner._parameters.items():
            if own is not None and own not in moved:
                moved[own] = nn.Parameter(own.to("meta"), requires_grad=own.requires_grad)
            owner._parameters[name] = None if own is None else moved[own]
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = buffer.to("meta")


def unsaved_buffers(model: nn.Module) -> set[str]:
    """FQNs of the buffers that no state dict holds."""
    return {
        clean_fqn(f"{path}.{name}" if path else name)
        for path, owner in model.named_modules()
        for name in owner._non_persistent_buffers_set
    }


def stored_bytes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes of the distinct storages behind `tensors`, by dtype.

    A view counts with its whole storage: what it keeps alive is stored.
    """
    counted: set[int] = set()
    total: dict[str, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            dtype = str(tensor.dtype).removeprefix("torch.")
            total[dtype] = total.get(dtype, 0) + storage.nbytes()
    return total

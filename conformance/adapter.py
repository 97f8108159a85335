"""What a downstream author writes so that the suite can drive a wrapper.

The smallest adapter defines `build`; every other verb has a default that serves any ``nn.Module``
with an ordinary optimizer. Engines that own backward and step override `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.errors import unknown
from conformance.gather import to_cpu as to_cpu

LossFn = Callable[[nn.Module, Any], Tensor]
StateKind = Literal["full", "sharded", "local"]
TravelDtype = Literal["parameter", "float64", "float32", "bfloat16", "float16"]


def state_claims(kind: str) -> tuple[str, ...]:
    """The capabilities that a case with ``kind=`` so is about: a directory, or a kind of states."""
    return ("save",) if kind == "save" else (f"model_state.{kind}", f"optim_state.{kind}")


WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Refusal(Exception):
    """Raised by `Adapter.build`, on all ranks, for a configuration that the wrapper refuses.

    The suite treats `NotImplementedError` the same way. Refusing is UNSUPPORTED, not FAIL.
    """


REFUSALS = (Refusal.__name__, NotImplementedError.__name__)
"""Names of the errors by which `Adapter.build` says, on all ranks, that it cannot do something."""


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Legitimate choices that an adapter declares; the suite checks that the wrapper keeps them.

    Attributes:
        gradients: reduced gradients are the mean or the sum over ranks.
        loss_divided_by_accumulation: the wrapper divides the loss by the number of micro-batches;
            otherwise the caller does.
        buffers: every rank keeps its own, or rank 0's are taken over at the start of each step.
        unused_grad: gradient of a parameter that took no part on any rank: none, zero, or "unit":
            zero where another parameter of its unit took part, which is what one flat gradient per
            unit gives, and none elsewhere.
        ignored: gradients of parameters that the wrapper was told to ignore.
        gathers: sharded parameters are gathered once for forward and backward, or once for each.
        reduces: of gradients of sharded parameters a rank receives its part, or the whole.
        gathered_as: dtype in which they travel; "parameter" is their own.
        reduced_as: dtype in which gradients travel.
        computes_as: dtype of the copies of parameters that forward and backward use. A low one is
            the truth's too, with the low ones among `reduced_as` and what follows.
        accumulates_as: dtype in which gradients wait for the last micro-batch.
        buffers_as: dtype of floating buffers.
        casts_inputs: floating inputs of no unit, of the root or of all units are cast to
            `computes_as`.
        returns_as: dtype to which the floating results of the root are cast; "parameter" leaves
            them.

    Raises:
        ValueError: a choice that there is not.
    """

    gradients: Literal["mean", "sum"] = "mean"
    loss_divided_by_accumulation: bool = False
    buffers: Literal["local", "rank0"] = "local"
    unused_grad: Literal["none", "zero", "unit"] = "none"
    ignored: Literal["unreduced", "reduced"] = "unreduced"
    gathers: Literal["once", "twice"] = "twice"
    reduces: Literal["part", "whole"] = "part"
    gathered_as: TravelDtype = "parameter"
    reduced_as: TravelDtype = "parameter"
    computes_as: TravelDtype = "parameter"
    accumulates_as: TravelDtype = "parameter"
    buffers_as: TravelDtype = "parameter"
    casts_inputs: Literal["none", "root", "units"] = "none"
    returns_as: TravelDtype = "parameter"

    def __post_init__(self) -> None:
        for name, hint in _kinds().items():
            got = getattr(self, name)
            choices = get_args(hint) or (False, True)  # not `in`: 1 equals True
            if any(got is choice or (isinstance(got, str) and got == choice) for choice in choices):
                continue
            if isinstance(got, str) and get_args(hint):
                raise unknown("choice", got, choices, where=f"of Conventions.{name}")
            wanted = " or ".join(map(repr, choices))
            raise ValueError(f"Conventions: {name} must be {wanted}; got {got!r}")


@cache  # hints are strings here: to resolve them takes a millisecond
def _kinds() -> dict[str, Any]:
    return get_type_hints(Conventions)


@dataclass(frozen=True, kw_only=True)
class OptimizerFactory:
    """Makes the optimizer of a case; wrappers that need class and arguments apart read them here.

    Attributes:
        name: the name used in case ids.
        optimizer_class: a `torch.optim` class.
        defaults: its keyword arguments. `foreach` says how to compute, not what: where a class does
            not take it, it may be left out.
    """

    name: str
    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer over `parameters`."""
        return self.optimizer_class(parameters, **self.defaults)


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What `Adapter.build` is told about the run.

    Attributes:
        device: where the wrapper shall compute, and where the model already is, or meta.
        world_size: ranks in the default process group.
        units: module classes that become a parameter group of their own; the root always is one.
        options: the variant's options.
        accumulation: micro-batches per step.
        micro_batch_size: samples in one micro-batch, for engines that ask.
        unused_parameters: the model has parameters that take no part in forward.
        unused_on_some_ranks: some parameters take part on other ranks.
        max_norm: clipping threshold of the run, for engines that take it at build time.
        norm_type: the p of that norm.
    """

    device: torch.device
    world_size: int
    units: tuple[type[nn.Module], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    micro_batch_size: int = 1
    unused_parameters: bool = False
    unused_on_some_ranks: bool = False
    max_norm: float | None = None
    norm_type: float = 2.0


def ignore(moment: str, index: int = 0) -> None:
    """The observer of a training step that nobody watches."""


@dataclass(kw_only=True)
class Wrapped:
    """A wrapped model with its optimizer.

    Attributes:
        module: what the loss function calls.
        optimizer: what `Adapter.optimizer_step` steps.
        native: whatever else the adapter needs.
        observe: called as ``observe(moment, index)`` inside `Adapter.step`: "forward" and
            "backward" with the micro-batch's index, "gradients" when they are final and before
            clipping, "clipped" after it. An adapter that overrides `step` calls it too, as far as
            its engine allows.
        remarks: what a reader of the report should know about how this model was wrapped, such as
            an option that it needed; one sentence each.
    """

    module: nn.Module
    optimizer: Optimizer
    native: Any = None
    remarks: tuple[str, ...] = ()
    observe: Callable[..., None] = ignore


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one training step gives back.

    Attributes:
        losses: one 0-dim tensor per micro-batch, this rank's, as the loss function returned them.
        grad_norm: total norm before clipping; ``None`` if the step did not clip.
    """

    losses: Sequence[Tensor]
    grad_norm: Tensor | float | None = None


class Adapter:
    """Base class of adapters; see the module docstring.

    Class attributes:
        variants: named settings; their options reach `build` through ``config.options``.
        capabilities: what the wrapper claims (`CAPABILITIES`); claims are verified.
        conventions: legitimate choices, declared.
        replicas: how many ranks hold the same shard, in hybrid variants.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    capabilities: frozenset[str] = frozenset({"gradients"})
    conventions: Conventions = Conventions()
    replicas: int = 1

    def configure(self, options: Mapping[str, Any]) -> None:
        """Adapt `capabilities` and `conventions` to a variant's options; called once, first."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Wrap `model`, which is on ``config.device``, and make its optimizer.

        Who claims "meta" may be given one on the meta device: it gets storage on
        ``config.device`` before the optimizer is made, whatever that storage holds. Tied parameters
        stay tied, and buffers that no state dict holds are not on meta and keep their values.

        Raises:
            Refusal: the wrapper cannot do this configuration; on all ranks or on none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no build()")

    # -- training ---------------------------------------------------------------------------------

    def step(
        self,
        w: Wrapped,
        micro_batches: Sequence[Any],
        loss_fn: LossFn,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> StepResult:
        """One optimizer step over `micro_batches`, of which only the last one synchronises."""
        losses: list[Tensor] = []
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else self.no_sync(w):
                loss = self.forward(w, batch, loss_fn)
                w.observe("forward", index)
                losses.append(loss.detach())
                divide = not self.conventions.loss_divided_by_accumulation
                self.backward(w, loss / len(micro_batches) if divide else loss)
            w.observe("backward", index)
        w.observe("gradients")
        norm = None
        if max_norm is not None:
            norm = self.clip_grad_norm(w, max_norm, norm_type)
            w.observe("clipped")
        self.optimizer_step(w)
        self.zero_grad(w)
        return StepResult(losses=losses, grad_norm=norm)

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """The loss of one micro-batch, 0-dim, with its graph."""
        return loss_fn(w.module, batch)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Backward of one loss."""
        loss.backward()

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """Context in which backward does not reduce gradients; the default reduces every time."""
        return nullcontext()

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """Clip the full gradient to `max_norm`; returns its norm before."""
        norm = nn.utils.clip_grad_norm_(w.module.parameters(), max_norm, norm_type)
        return whole(norm)

    def optimizer_step(self, w: Wrapped) -> None:
        """Step the optimizer."""
        w.optimizer.step()

    def zero_grad(self, w: Wrapped) -> None:
        """Drop the gradients."""
        w.optimizer.zero_grad()

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Loss of `batch` in evaluation mode without gradients."""
        w.module.eval()
        with torch.no_grad():
            loss = loss_fn(w.module, batch)
        w.module.train()
        return loss

    def weights(self, w: Wrapped) -> list[Tensor]:
        """What an average of weights over steps reads and writes, between steps."""
        return list(w.module.parameters())

    def set_trainable(self, w: Wrapped, unit: str, *, trains: bool) -> None:
        """Freeze the parameters of the module called `unit`, or let them train again."""
        for fqn, parameter in named_parameters(self.bare(w)):
            if fqn.startswith(f"{unit}."):
                parameter.requires_grad_(trains)

    def make_scaler(self, w: Wrapped, device: torch.device) -> Any:
        """A fresh gradient scaler that suits the wrapper, with the usual defaults."""
        return torch.amp.GradScaler(device.type)

    def scaled_step(self, w: Wrapped, scaler: Any) -> None:
        """Step the optimizer through a scaler, which may skip it."""
        scaler.step(w.optimizer)

    # -- side doors: must not go through the feature under test -----------------------------------

    def bare(self, w: Wrapped) -> nn.Module:
        """The module whose parameter names, wrapper prefixes removed, are the FQNs."""
        return w.module

    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        """FQN to parameter on every rank; a tied parameter under each of its names.

        A full tensor, or a DTensor, which is put together when the case is judged. Side doors may
        hand out what the wrapper goes on changing: whoever keeps it must copy it.
        """
        return {fqn: p.detach() for fqn, p in named_parameters(self.bare(w))}

    def full_gradients(self, w: Wrapped) -> dict[str, Tensor | None]:
        """FQN to gradient, full or a DTensor, on every rank; ``None`` where there is none."""
        return {fqn: p.grad for fqn, p in named_parameters(self.bare(w))}

    def full_optimizer_state(self, w: Wrapped) -> dict[str, dict[str, Any]]:
        """FQN to the optimizer's state of that parameter, full or DTensors, on every rank."""
        return {
            fqn: dict(w.optimizer.state[p])
            for fqn, p in named_parameters(self.bare(w))
            if p in w.optimizer.state
        }

    def hyperparameters(self, w: Wrapped) -> list[dict[str, Any]]:
        """The optimizer's parameter groups without the parameters, JSON values only."""
        kinds = (bool, int, float, str, type(None), tuple, list)
        return [
            {k: v for k, v in group.items() if k != "params" and isinstance(v, kinds)}
            for group in w.optimizer.param_groups
        ]

    def buffers(self, w: Wrapped) -> dict[str, Tensor]:
        """FQN to this rank's buffer on CPU."""
        return {clean_fqn(n): to_cpu(b) for n, b in self.bare(w).named_buffers()}

    def local_tensors(self, w: Wrapped) -> dict[str, list[Tensor]]:
        """What this rank stores: "parameters" and "optimizer", as plain local tensors."""
        state = [v for s in w.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        return {
            "parameters": [local(p).detach() for p in self.bare(w).parameters()],
            "optimizer": [local(v) for v in state if v.dim() > 0],
        }

    # -- checkpoints ------------------------------------------------------------------------------

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Model state as the wrapper gives it; with both options False, its default options."""
        self._plain(kind, "model_state")
        return offered(self.bare(w).state_dict(), cpu=cpu, rank0_only=rank0_only)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load what `model_state` returned with the same kind on the same rank."""
        self._plain(kind, "load_model_state")
        self.bare(w).load_state_dict(received(state))

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Optimizer state as the wrapper gives it."""
        self._plain(kind, "optim_state")
        return offered(w.optimizer.state_dict(), cpu=cpu, rank0_only=rank0_only)

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load what `optim_state` returned with the same kind on the same rank."""
        self._plain(kind, "load_optim_state")
        w.optimizer.load_state_dict(received(state))

    def save(self, w: Wrapped, directory: Path) -> None:
        """Save model and optimizer into `directory`, shared by all ranks and not there yet."""
        raise NotImplementedError(f"{type(self).__name__} claims no capability 'save'")

    def load(self, w: Wrapped, directory: Path) -> None:
        """Load what `save` wrote into a freshly built pair."""
        raise NotImplementedError(f"{type(self).__name__} claims no capability 'save'")

    def _plain(self, kind: StateKind, verb: str) -> None:
        if kind != "full":
            raise NotImplementedError(f"{verb}: {type(self).__name__} has no {kind} state")


def clean_fqn(name: str) -> str:
    """`name` without the prefixes that wrappers insert."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(FQN, parameter), a tied parameter once per name."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield clean_fqn(name), parameter


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, on every rank; any other tensor as it is.

    Collective: one all-gather per sharded mesh dimension for a DTensor, none otherwise.
    """
    gather = getattr(tensor, "full_tensor", None)
    full: Tensor = tensor.detach() if gather is None else gather().detach()
    return full


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = tensor if to_local is None else to_local()
    return part


def offered(state: Mapping[str, Any], *, cpu: bool, rank0_only: bool) -> dict[str, Any]:
    """`state` as a caller asked for it: its tensors on CPU, empty on ranks other than 0."""
    if rank0_only and dist.get_rank() != 0:
        return {}
    content: dict[str, Any] = _on_cpu(state) if cpu else dict(state)
    return content


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return to_cpu(value)
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


def received(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state`, or rank 0's where this rank has none.

    Collective: one object all-gather, then one object broadcast if some rank has none.
    """
    held: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(held, bool(state))
    if all(held):
        return dict(state)
    box: list[Any] = [dict(state)]
    dist.broadcast_object_list(box, src=0)
    return dict(state) or dict(box[0])


@contextmanager
def toggled(setter: Callable[[bool], None]) -> Iterator[None]:
    """``setter(False)`` for the body, ``setter(True)`` after it: FSDP2's form of no_sync."""
    setter(False)
    try:
        yield
    finally:
        setter(True)

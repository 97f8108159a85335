"""The other truth: ``DistributedDataParallel`` on the ranks of the run, instead of one process.

For models that one process cannot train for all ranks. It trains and reduces as DDP does; states
are copies, or files of its own, and what the adapter under test declares differently (sums,
gradients of unused parameters, buffers) is done around it. Its noise is measured as the oracle's
is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import models
from conformance.adapter import (
    BuildConfig,
    Conventions,
    LossFn,
    OptimizerFactory,
    StateKind,
    StepResult,
    Wrapped,
    to_cpu,
)
from conformance.adapters.torch_ddp import DataParallelAdapter
from conformance.names import CAPABILITIES
from conformance.oracle import (
    InMemory,
    add,
    by_fqn,
    trainable,
    units_of,
    with_declared_zeros,
)


@dataclass(kw_only=True)
class Observed(Wrapped):
    """With this rank's gradients before reduction, one entry per trainable parameter.

    Attributes:
        total: accumulated over micro-batches.
        newest: of the newest backward only.
        unit_classes: of the modules that are units.
        units: path of the unit that holds each trainable parameter.
    """

    total: list[Tensor | None] = field(default_factory=list)
    newest: list[Tensor | None] = field(default_factory=list)
    unit_classes: tuple[type[nn.Module], ...] = ()
    units: list[str] = field(default_factory=list)


class Baseline(InMemory, DataParallelAdapter):
    """DDP as the truth. Every verb is *collective* over the default group."""

    def __init__(
        self,
        world: int,
        conventions: Conventions,
        capabilities: frozenset[str],
        *,
        reverse: bool = False,
    ) -> None:
        """A baseline that keeps the conventions of the adapter compared with it.

        Args:
            world: ranks.
            conventions: of that adapter.
            capabilities: of that adapter, as far as they change what a scenario does.
            reverse: the last process plays rank 0: same mathematics, other order of additions.
        """
        self.world = world
        # who divides the loss makes no difference to the truth: here the caller always does
        self.conventions = replace(conventions, loss_divided_by_accumulation=False)
        self.capabilities = frozenset(CAPABILITIES) & (
            capabilities | {"gradients", "no_sync", "model_state.full", "optim_state.full"}
        )
        self.first = world - 1 if reverse else 0
        self.rank = abs(self.first - dist.get_rank())

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """DDP without a broadcast of its own, and the optimizer over all parameters."""
        wrapped, _ = self.wrap(model, config, {"broadcast_buffers": False})
        optimizer = make_optimizer(wrapped.parameters())
        built = Observed(module=wrapped, optimizer=optimizer, native=wrapped)
        built.unit_classes = config.units
        _reset(built)
        return built

    def step(
        self,
        w: Wrapped,
        micro_batches: Sequence[Any],
        loss_fn: LossFn,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> StepResult:
        """DDP's step, after buffers are taken over."""
        self._take_over_buffers(w)
        return super().step(w, micro_batches, loss_fn, max_norm=max_norm, norm_type=norm_type)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Keep this rank's own gradient, then let DDP reduce."""
        own = cast(Observed, w)
        # gradients with respect to leaves do not run what DDP hooks to their accumulation
        own.newest = list(
            torch.autograd.grad(loss, trainable(w.module), retain_graph=True, allow_unused=True)
        )
        own.total = [add(old, new) for old, new in zip(own.total, own.newest, strict=True)]
        super().backward(w, loss * self.world if self.conventions.gradients == "sum" else loss)
        if w.native.require_backward_grad_sync:
            parameters = trainable(w.module)
            filled = self._filled(own, [p.grad for p in parameters])
            for parameter, gradient in zip(parameters, filled, strict=True):
                parameter.grad = gradient

    def zero_grad(self, w: Wrapped) -> None:
        """Drop the reduced gradients and this rank's own."""
        super().zero_grad(w)
        _reset(cast(Observed, w))

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """The evaluation loss of this rank."""
        self._take_over_buffers(w)
        return super().evaluate(w, batch, loss_fn)

    # -- states: the same, whatever the kind -------------------------------------------------------

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The bare module's state dict."""
        if rank0_only and self.rank:
            return {}
        state = self.bare(w).state_dict()
        return {k: to_cpu(v) if cpu else v.detach().clone() for k, v in state.items()}

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load this rank's state dict, or rank 0's where only rank 0 has one."""
        box: list[Any] = [dict(state)]
        dist.broadcast_object_list(box, src=self.first)
        self.bare(w).load_state_dict(dict(state) or box[0])

    def save(self, w: Wrapped, directory: Path) -> None:
        """Keep both states in a file of this rank: another job may load them."""
        directory.mkdir(parents=True, exist_ok=True)
        states = (self.model_state(w, "full"), self.optim_state(w, "full"))
        torch.save(states, directory / f"rank{self.rank}.pt")

    def load(self, w: Wrapped, directory: Path) -> None:
        """Load what this rank has saved, or rank 0 if there was no such rank."""
        own = directory / f"rank{self.rank}.pt"
        path = own if own.exists() else directory / "rank0.pt"
        # whatever the model's state holds: this run has written the file
        model, optimizer = torch.load(path, map_location="cpu", weights_only=False)
        self.load_model_state(w, "full", model)
        self.load_optim_state(w, "full", optimizer)

    # -- what defects would have produced: see `conformance.oracle_run.Truth` ----------------------

    def losses_of(self, module: nn.Module, batch: Any, loss_fn: LossFn) -> Tensor:
        """This rank's loss."""
        return loss_fn(module, batch)

    def losses_in_full(self, module: nn.Module, batch: Any, loss_fn: LossFn) -> None:
        """It computes in no low dtype."""

    def rank_gradients(self, w: Wrapped) -> dict[str, Tensor]:
        """This rank's own gradients before reduction, FQN to tensor."""
        return by_fqn(self.bare(w), cast(Observed, w).total)

    def newest_gradients(self, w: Wrapped) -> dict[str, Tensor]:
        """The same, of the newest micro-batch alone."""
        return by_fqn(self.bare(w), cast(Observed, w).newest)

    def reduced_last_micro(self, w: Wrapped) -> dict[str, Tensor]:
        """What reduction would leave if the newest micro-batch were the only one."""
        own = cast(Observed, w)
        return by_fqn(self.bare(w), self._reduced(own, own.newest))

    def big_batch(
        self, w: Wrapped, module: nn.Module, batches: Sequence[Any], loss_fn: LossFn
    ) -> list[Tensor | None]:
        """Reduced gradient of one batch that holds all `batches`."""
        loss = loss_fn(module, models.concatenate(list(batches)))
        fresh = torch.autograd.grad(loss, trainable(module), allow_unused=True)
        return self._reduced(cast(Observed, w), list(fresh))

    # -- inside ------------------------------------------------------------------------------------

    def _reduced(self, w: Observed, own: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What reduction makes of this rank's gradients and the others'."""
        parameters = trainable(w.module)
        used = torch.tensor([float(g is not None) for g in own], device=parameters[0].device)
        dist.all_reduce(used)
        share = 1 if self.conventions.gradients == "sum" else self.world
        found: list[Tensor | None] = []
        for gradient, parameter, holders in zip(own, parameters, used.tolist(), strict=True):
            if not holders:
                found.append(None)
                continue
            total = torch.zeros_like(parameter) if gradient is None else gradient.clone()
            total = total.detach().contiguous()
            dist.all_reduce(total)
            found.append(total / share)
        return self._filled(w, found)

    def _filled(self, w: Observed, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """`found` with zeros where the adapter declares them for unused parameters."""
        return with_declared_zeros(found, trainable(w.module), w.units, self.conventions)

    def _take_over_buffers(self, w: Wrapped) -> None:
        if self.conventions.buffers == "rank0":
            for buffer in self.bare(w).buffers():
                dist.broadcast(buffer, src=self.first)


def _reset(w: Observed) -> None:
    w.total = [None] * len(trainable(w.module))
    w.newest = list(w.total)
    w.units = units_of(w.module, w.unit_classes)

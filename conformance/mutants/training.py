"""Defects of losses, gradients and parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import Adapter, BuildConfig, LossFn, OptimizerFactory, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(check="gradients.scale", cause=Cause.SUMMED_NOT_AVERAGED, case="mlp/train/optimizer=sgd")
class SummedNotAveraged(Adapter):
    """Gradients are summed over ranks although their mean is declared."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Backward of W times the loss."""
        super().backward(w, loss * dist.get_world_size())


@mutant(
    check="gradients.value", cause=Cause.OFF_BY_ONE_SHARD, case="mlp/train/optimizer=sgd", world=1
)
class RowsShiftedByOne(Adapter):
    """The rows of reduced gradients are shifted by one."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Shift after reduction."""
        super().backward(w, loss)
        for p in w.module.parameters():
            if p.grad is not None:
                p.grad.copy_(p.grad.roll(1, 0))


@mutant(check="gradients.value", cause=Cause.LAST_ROWS, case="uneven/train/optimizer=sgd")
class LastRowTakenForPadding(Adapter):
    """The last row of an uneven parameter is dropped when gradients are reduced."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Drop it after reduction."""
        super().backward(w, loss)
        for p in w.module.parameters():
            if p.grad is not None and p.shape[0] % dist.get_world_size():
                p.grad[-1] = 0


@mutant(
    check="gradients.value",
    cause=Cause.NOT_REDUCED,
    case="mlp/train/optimizer=sgd",
    bugs=("pytorch/pytorch#60118", "pytorch/pytorch#187732", "pytorch/pytorch#154888"),
)
class NeverReduced(Adapter):
    """Every rank trains on its own gradients."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Always as if more micro-batches were to come."""
        with self.no_sync(w):
            return super().forward(w, batch, loss_fn)


@mutant(
    check="parameters.first_step",
    cause=Cause.WRONG_STEP_COUNT,
    case="mlp/train/optimizer=adamw",
    bugs=("NVIDIA/Megatron-LM#5974",),
    world=1,
)
class WarmUpAdvancesOptimizer(Adapter):
    """Optimizer state is materialised by a step that counts: the first real one is too small."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """A step with zero gradients and learning rate 0."""
        w = super().build(model, make_optimizer, config)
        group = w.optimizer.param_groups[0]
        rate, group["lr"] = group["lr"], 0.0
        for p in w.module.parameters():
            p.grad = torch.zeros_like(p)
        w.optimizer.step()
        w.optimizer.zero_grad()
        group["lr"] = rate
        return w


@mutant(check="losses.value", cause=Cause.STALE, case="mlp/train/optimizer=sgd", world=1)
class ForwardWithStaleParameters(Adapter):
    """Forward uses the parameters of the step before."""

    _previous: list[Tensor] | None = None

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Swap old values in for the forward pass, keep the new ones for the step."""
        current = [p.detach().clone() for p in w.module.parameters()]
        previous, self._previous = self._previous or current, current
        _assign(w, previous)
        return super().forward(w, batch, loss_fn)

    def optimizer_step(self, w: Wrapped) -> None:
        """Step from the current values."""
        assert self._previous is not None
        _assign(w, self._previous)
        super().optimizer_step(w)


@mutant(check="losses.value", cause=Cause.STALE, case="mlp/eval_in_step", world=1)
class ForwardWithParametersOfAnEvaluation(Adapter):
    """What an evaluation has gathered serves the next forward too, although a step was made."""

    _gathered: list[Tensor] | None = None
    _current: list[Tensor] | None = None

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Keep what it computes with."""
        self._gathered = [p.detach().clone() for p in w.module.parameters()]
        return super().evaluate(w, batch, loss_fn)

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Take what was kept; the next forward gathers again."""
        if self._gathered is not None:
            self._current = [p.detach().clone() for p in w.module.parameters()]
            _assign(w, self._gathered)
            self._gathered = None
        return super().forward(w, batch, loss_fn)

    def optimizer_step(self, w: Wrapped) -> None:
        """Step from the current values."""
        if self._current is not None:
            _assign(w, self._current)
            self._current = None
        super().optimizer_step(w)


@mutant(check="losses.value", cause=Cause.STALE, case="mlp/eval_in_step", world=1)
class ForwardWithParametersOfAnUnfinishedOne(ForwardWithParametersOfAnEvaluation):
    """What a forward has gathered serves the next one, unless its backward came in between."""

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Keep nothing."""
        return Adapter.evaluate(self, w, batch, loss_fn)

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Keep what it computes with."""
        loss = super().forward(w, batch, loss_fn)
        self._gathered = [p.detach().clone() for p in w.module.parameters()]
        return loss

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Give it up."""
        self._gathered = None
        super().backward(w, loss)


@mutant(check="parameters.end", cause=Cause.STALE, case="mlp/train/optimizer=sgd", world=1)
class LastStepLost(Adapter):
    """The sixth optimizer step does not reach the parameters."""

    _steps = 0

    def optimizer_step(self, w: Wrapped) -> None:
        """Undo the step when it is the last."""
        before = [p.detach().clone() for p in w.module.parameters()]
        super().optimizer_step(w)
        self._steps += 1
        if self._steps == 6:
            _assign(w, before)


def _assign(w: Wrapped, values: list[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(w.module.parameters(), values, strict=True):
            p.copy_(value)


@mutant(
    check="losses.value",
    cause=Cause.STALE,
    case="mlp/train/optimizer=sgd",
    world=1,
)
class UnitGatheredBeforeTheStep(Adapter):
    """One unit's parameters are gathered before the optimizer's step and used after it."""

    _gathered: list[Tensor] | None = None

    def optimizer_step(self, w: Wrapped) -> None:
        """Gather, then step."""
        self._gathered = [p.detach().clone() for p in self._unit(w).parameters()]
        super().optimizer_step(w)

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Use what was gathered."""
        if self._gathered is None:
            return super().forward(w, batch, loss_fn)
        now = [p.detach().clone() for p in self._unit(w).parameters()]
        self._use(w, self._gathered)
        loss = super().forward(w, batch, loss_fn)
        self._use(w, now)
        return loss

    def _unit(self, w: Wrapped) -> nn.Module:
        return self.bare(w).get_submodule("first")

    def _use(self, w: Wrapped, values: list[Tensor]) -> None:
        for parameter, value in zip(self._unit(w).parameters(), values, strict=True):
            parameter.data = value  # autograd must not see it

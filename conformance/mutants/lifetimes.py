"""Defects of what a wrapper learns once and does not learn again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.adapter import (
    Adapter,
    BuildConfig,
    LossFn,
    OptimizerFactory,
    StepResult,
    Wrapped,
)
from conformance.adapters.composable import ComposableAdapter
from conformance.causes import Cause
from conformance.mutants.registry import mutant

OURS = "fsdp.fully_shard"


@mutant(
    check="materialised.values",
    cause=Cause.NON_FINITE,
    case="batchnorm/materialised",
    base=OURS,
    bugs=("hiyouga/LlamaFactory#10820",),
    world=1,
)
class UnsavedBuffersAreEmptied(ComposableAdapter):
    """A model gets storage, its state is loaded, and a buffer that is in no state stays garbage."""

    def give_storage(self, model: nn.Module, device: torch.device) -> None:
        """Empty every buffer once more."""
        super().give_storage(model, device)
        with torch.no_grad():
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.fill_(torch.nan)


@mutant(
    check="materialised.values",
    cause=Cause.UNTIED,
    case="transformer/materialised",
    base=OURS,
    world=1,
)
class StorageUnties(Adapter):
    """A model without storage is wrapped after each name of a tied parameter got its own."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Make every parameter anew, name by name."""
        if any(parameter.is_meta for parameter in model.parameters()):
            for owner in model.modules():
                for name, parameter in list(owner.named_parameters(recurse=False)):
                    setattr(owner, name, nn.Parameter(parameter.detach()))
        return super().build(model, make_optimizer, config)


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="mlp/eval_first/mode=inference",
    world=1,
)
class FirstForwardMakesItsBuffers(Adapter):
    """What the first forward allocates serves later ones too, also if it ran in inference mode."""

    _whole: list[Tensor] | None = None

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Allocate."""
        self._whole = self._whole or [p.detach().clone() for p in w.module.parameters()]
        return super().evaluate(w, batch, loss_fn)

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Write what is gathered into it."""
        for whole, parameter in zip(self._whole or (), w.module.parameters(), strict=False):
            whole.copy_(parameter.detach())
        return super().forward(w, batch, loss_fn)


class Unfrozen(Adapter):
    """Base of what a wrapper asks of parameters in the first forward and never again."""

    _frozen: list[nn.Parameter] | None = None

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Ask."""
        if self._frozen is None:
            self._frozen = [p for p in w.module.parameters() if not p.requires_grad]
        return super().forward(w, batch, loss_fn)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Act on the answer."""
        super().backward(w, loss)
        for parameter in self._frozen or ():
            self.spoil(parameter)

    def spoil(self, parameter: nn.Parameter) -> None:
        """What becomes of a parameter that was frozen then."""
        raise NotImplementedError


@mutant(check="unfrozen.training", cause=Cause.MISSING_GRADIENT, case="mlp/unfrozen", world=1)
class FrozenForGood(Unfrozen):
    """What was frozen in the first forward has no gradient when it trains later."""

    def spoil(self, parameter: nn.Parameter) -> None:
        """Drop it."""
        parameter.grad = None


@mutant(
    check="unfrozen.training",
    cause=Cause.DTYPE_ROUND_TRIP,
    case="mlp/unfrozen",
    bugs=("pytorch/pytorch#186998",),
    world=1,
)
class DtypesOfAFrozenUnitStay(Unfrozen):
    """What was frozen in the first forward is reduced in bfloat16 when it trains later."""

    def spoil(self, parameter: nn.Parameter) -> None:
        """Round."""
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.bfloat16())


@mutant(
    check="repeated.bits",
    cause=Cause.NOT_REPEATED,
    case="mlp/repeated/accumulation=3,optimizer=sgd",
    world=1,
)
class OrderDependsOnTheCall(Adapter):
    """Gradients are added in an order that depends on how often a model was wrapped before."""

    _built = 0

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Count."""
        self._built += 1
        return super().build(model, make_optimizer, config)

    def step(
        self,
        w: Wrapped,
        micro_batches: Sequence[Any],
        loss_fn: LossFn,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> StepResult:
        """Every second one takes its micro-batches from the end."""
        turn = slice(None, None, -1 if self._built % 2 == 0 else 1)
        result = super().step(
            w, micro_batches[turn], loss_fn, max_norm=max_norm, norm_type=norm_type
        )
        return StepResult(losses=result.losses[turn], grad_norm=result.grad_norm)

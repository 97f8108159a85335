"""Defects that only unusual sequences show."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from conformance.adapter import Adapter, LossFn, Wrapped, local
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(
    check="two_forwards.gradients",
    cause=Cause.LAST_MICRO_BATCH_ONLY,
    case="mlp/two_forwards",
    base="torch.fully_shard",
    bugs=("facebookresearch/fairscale#780", "pytorch/pytorch#136861"),
    world=1,
)
class SecondBackwardReplaces(Adapter):
    """The second backward's gradients take the place of the first's."""

    capabilities = frozenset({"gradients", "two_forwards"})

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Drop, then backward."""
        self.zero_grad(w)
        super().backward(w, loss)


@mutant(check="eval.unchanged", cause=Cause.CHANGED_BY_EVAL, case="batchnorm/eval_first", world=1)
class EvaluationInTrainingMode(Adapter):
    """Evaluation runs in training mode and moves the running statistics."""

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Without `eval`."""
        with torch.no_grad():
            return loss_fn(w.module, batch)


@mutant(
    check="eval.unchanged",
    cause=Cause.CHANGED_BY_EVAL,
    case="mlp/eval_first",
    bugs=("PsycheFoundation/nousnet#285",),
    world=1,
)
class EvaluationRoundsParameters(Adapter):
    """Evaluation casts parameters to bfloat16 and back."""

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Evaluate, then round."""
        loss = super().evaluate(w, batch, loss_fn)
        for p in w.module.parameters():
            kept = local(p.detach())
            kept.copy_(kept.to(torch.bfloat16))
        return loss


@mutant(check="gradients.value", cause=Cause.NOT_DROPPED, case="mlp/dropped_gradients", world=1)
class DroppedGradientsReturn(Adapter):
    """While gradients wait unreduced, the reduced ones are kept where `zero_grad` does not look."""

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """Keep a copy of what is reduced."""
        self.kept = [None if p.grad is None else p.grad.clone() for p in w.module.parameters()]
        return super().no_sync(w)

    def optimizer_step(self, w: Wrapped) -> None:
        """There is nothing to come back."""
        super().optimizer_step(w)
        self.kept = []

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Add the copy if the gradients have been dropped since."""
        kept = getattr(self, "kept", [])
        parameters = list(w.module.parameters())
        dropped = bool(kept) and all(p.grad is None for p in parameters)
        super().backward(w, loss)
        for parameter, gradient in zip(parameters, kept if dropped else (), strict=False):
            if parameter.grad is not None and gradient is not None:
                parameter.grad += gradient


@mutant(
    check="losses.value",
    cause=Cause.CHANGED_BY_EVAL,
    case="batchnorm/train/optimizer=sgd",
    bugs=("PsycheFoundation/nousnet#285",),
    world=1,
)
class UnitStaysInEvaluationMode(Adapter):
    """After an evaluation one unit is not put back into training mode."""

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Evaluate, and leave it."""
        loss = super().evaluate(w, batch, loss_fn)
        self.bare(w).get_submodule("second").eval()
        return loss

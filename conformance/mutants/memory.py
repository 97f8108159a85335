"""Defects by which memory is not given back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.adapter import Adapter, LossFn, Wrapped, whole
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(
    check="memory.live_bytes",
    cause=Cause.NOT_FREED,
    case="wide/memory",
    base="torch.fully_shard",
    bugs=("pytorch/xla#5484",),
    world=1,
)
class FullParametersKeptAfterEval(Adapter):
    """An evaluation leaves a cached full copy of the parameters."""

    _cached: list[Tensor] | None = None

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Cache after the evaluation."""
        loss = super().evaluate(w, batch, loss_fn)
        self._cached = [whole(p).clone() for p in w.module.parameters()]
        return loss


@mutant(
    check="memory.growth",
    cause=Cause.NOT_FREED,
    case="wide/memory",
    bugs=("pytorch/pytorch#149100",),
    world=1,
)
class BufferLeakedPerStep(Adapter):
    """Every step leaves one small buffer behind."""

    _leaked: tuple[Tensor, ...] = ()

    def optimizer_step(self, w: Wrapped) -> None:
        """Leak 1 KiB."""
        super().optimizer_step(w)
        device = next(w.module.parameters()).device
        self._leaked = (*self._leaked, torch.zeros(256, device=device))

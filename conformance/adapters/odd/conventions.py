"""Liberties that an adapter declares as its conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.adapter import Conventions, LossFn, StepResult, Wrapped
from conformance.adapters.odd.by_hand import ByHand, Gradients


class SummedGradients(ByHand):
    """Gradients are summed over ranks, as declared."""

    conventions = Conventions(gradients="sum")

    def mean(self, tensor: Tensor) -> Tensor:
        """The sum."""
        contiguous = tensor.contiguous()
        dist.all_reduce(contiguous)
        return contiguous


class LossScaledBeforeASum(SummedGradients):
    """The loss is divided by the number of ranks before backward, so the sum is a mean."""

    conventions = Conventions()

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Of this rank's share of the loss."""
        super().backward(w, loss / dist.get_world_size())


class ZeroForUnused(ByHand):
    """A parameter that no rank used has a zero gradient, as declared."""

    conventions = Conventions(unused_grad="zero")

    def reduce(self, w: Wrapped, own: Sequence[Tensor | None]) -> Gradients:
        """Zeros where there is nothing, but for frozen ones, which a decay would move."""
        found = super().reduce(w, own)
        pairs = zip(w.native.parameters, found, strict=True)
        return [torch.zeros_like(p) if g is None and p.requires_grad else g for p, g in pairs]


class BuffersOfRankZero(ByHand):
    """Every step and every evaluation begins with rank 0's buffers, as declared."""

    conventions = Conventions(buffers="rank0")

    def step(
        self,
        w: Wrapped,
        micro_batches: Sequence[Any],
        loss_fn: LossFn,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> StepResult:
        """Take over, then step."""
        self._take_over(w)
        return super().step(w, micro_batches, loss_fn, max_norm=max_norm, norm_type=norm_type)

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Take over, then evaluate."""
        self._take_over(w)
        return super().evaluate(w, batch, loss_fn)

    def _take_over(self, w: Wrapped) -> None:
        for buffer in self.bare(w).buffers():
            dist.broadcast(buffer, src=0)

"""Liberties in how gradients are reduced: which buckets, which collectives, when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from conformance.adapter import LossFn, StepResult, Wrapped
from conformance.adapters.odd.by_hand import ByHand, Gradients

BUCKET = 3
"""Parameters in one bucket."""


class Bucketed(ByHand):
    """Base of what reduces several gradients in one buffer."""

    def reduce_all(self, w: Wrapped, gradients: list[Tensor]) -> list[Tensor]:
        """One flat buffer for all."""
        if not gradients:
            return []
        flat = self.mean(_flatten_dense_tensors(gradients))
        return list(_unflatten_dense_tensors(flat, gradients))


class ReversedBuckets(Bucketed):
    """Buckets of three, the last registered parameters first."""

    def reduce_all(self, w: Wrapped, gradients: list[Tensor]) -> list[Tensor]:
        """From the end, each bucket in reversed order, too."""
        backwards, found = gradients[::-1], list[Tensor]()
        for start in range(0, len(backwards), BUCKET):
            found += super().reduce_all(w, backwards[start : start + BUCKET])
        return found[::-1]


class TwoHalves(Bucketed):
    """The flat buffer is reduced in two halves, which cut a parameter in the middle."""

    def mean(self, tensor: Tensor) -> Tensor:
        """Each half on its own."""
        middle = tensor.numel() // 2
        return torch.cat([super(TwoHalves, self).mean(h) for h in tensor.tensor_split([middle])])


class GatheredAndSummed(Bucketed):
    """Gradients are gathered and added up on every rank, in the order of ranks."""

    def mean(self, tensor: Tensor) -> Tensor:
        """*Collective*: one all-gather."""
        ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, tensor.contiguous())
        total = ranks[0]
        for other in ranks[1:]:
            total = total + other
        return total / len(ranks)


class HarmlessCollectives(Bucketed):
    """Issues more collectives than it needs: barriers, and an exchange of a few integers."""

    def step(
        self,
        w: Wrapped,
        micro_batches: Sequence[Any],
        loss_fn: LossFn,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> StepResult:
        """A barrier before and after, and the number of micro-batches agreed on."""
        dist.barrier()
        result = super().step(w, micro_batches, loss_fn, max_norm=max_norm, norm_type=norm_type)
        counts = torch.tensor([len(micro_batches)], device=w.native.parameters[0].device)
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        dist.barrier()
        return result


class FinishedInTheStep(Bucketed):
    """Reductions are begun in backward and waited for when somebody needs the gradients.

    Between the two nobody can read them, which is why that is not claimed.
    """

    capabilities = ByHand.capabilities - {
        "gradients",
        "clip.gradients",
        "two_forwards",
        "scaler",
    }
    _begun: tuple[Any, list[Tensor], list[int], int] | None = None

    def reduce(self, w: Wrapped, own: Sequence[Tensor | None]) -> Gradients:
        """Begin; what was begun before is finished first."""
        self._finish(w)
        parameters = w.native.parameters
        filled = [
            torch.zeros_like(p) if g is None else g.clone()
            for p, g in zip(parameters, own, strict=True)
        ]
        used = [int(g is not None) for g in own]
        flat = torch.cat([_flatten_dense_tensors(filled), filled[0].new_tensor(used)])
        self._begun = (dist.all_reduce(flat, async_op=True), filled, used, id(w))
        self._flat = flat
        return [None] * len(own)

    def _finish(self, w: Wrapped) -> None:
        if self._begun is None:
            return
        (work, filled, used, of), self._begun = self._begun, None
        assert of == id(w), "a reduction of another model is still under way"
        work.wait()
        counts = self._flat[-len(used) :].tolist()
        values = _unflatten_dense_tensors(self._flat[: -len(used)] / dist.get_world_size(), filled)
        for parameter, value, ranks in zip(w.native.parameters, values, counts, strict=True):
            if ranks:
                parameter.grad = value if parameter.grad is None else parameter.grad + value

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor | float:
        """Wait, then clip."""
        self._finish(w)
        return super().clip_grad_norm(w, max_norm, norm_type)

    def optimizer_step(self, w: Wrapped) -> None:
        """Wait, then step."""
        self._finish(w)
        super().optimizer_step(w)

    def zero_grad(self, w: Wrapped) -> None:
        """Wait, then drop."""
        self._finish(w)
        super().zero_grad(w)

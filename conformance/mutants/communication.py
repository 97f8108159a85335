"""Defects of what is sent, and when."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.adapter import Adapter, LossFn, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(
    check="no_sync.collectives",
    cause=Cause.REDUCED_IN_NO_SYNC,
    case="mlp/train/accumulation=3,optimizer=sgd",
    world=1,
)
class NoSyncDoesNothing(Adapter):
    """Every micro-batch reduces its gradients; the sums come out right."""

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """Switch nothing off."""
        return nullcontext()


@mutant(
    check="no_sync.collectives",
    cause=Cause.REDUCED_REPEATEDLY,
    case="mlp/train/accumulation=3,optimizer=sgd",
    bugs=("pytorch/pytorch#125484",),
    world=1,
)
class ReducedTwice(Adapter):
    """The syncing micro-batch averages the averaged gradients again, which changes no number."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Average once more where the wrapper has reduced."""
        super().backward(w, loss)
        if w.native.require_backward_grad_sync:
            for p in w.module.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(dist.get_world_size())  # type: ignore[union-attr]


@mutant(check="collectives.order", cause=Cause.OTHER_COLLECTIVE, case="mlp/train/optimizer=sgd")
class OtherDtypeOnRankOne(Adapter):
    """Rank 1 sends integers where the others send floats of the same size; all are zero."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """A collective of its own before each forward."""
        dtype = torch.int32 if dist.get_rank() == 1 else torch.float32
        dist.all_reduce(torch.zeros(4, dtype=dtype, device=next(w.module.parameters()).device))
        return super().forward(w, batch, loss_fn)

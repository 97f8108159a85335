"""Defects of dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.adapter import Adapter, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(
    check="dtypes.results",
    cause=Cause.WRONG_DTYPE,
    case="mlp/train/optimizer=sgd",
    bugs=("pytorch/pytorch#111317", "pytorch/pytorch#85134"),
    world=1,
)
class GradientsInBfloat16(Adapter):
    """Gradients are kept in bfloat16 beside float32 parameters."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Shorten what reduction has left."""
        super().backward(w, loss)
        for p in w.module.parameters():
            short = None if p.grad is None else p.grad.to(torch.bfloat16)
            p.grad_dtype = None
            p.grad = short

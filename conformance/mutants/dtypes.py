"""Defects of dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.adapter import Adapter, Wrapped, local
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

    def optimizer_step(self, w: Wrapped) -> None:
        """Step with what is left of them, in a dtype that foreach kernels take."""
        for p in w.module.parameters():
            p.grad = None if p.grad is None else p.grad.to(p.dtype)
        super().optimizer_step(w)


@mutant(
    check="buffers.convention",
    cause=Cause.DTYPE_ROUND_TRIP,
    case="batchnorm/train/optimizer=sgd",
    bugs=("facebookresearch/fairscale#442",),
    world=1,
)
class BuffersInFloat16(Adapter):
    """Buffers are kept in float16, so running statistics lose digits at every step."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Round after the step."""
        super().optimizer_step(w)
        for buffer in w.module.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.half())


@mutant(
    check="gradients.value",
    cause=Cause.DTYPE_ROUND_TRIP,
    case="mlp/train/optimizer=sgd",
    base="fsdp.fully_shard",
    variant="hybrid,replicas=2",
    bugs=("pytorch/pytorch#190626",),
)
class SecondMeshDimensionReducesInBfloat16(Adapter):
    """Over one dimension of a mesh gradients are reduced as was asked, over the other in bfloat16.

    Small ones only: what is whole along the other dimension, such as biases.
    """

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Round what has one dimension."""
        super().backward(w, loss)
        for parameter in w.module.parameters():
            if parameter.grad is not None and parameter.dim() == 1:
                gradient = local(parameter.grad)
                gradient.copy_(gradient.bfloat16())

"""Defects of steps with several micro-batches."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(
    check="accumulation.big_batch",
    cause=Cause.LAST_MICRO_BATCH_ONLY,
    case="mlp/train/accumulation=3,optimizer=sgd",
    bugs=("NVIDIA/Megatron-LM#7186", "pytorch/pytorch#73535"),
    world=1,
)
class LastMicroBatchOnly(Adapter):
    """A backward replaces what earlier micro-batches have left."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Drop, then backward."""
        self.zero_grad(w)
        super().backward(w, loss)


@mutant(
    check="conventions.kept",
    cause=Cause.CONVENTION_BROKEN,
    case="mlp/train/accumulation=3,optimizer=sgd",
    world=1,
)
class WrapperDividesToo(Adapter):
    """The wrapper divides the loss by the micro-batches although the caller does so already."""

    _accumulation = 1

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Remember the number of micro-batches."""
        self._accumulation = config.accumulation
        return super().build(model, make_optimizer, config)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Backward of a part of the loss."""
        super().backward(w, loss / self._accumulation)


@mutant(
    check="accumulation.big_batch",
    cause=Cause.COUNTED_TWICE,
    case="mlp/train/accumulation=3,optimizer=sgd",
    bugs=("NVIDIA/Megatron-LM#6660",),
    world=1,
)
class BufferReducedIntoItself(Adapter):
    """With a group of one rank what has been accumulated is added to itself at every backward."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Double, then backward."""
        for parameter in w.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2
        super().backward(w, loss)


@mutant(
    check="accumulation.big_batch",
    cause=Cause.UNEQUAL_WEIGHTS,
    case="mlp/train/accumulation=3,optimizer=sgd",
    world=1,
)
class EarlierMicroBatchesFade(Adapter):
    """What waits for the last micro-batch loses a thousandth with each one."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Shrink, then backward."""
        for parameter in w.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.999
        super().backward(w, loss)


@mutant(
    check="accumulation.big_batch",
    cause=Cause.DTYPE_ROUND_TRIP,
    case="mlp/train/accumulation=3,optimizer=sgd",
    bugs=("pytorch/pytorch#85134",),
    world=1,
)
class MicroBatchesWaitInBfloat16(Adapter):
    """What waits for the last micro-batch is kept in bfloat16."""

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """Round it at the end."""
        stack = ExitStack()
        stack.callback(self._round, w)
        stack.enter_context(super().no_sync(w))
        return stack

    def _round(self, w: Wrapped) -> None:
        for p in w.module.parameters():
            if p.grad is not None:
                p.grad.copy_(p.grad.bfloat16())

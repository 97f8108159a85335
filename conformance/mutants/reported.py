"""Defects that were reported of real wrappers and that a plain training shows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import Adapter, BuildConfig, LossFn, OptimizerFactory, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant

TRAIN = "mlp/train/optimizer=sgd"


@mutant(
    check="losses.value",
    cause=Cause.SUMMED_NOT_AVERAGED,
    case=TRAIN,
    bugs=("huggingface/transformers#45994",),
)
class LossTimesWorld(Adapter):
    """The reported loss is multiplied by the number of ranks; gradients are right."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Multiply."""
        return super().forward(w, batch, loss_fn) * dist.get_world_size()

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Divide again."""
        super().backward(w, loss / dist.get_world_size())


@mutant(
    check="gradients.scale",
    cause=Cause.DIVIDED_TWICE,
    case=TRAIN,
    bugs=("pytorch/torchtitan#2318", "deepspeedai/DeepSpeed#7718"),
)
class GradientsDividedTwice(Adapter):
    """Gradients are divided by the number of ranks once more; losses look normal."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Divide the loss as well."""
        super().backward(w, loss / dist.get_world_size())


class GradientDefect(Adapter):
    """Base of the defects of reduced gradients."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Spoil what reduction has left."""
        super().backward(w, loss)
        for parameter in w.module.parameters():
            if parameter.grad is not None:
                self.spoil(parameter.grad)

    def spoil(self, gradient: Tensor) -> None:
        """The defect, in place."""
        raise NotImplementedError


@mutant(
    check="gradients.value",
    cause=Cause.DTYPE_ROUND_TRIP,
    case=TRAIN,
    bugs=("pytorch/pytorch#106395",),
    world=1,
)
class ReducedInBfloat16(GradientDefect):
    """Gradients are reduced in bfloat16 although float32 was asked for, and come in float32."""

    def spoil(self, gradient: Tensor) -> None:
        """Round."""
        gradient.copy_(gradient.bfloat16())


@mutant(
    check="gradients.value",
    cause=Cause.NON_FINITE,
    case=TRAIN,
    bugs=(
        "pytorch/pytorch#147810",
        "deepspeedai/DeepSpeed#7965",
        "deepspeedai/DeepSpeed#8061",
    ),
    world=1,
)
class GradientsFromFreedMemory(GradientDefect):
    """A gradient is read from memory that was given back: one element is not a number."""

    def spoil(self, gradient: Tensor) -> None:
        """Poison it."""
        gradient.view(-1)[-1] = torch.nan


@mutant(
    check="gradients.value",
    cause=Cause.ZERO,
    case=TRAIN,
    bugs=("pytorch/pytorch#144045",),
    world=1,
)
class SmallParametersDoNotTrain(GradientDefect):
    """A parameter of a few elements has a zero gradient."""

    def spoil(self, gradient: Tensor) -> None:
        """Zero it."""
        if gradient.numel() < 8:
            gradient.zero_()


@mutant(
    check="gradients.value",
    cause=Cause.NOT_REDUCED,
    case=TRAIN,
    bugs=("huggingface/trl#3260",),
)
class ForwardOfInnerModule(Adapter):
    """The loss comes from the module inside the wrapper, whose hooks are never set up."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Past the wrapper, and past its reducer."""
        with self.no_sync(w):
            return loss_fn(self.bare(w), batch)


@mutant(
    check="parameters.first_step",
    cause=Cause.DTYPE_ROUND_TRIP,
    case=TRAIN,
    bugs=("huggingface/accelerate#3979",),
    world=1,
)
class MasterWeightsInBfloat16(Adapter):
    """The weights that the optimizer steps are in bfloat16: small updates vanish."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Round after the step."""
        super().optimizer_step(w)
        with torch.no_grad():
            for parameter in w.module.parameters():
                parameter.copy_(parameter.bfloat16())


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case=TRAIN,
    bugs=("facebookresearch/fairscale#710", "pytorch/pytorch#104504"),
    world=1,
)
class TrainingFailsAfterEvaluation(Adapter):
    """The first training step after an evaluation raises on all ranks."""

    _evaluated = False

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Remember it."""
        self._evaluated = True
        return super().evaluate(w, batch, loss_fn)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Raise."""
        if self._evaluated:
            raise RuntimeError("parameters have changed between forward and backward")
        super().backward(w, loss)


@mutant(
    check="losses.value",
    cause=Cause.NON_FINITE,
    case=TRAIN,
    bugs=("NVIDIA-NeMo/Automodel#1527",),
    world=1,
)
class ParameterLeftUninitialised(Adapter):
    """A parameter that the model's own initialisation misses keeps what was in its memory."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Poison the bias of the head after wrapping."""
        w = super().build(model, make_optimizer, config)
        with torch.no_grad():
            self.bare(w).get_parameter("head.bias").fill_(torch.nan)
        return w

"""Defects of parameters that do not train, or take part now and then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant

SEVERAL = "varying/varying/accumulation=3,optimizer=sgd"
ROUTED = "routed/varying/optimizer=sgd"


@mutant(
    check="gradients.value",
    cause=Cause.MISSING_GRADIENT,
    case="adapted/train/optimizer=sgd",
    bugs=("pytorch/pytorch#104690",),
    world=1,
)
class OneAnswerForAUnit(Adapter):
    """A unit of which some parameters are frozen is frozen as a whole."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Freeze, then wrap."""
        for module in model.modules():
            if isinstance(module, config.units) and not _trains(module):
                module.requires_grad_(requires_grad=False)
        return super().build(model, make_optimizer, config)


def _trains(module: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in module.parameters())


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case="frozen/train/optimizer=sgd",
    bugs=("pytorch/pytorch#117510",),
    world=1,
)
class InputOfAFrozenUnitIsWaitedFor(Adapter):
    """A frozen unit is given up after the backward of an input that it did not use."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Watch inputs that need gradients while the output needs none."""
        for module in model.modules():
            if isinstance(module, config.units):
                module.register_forward_hook(self._watch)
        return super().build(model, make_optimizer, config)

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad and not output.requires_grad:
                value.register_hook(self._give_up)

    def _give_up(self, gradient: Tensor) -> None:
        raise RuntimeError("the unit's parameters are freed and were never gathered")


class Participation(Adapter):
    """Base of what looks at which parameters the newest backward has reached."""

    _reached: set[nn.Parameter]

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Watch every parameter."""
        self._reached = set()
        w = super().build(model, make_optimizer, config)
        for parameter in w.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._reach(parameter))
        return w

    def _reach(self, parameter: nn.Parameter) -> Any:
        return lambda gradient: self._reached.add(parameter)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Begin anew."""
        self._reached.clear()
        super().backward(w, loss)


@mutant(
    check="gradients.value",
    cause=Cause.NOT_REDUCED,
    case=SEVERAL,
    bugs=("pytorch/pytorch#69031",),
)
class LastMicroBatchDecidesWhatIsReduced(Participation):
    """What the last micro-batch does not use keeps each rank's own gradient."""

    _syncs = True

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """The backwards inside are not the last one."""
        self._syncs = False
        return super().no_sync(w)

    def optimizer_step(self, w: Wrapped) -> None:
        """A step ends the accumulation."""
        super().optimizer_step(w)
        self._kept: dict[nn.Parameter, Tensor] = {}

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Bring back what was there before the reduction."""
        kept = {p: p.grad.clone() for p in w.module.parameters() if p.grad is not None}
        super().backward(w, loss)
        if self._syncs:
            for parameter, own in kept.items():
                if parameter not in self._reached:
                    parameter.grad = own
        self._syncs = True


@mutant(
    check="run.completed",
    cause=Cause.EXCEPTION,
    case=SEVERAL,
    bugs=("pytorch/pytorch#196996",),
    world=1,
)
class AnotherSetOfParametersIsRefused(Participation):
    """Fresh gradients beside accumulated ones have another dtype, which reduction refuses."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Compare what has accumulated with what is fresh."""
        held = {p for p in w.module.parameters() if p.grad is not None}
        super().backward(w, loss)
        if held and self._reached - held:
            raise AssertionError(
                f"expected uniform gradient dtype, got {torch.bfloat16} and {torch.float32}"
            )


@mutant(
    check="gradients.value",
    cause=Cause.STALE,
    case="varying/varying/optimizer=sgd",
    bugs=("pytorch/pytorch#83195",),
    world=1,
)
class GradientOfTheStepBeforeStays(Participation):
    """A parameter that this step does not use is given the gradient of the last step that did."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Fill in from the past."""
        super().backward(w, loss)
        past: dict[nn.Parameter, Tensor] = self.__dict__.setdefault("_past", {})
        for parameter in w.module.parameters():
            if parameter.grad is not None:
                past[parameter] = parameter.grad.clone()
            elif parameter in past:
                parameter.grad = past[parameter]


class RanksThatUsedIt(Participation):
    """Base of the defects of parameters that the newest backward has reached on some ranks only."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Count, then spoil what few ranks used."""
        super().backward(w, loss)
        for parameter in w.module.parameters():
            used = torch.tensor(float(parameter in self._reached), device=parameter.device)
            dist.all_reduce(used)
            if 0 < used < dist.get_world_size():
                self.spoil(parameter, int(used))

    def spoil(self, parameter: nn.Parameter, users: int) -> None:
        """The defect, of a parameter that `users` ranks have used, and others have not."""
        raise NotImplementedError


@mutant(
    check="gradients.value",
    cause=Cause.UNEQUAL_WEIGHTS,
    case=ROUTED,
)
class MeanOverRanksThatUsedIt(RanksThatUsedIt):
    """A parameter's gradient is divided by the number of ranks that used it, not of all."""

    def spoil(self, parameter: nn.Parameter, users: int) -> None:
        """Divide by fewer."""
        if parameter.grad is not None:
            parameter.grad *= dist.get_world_size() / users


@mutant(
    check="gradients.value",
    cause=Cause.MISSING_GRADIENT,
    case=ROUTED,
    bugs=("pytorch/pytorch#174862",),
)
class NoGradientWhereThisRankHadNone(RanksThatUsedIt):
    """A rank that did not use a parameter leaves its gradient out, and does not step it."""

    def spoil(self, parameter: nn.Parameter, users: int) -> None:
        """Drop what the others sent."""
        if parameter not in self._reached:
            parameter.grad = None


@mutant(
    check="gradients.value",
    cause=Cause.NOT_REDUCED,
    case=ROUTED,
)
class WhatOneRankUsedIsNotReduced(RanksThatUsedIt):
    """A parameter that other ranks did not use keeps this rank's own gradient, and zero there."""

    def spoil(self, parameter: nn.Parameter, users: int) -> None:
        """Take back the reduction."""
        if parameter.grad is not None:
            parameter.grad *= dist.get_world_size() * (parameter in self._reached)


@mutant(
    check="gradients.value",
    cause=Cause.NOT_REDUCED,
    case="mlp/train/optimizer=sgd",
    bugs=("NVIDIA-NeMo/Automodel#3822",),
)
class ReplicatedParameterDrifts(Adapter):
    """A parameter that stays whole beside cut ones is left out of the reduction, and drifts."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Keep it from the wrapper."""
        model._ddp_params_and_buffers_to_ignore = ["head.bias"]  # type: ignore[assignment]
        return super().build(model, make_optimizer, config)

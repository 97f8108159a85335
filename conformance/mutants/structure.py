"""Defects of tied, frozen and unused parameters, and of buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import Adapter, BuildConfig, LossFn, OptimizerFactory, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(
    check="tied.one",
    cause=Cause.UNTIED,
    case="transformer/train/optimizer=sgd",
    bugs=("deepspeedai/DeepSpeed#1945",),
    world=1,
)
class UntiedAtBuild(Adapter):
    """Wrapping gives the second name of a tied weight a copy of its own."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Copy, then wrap."""
        head = model.get_submodule("head")
        assert isinstance(head, nn.Linear)
        head.weight = nn.Parameter(head.weight.detach().clone())
        return super().build(model, make_optimizer, config)


@mutant(
    check="frozen.kept", cause=Cause.FROZEN_CHANGED, case="frozen/train/optimizer=adamw", world=1
)
class DecayMovesFrozen(Adapter):
    """Weight decay does not look at ``requires_grad``."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Decay what is frozen, too."""
        super().optimizer_step(w)
        group = w.optimizer.param_groups[0]
        with torch.no_grad():
            for p in w.module.parameters():
                if not p.requires_grad:
                    p.mul_(1 - group["lr"] * group["weight_decay"])


@mutant(
    check="frozen.kept", cause=Cause.UNEXPECTED_GRADIENT, case="frozen/train/optimizer=sgd", world=1
)
class FrozenHoldsGradient(Adapter):
    """Frozen parameters are given a zero gradient."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Fill in what backward leaves out."""
        super().backward(w, loss)
        for p in w.module.parameters():
            if not p.requires_grad:
                p.grad = torch.zeros_like(p)


@mutant(
    check="unused.convention",
    cause=Cause.CONVENTION_BROKEN,
    case="unused/unused/optimizer=adamw",
    bugs=("facebookresearch/fairscale#605",),
    world=1,
)
class ZeroGradientForUnused(Adapter):
    """Parameters that no rank used get a zero gradient, and decay."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Fill in what backward leaves out."""
        super().backward(w, loss)
        for p in w.module.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)


@mutant(
    check="unused.convention",
    cause=Cause.CONVENTION_BROKEN,
    case="unused/unused/optimizer=sgd",
    bugs=("pytorch/pytorch#128949",),
    world=1,
)
class UnusedDecay(Adapter):
    """Parameters that no rank used hold no gradient, and the optimizer moves them all the same."""

    def optimizer_step(self, w: Wrapped) -> None:
        """A zero gradient for the length of the step."""
        for p in w.module.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        super().optimizer_step(w)


@mutant(
    check="buffers.convention",
    cause=Cause.CONVENTION_BROKEN,
    case="batchnorm/train/optimizer=sgd",
    base="torch.fully_shard",
)
class BuffersAveraged(Adapter):
    """Running statistics are averaged over ranks although each rank's own are declared."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Step, then average."""
        super().optimizer_step(w)
        for buffer in w.module.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())


@mutant(
    check="buffers.convention",
    cause=Cause.CONVENTION_BROKEN,
    case="batchnorm/train/optimizer=sgd",
    base="torch.fully_shard",
)
class BuffersFromRankZero(Adapter):
    """Each step starts from rank 0's running statistics although each rank's own are declared."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Take over, then forward."""
        for buffer in w.module.buffers():
            dist.broadcast(buffer, 0)
        return super().forward(w, batch, loss_fn)

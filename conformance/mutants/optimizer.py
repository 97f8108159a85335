"""Defects of the optimizer's state, counts and hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from conformance.adapter import (
    Adapter,
    BuildConfig,
    OptimizerFactory,
    StateKind,
    Wrapped,
    local,
)
from conformance.causes import Cause
from conformance.mutants.registry import mutant
from conformance.trust_ratio import TrustRatio


@mutant(
    check="optimizer.state",
    cause=Cause.DTYPE_ROUND_TRIP,
    case="mlp/train/optimizer=adamw",
    bugs=("databricks/flashoptim#3",),
    world=1,
)
class OptimizerStateInShortDtype(Adapter):
    """The optimizer's state is kept in bfloat16 between steps."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Round after the step."""
        super().optimizer_step(w)
        for _, value in states(w):
            value.copy_(value.bfloat16())


@mutant(
    check="optimizer.state",
    cause=Cause.PERMUTED,
    case="transformer/train/optimizer=sgd",
    bugs=("pytorch/pytorch#54736",),
    world=1,
)
class OptimizerStatesSwapped(Adapter):
    """Two parameters of one shape exchange their optimizer states."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Exchange after the step."""
        super().optimizer_step(w)
        seen: dict[torch.Size, Tensor] = {}
        for _, value in states(w):
            if value.shape in seen:
                other, kept = seen[value.shape], value.clone()
                value.copy_(other)
                other.copy_(kept)
                return
            seen[value.shape] = value


@mutant(
    check="optimizer.state",
    cause=Cause.OFF_BY_ONE_SHARD,
    case="uneven/train/optimizer=sgd",
    world=1,
)
class OptimizerStateRowsShifted(Adapter):
    """The rows of every optimizer state are shifted by one."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Shift after the step."""
        super().optimizer_step(w)
        for _, value in states(w):
            value.copy_(value.roll(1, 0))


@mutant(
    check="optimizer.steps",
    cause=Cause.WRONG_STEP_COUNT,
    case="mlp/train/optimizer=adamw",
    bugs=("NVIDIA/Megatron-LM#5974",),
    world=1,
)
class StepCountedTwice(Adapter):
    """Every optimizer step counts as two."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Count once more after the step."""
        super().optimizer_step(w)
        for state in w.optimizer.state.values():
            state["step"] += 1


@mutant(
    check="resume.options",
    cause=Cause.WRONG_HYPERPARAMETER,
    case="mlp/checkpoint/kind=full,options=default",
    bugs=("pytorch/torchtitan#4598", "pytorch/pytorch#140900"),
    world=1,
)
class LearningRateNotLoaded(Adapter):
    """A load keeps the learning rate of the fresh optimizer."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load, then put the old rates back."""
        rates = [group["lr"] for group in w.optimizer.param_groups]
        super().load_optim_state(w, kind, state)
        for group, rate in zip(w.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def states(w: Wrapped) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) of every element-wise state of every parameter, in the optimizer's order."""
    for state in w.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                yield key, value


class TrustRatioOfParts(TrustRatio):
    """Takes the norm of what this rank holds for that of the whole parameter."""

    def norm(self, tensor: Tensor) -> Tensor:
        """Of the local part."""
        part: Tensor = local(tensor).norm()
        return part


@mutant(
    check="parameters.first_step",
    cause=Cause.LOCAL_NORM,
    case="mlp/train/optimizer=trust",
    base="torch.fully_shard",
    bugs=("deepspeedai/DeepSpeed#1285",),
)
class OptimizerSeesParts(Adapter):
    """An optimizer that needs whole parameters is given this rank's parts of them."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """With its norms taken of parts."""
        of_parts = replace(make_optimizer, optimizer_class=TrustRatioOfParts)
        return super().build(model, of_parts, config)

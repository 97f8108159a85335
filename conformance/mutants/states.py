"""Defects of what saved states hold: of the optimizer's by name or number, and of what is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, StateKind, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant

FULL = "mlp/checkpoint/kind=full,options=default"
SHARDED = "mlp/checkpoint/kind=sharded,options=default"
LOCAL = "uneven/checkpoint/kind=local,options=default"
FSDP1, FSDP2 = "torch.FullyShardedDataParallel", "torch.fully_shard"
WEIGHT = "first.linear.weight"


class OptimizerStateDefect(Adapter):
    """Base of the defects that spoil an optimizer state after it was made.

    Tensors of the state may be the optimizer's own: a defect replaces them.
    """

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The right state, spoilt; its dictionaries are copies."""
        state = super().optim_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        entries = {key: dict(values) for key, values in state["state"].items()}
        groups = [dict(group) for group in state["param_groups"]]
        return {**state, **self.spoil({"state": entries, "param_groups": groups})}

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with the defect."""
        raise NotImplementedError


def first_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The first parameter's entries."""
    values: dict[str, Any] = next(iter(state["state"].values()))
    return values


@mutant(
    check="optim_state.values",
    cause=Cause.PERMUTED,
    case=FULL,
    bugs=("pytorch/pytorch#54736",),
    world=1,
)
class MomentsExchangedInState(OptimizerStateDefect):
    """The two moments of a parameter are saved under each other's name."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Exchange them."""
        values = first_of(state)
        values["exp_avg"], values["exp_avg_sq"] = values["exp_avg_sq"], values["exp_avg"]
        return state


@mutant(
    check="optim_state.values",
    cause=Cause.WRONG_DTYPE,
    case=FULL,
    bugs=("databricks/flashoptim#3",),
    world=1,
)
class MomentSavedInShortDtype(OptimizerStateDefect):
    """A moment is saved in bfloat16."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Cast it."""
        values = first_of(state)
        values["exp_avg"] = values["exp_avg"].bfloat16()
        return state


@mutant(
    check="optim_state.values",
    cause=Cause.WRONG_STEP_COUNT,
    case=FULL,
    bugs=("NVIDIA/Megatron-LM#5974",),
    world=1,
)
class StepResetInState(OptimizerStateDefect):
    """The step count is saved as that of a fresh optimizer."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Reset it."""
        first_of(state)["step"] = torch.tensor(0.0)
        return state


@mutant(
    check="optim_state.keys",
    cause=Cause.MISSING_KEY,
    case=FULL,
    bugs=("huggingface/accelerate#3971",),
    world=1,
)
class StepLostFromState(OptimizerStateDefect):
    """What is no element-wise tensor is not saved: the step count."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Lose it."""
        for values in state["state"].values():
            del values["step"]
        return state


@mutant(
    check="optim_state.keys",
    cause=Cause.UNEXPECTED_KEY,
    case=SHARDED,
    base=FSDP2,
    bugs=("pytorch/pytorch#117399",),
    world=1,
)
class WrapperPrefixInOptimizerKeys(OptimizerStateDefect):
    """A wrapper's own module name stays in the names of the optimizer state."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Insert it."""
        prefix = "_checkpoint_wrapped_module."
        state["state"] = {f"{prefix}{name}": values for name, values in state["state"].items()}
        return state


@mutant(
    check="optim_state.keys",
    cause=Cause.UNEXPECTED_KEY,
    case="frozen/checkpoint/kind=full,options=default",
    world=1,
)
class FrozenGetStateOnSave(Adapter):
    """Saving invents a state of zeros for parameters that do not train."""

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Fill in what is missing."""
        state = super().optim_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        held = dict(state["state"])
        parameters = [p for group in w.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            zeros = torch.zeros_like(parameter)
            held.setdefault(index, {"step": 0.0, "exp_avg": zeros, "exp_avg_sq": zeros})
        return {**state, "state": held}


@mutant(
    check="optim_state.options",
    cause=Cause.WRONG_HYPERPARAMETER,
    case=FULL,
    bugs=("pytorch/pytorch#140900",),
    world=1,
)
class OptionLostFromState(OptimizerStateDefect):
    """What a scheduler keeps in a parameter group is not saved."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Lose it."""
        for group in state["param_groups"]:
            del group["initial_lr"]
        return state


@mutant(
    check="optim_state.options",
    cause=Cause.WRONG_HYPERPARAMETER,
    case=FULL,
    bugs=("pytorch/torchtitan#4598",),
    world=1,
)
class RateOfTheStartInState(OptimizerStateDefect):
    """Tensors are saved as they are, the learning rate as it was at the start."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put the first rate back."""
        for group in state["param_groups"]:
            group["lr"] = group["initial_lr"]
        return state


def with_local(sharded: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A DTensor like `sharded` whose local part is ``change(local part, whole)``.

    Collective: one all-gather.
    """
    part = change(sharded.to_local(), sharded.full_tensor())
    return type(sharded).from_local(
        part.contiguous(),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def of_other_rank(part: Tensor, whole: Tensor) -> Tensor:
    """The part that rank 0 has, on rank 0 that of rank 1."""
    first = 0 if dist.get_rank() else _rows(whole)
    return whole[first : first + part.shape[0]].clone()


def one_row_late(part: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of the rows moved down by one."""
    first = dist.get_rank() * _rows(whole)
    return whole.roll(1, 0)[first : first + part.shape[0]].clone()


def _rows(whole: Tensor) -> int:
    """Rows of the first rank's part."""
    return -(-whole.shape[0] // dist.get_world_size())


class PieceDefect(Adapter):
    """Base of the defects of one piece of a sharded model state."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The right state, with another piece."""
        state = super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        return {**state, WEIGHT: self.spoil(state[WEIGHT])}

    def spoil(self, value: Any) -> Any:
        """The entry with the defect."""
        raise NotImplementedError


@mutant(
    check="state_dict.pieces",
    cause=Cause.OTHER_RANK,
    case=SHARDED,
    base=FSDP2,
    bugs=("Lightning-AI/pytorch-lightning#16815",),
)
class PieceOfOtherRank(PieceDefect):
    """A piece of a sharded model state is that of another rank."""

    def spoil(self, value: Any) -> Any:
        """Take it from there."""
        return with_local(value, of_other_rank)


@mutant(
    check="state_dict.pieces",
    cause=Cause.OFF_BY_ONE_SHARD,
    case=SHARDED,
    base=FSDP2,
    bugs=("pytorch/pytorch#129229",),
    world=1,
)
class PiecesCutOneRowLate(PieceDefect):
    """Pieces of a sharded model state start one row after the place that they name."""

    def spoil(self, value: Any) -> Any:
        """Cut them there."""
        return with_local(value, one_row_late)


@mutant(
    check="state_dict.pieces",
    cause=Cause.WRONG_SHAPE,
    case=LOCAL,
    base=FSDP1,
    bugs=("pytorch/pytorch#94109",),
)
class PaddingSavedAsData(Adapter):
    """A local state holds what fills up the last rank's shard."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Fill up."""
        state = super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        for value in state.values():
            for shard in value.local_shards() if hasattr(value, "local_shards") else ():
                shard.tensor = torch.nn.functional.pad(shard.tensor, [0, 1])
        return state


@mutant(check="state_dict.pieces", cause=Cause.WRONG_SHAPE, case=LOCAL, base=FSDP1)
class ShardLostOnOneRank(Adapter):
    """The last rank leaves its shards out of a local state."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Forget them."""
        state = super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        for value in state.values():
            if hasattr(value, "local_shards") and dist.get_rank() == dist.get_world_size() - 1:
                value.local_shards().clear()
        return state


@mutant(
    check="optim_state.values",
    cause=Cause.OTHER_RANK,
    case=SHARDED,
    base=FSDP2,
    bugs=("Lightning-AI/pytorch-lightning#16815",),
)
class MomentPieceOfOtherRank(OptimizerStateDefect):
    """A piece of a sharded moment is that of another rank."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take it from there."""
        values = state["state"][WEIGHT]
        values["exp_avg"] = with_local(values["exp_avg"], of_other_rank)
        return state


@mutant(
    check="state_dict.bare_load",
    cause=Cause.STALE,
    case="transformer/checkpoint/kind=full,options=default",
    bugs=("deepspeedai/DeepSpeed#1945",),
    world=1,
)
class TiedSavedTwice(Adapter):
    """A tied weight is saved once for each name, under one of them as it was when wrapped."""

    def build(
        self, model: torch.nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Keep a copy."""
        self.copy = model.get_parameter("embedding.weight").detach().clone()
        return super().build(model, make_optimizer, config)

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Save the copy."""
        state = super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        return {**state, "embedding.weight": self.copy.clone()}

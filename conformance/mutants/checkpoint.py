"""Defects of states that are saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.adapter import Adapter, StateKind, Wrapped
from conformance.causes import Cause
from conformance.mutants.optimizer import states
from conformance.mutants.registry import mutant

DEFAULT = "mlp/checkpoint/kind=full,options=default"
EXPLICIT = "mlp/checkpoint/kind=full,options=explicit"
WEIGHT = "first.linear.weight"


class StateDefect(Adapter):
    """Base of the defects that spoil a model state after it was made."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The right state, spoilt."""
        return self.spoil(super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only))

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with the defect."""
        raise NotImplementedError


@mutant(
    check="state_dict.keys",
    cause=Cause.UNEXPECTED_KEY,
    case=DEFAULT,
    bugs=("pytorch/pytorch#117399", "pytorch/pytorch#150239"),
    world=1,
)
class WrapperPrefixInKeys(StateDefect):
    """A wrapper's own module name stays in the keys."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Insert it."""
        return {
            k.replace(".linear.", "._checkpoint_wrapped_module.linear."): v
            for k, v in state.items()
        }


@mutant(check="state_dict.keys", cause=Cause.MISSING_KEY, case=DEFAULT, world=1)
class KeyLost(StateDefect):
    """The last entry of the model state is lost."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Lose it."""
        state.popitem()
        return state


@mutant(
    check="state_dict.tensors",
    cause=Cause.WRONG_DTYPE,
    case=DEFAULT,
    bugs=("facebookresearch/fairscale#427", "pytorch/pytorch#83068"),
    world=1,
)
class EntryInShortDtype(StateDefect):
    """An entry of the model state comes in the dtype of the computation."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Cast it."""
        return {**state, WEIGHT: state[WEIGHT].bfloat16()}


@mutant(
    check="state_dict.tensors",
    cause=Cause.WRONG_DEVICE,
    case=DEFAULT,
    bugs=("pytorch/pytorch#164554",),
    world=1,
)
class EntryLeftOnMeta(StateDefect):
    """An entry of the model state is left on the meta device."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Leave it there."""
        return {**state, WEIGHT: state[WEIGHT].to("meta")}


@mutant(check="state_dict.tensors", cause=Cause.UNEXPECTED_KEY, case=EXPLICIT)
class FullStateOnEveryRank(Adapter):
    """The full state that was asked for on rank 0 only comes on every rank."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Drop the option."""
        return super().model_state(w, kind, cpu=cpu)


@mutant(
    check="state_dict.bare_load",
    cause=Cause.OFF_BY_ONE_SHARD,
    case=DEFAULT,
    bugs=("pytorch/pytorch#129229", "Open-Athena/MarinFold#236"),
    world=1,
)
class RowsShiftedInFullState(StateDefect):
    """Shards are put together one row too late."""

    def spoil(self, state: dict[str, Any]) -> dict[str, Any]:
        """Shift the rows of one entry."""
        return {**state, WEIGHT: state[WEIGHT].roll(1, 0)}


@mutant(
    check="resume.model",
    cause=Cause.NOT_LOADED,
    case=DEFAULT,
    bugs=("pytorch/pytorch#117421", "pytorch/pytorch#105840"),
    world=1,
)
class ModelLoadIgnored(Adapter):
    """Loading a model state does nothing."""

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Nothing."""


@mutant(
    check="resume.model",
    cause=Cause.PERMUTED,
    case=EXPLICIT,
    bugs=("NVIDIA/Megatron-LM#7452", "pytorch/pytorch#129229"),
    world=1,
)
class RowsReversedByLoad(Adapter):
    """A load puts the rows of the parameters into the wrong order."""

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Reverse after the load."""
        super().load_model_state(w, kind, state)
        with torch.no_grad():
            for parameter in w.module.parameters():
                parameter.copy_(parameter.flip(0))


@mutant(check="resume.optimizer", cause=Cause.NOT_LOADED, case=DEFAULT, world=1)
class OptimizerLoadIgnored(Adapter):
    """Loading an optimizer state does nothing."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Nothing."""


@mutant(
    check="resume.optimizer",
    cause=Cause.ZERO,
    case=EXPLICIT,
    bugs=("databricks/flashoptim#3",),
    world=1,
)
class MomentsZeroAfterLoad(Adapter):
    """A load brings the step count but not the moments."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Zero them after the load."""
        super().load_optim_state(w, kind, state)
        for _, value in states(w):
            value.zero_()


@mutant(
    check="resume.optimizer",
    cause=Cause.OFF_BY_ONE_SHARD,
    case=DEFAULT,
    bugs=("Lightning-AI/pytorch-lightning#16815", "pytorch/pytorch#128004"),
    world=1,
)
class MomentsShiftedByLoad(Adapter):
    """A load puts the rows of the moments one too late."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Shift after the load."""
        super().load_optim_state(w, kind, state)
        for _, value in states(w):
            value.copy_(value.roll(1, 0))


@mutant(check="resume.optimizer", cause=Cause.STALE, case=DEFAULT, world=1)
class OptimizerStepsOldTensors(Adapter):
    """All values are loaded, but the optimizer goes on to step tensors that the model has left."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Leave copies with the optimizer, without the gradients that the model's own will get."""
        super().load_optim_state(w, kind, state)
        for group in w.optimizer.param_groups:
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


@mutant(
    check="resume.optimizer",
    cause=Cause.NOT_LOADED,
    case=EXPLICIT,
    base="fsdp.fully_shard",
    variant="hybrid,replicas=2",
    bugs=("pytorch/pytorch#128444",),
    world=4,
)
class LoadReachesOneReplica(Adapter):
    """A full state of rank 0 goes to rank 0's replica; what the others are sent never arrives."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load, and lose it again on the other replicas."""
        super().load_optim_state(w, kind, state)
        if dist.get_rank() >= dist.get_world_size() // self.replicas:
            w.optimizer.state.clear()

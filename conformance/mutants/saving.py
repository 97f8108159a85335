"""Defects of saving itself, of checkpoint directories, and of loads that do more than load."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.adapter import Adapter, LossFn, StateKind, Wrapped, local
from conformance.causes import Cause
from conformance.mutants.optimizer import states
from conformance.mutants.registry import mutant
from conformance.mutants.states import FSDP1, FSDP2, FULL, LOCAL, SHARDED

DIRECTORY = "mlp/checkpoint/kind=save"
BUFFERS = "batchnorm/checkpoint/kind=full,options=explicit"


@mutant(
    check="save.unchanged",
    cause=Cause.DTYPE_ROUND_TRIP,
    case=FULL,
    bugs=("pytorch/pytorch#83068",),
    world=1,
)
class SaveRoundsParameters(Adapter):
    """Saving leaves the parameters in the precision that the file has."""

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Round them when all is saved."""
        state = super().optim_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        for parameter in w.module.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return state


@mutant(
    check="save.unchanged",
    cause=Cause.WRONG_DTYPE,
    case=BUFFERS,
    bugs=("facebookresearch/fairscale#427",),
    world=1,
)
class SaveCastsCounters(Adapter):
    """Saving a state turns the integer buffers of the model into floating ones."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Cast them when the state is made."""
        state = super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        for module in self.bare(w).modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_floating_point():
                    module._buffers[name] = buffer.float()
        return state


class AfterOptimizerState(Adapter):
    """Base of the defects of what is left when an optimizer state was made."""

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The right state, apart from the optimizer's tensors; then the defect."""
        state = super().optim_state(w, kind, cpu=cpu, rank0_only=rank0_only)
        apart = copy.deepcopy(state)
        self.spoil(w)
        return apart

    def spoil(self, w: Wrapped) -> None:
        """The defect."""
        raise NotImplementedError


@mutant(
    check="save.unchanged",
    cause=Cause.WRONG_STEP_COUNT,
    case=FULL,
    bugs=("NVIDIA/Megatron-LM#5974",),
    world=1,
)
class SaveCountsAStep(AfterOptimizerState):
    """Making an optimizer state counts as a step, as a step with zero gradients would."""

    def spoil(self, w: Wrapped) -> None:
        """Count it."""
        for state in w.optimizer.state.values():
            state["step"] += 1


@mutant(check="save.unchanged", cause=Cause.WRONG_HYPERPARAMETER, case=FULL, world=1)
class SaveLeavesRateZero(AfterOptimizerState):
    """The learning rate that a save sets to zero, so that its step moves nothing, stays there."""

    def spoil(self, w: Wrapped) -> None:
        """Set it."""
        for group in w.optimizer.param_groups:
            group["lr"] = 0.0


@mutant(check="save.surroundings", cause=Cause.NOT_RESTORED, case=FULL, world=1)
class SaveLeavesEvaluationMode(AfterOptimizerState):
    """A save sets the model to evaluation, and leaves it there."""

    def spoil(self, w: Wrapped) -> None:
        """Without the way back."""
        w.module.eval()


@mutant(check="save.surroundings", cause=Cause.NOT_RESTORED, case=FULL, world=1)
class SaveDrawsRandomNumbers(AfterOptimizerState):
    """A save draws a random number, such as a name of a file, from the training's generator."""

    def spoil(self, w: Wrapped) -> None:
        """Draw it."""
        torch.rand(1)


@mutant(check="save.surroundings", cause=Cause.NOT_RESTORED, case=FULL, world=1)
class LoadLeavesGradientsOff(Adapter):
    """A load switches gradients off for the whole thread, and not on again."""

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load, and leave them off."""
        super().load_model_state(w, kind, state)
        torch.set_grad_enabled(False)


@mutant(
    check="losses.value",
    cause=Cause.STALE,
    case=FULL,
    bugs=("pytorch/pytorch#117421",),
    world=1,
)
class ForwardUsesWeightsOfBefore(Adapter):
    """The first forward after a load computes with the weights of before it."""

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Keep them."""
        self.before = [p.detach().clone() for p in w.module.parameters()]
        super().load_model_state(w, kind, state)

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Use them once."""
        if not getattr(self, "before", None):
            return super().forward(w, batch, loss_fn)
        loaded = [p.detach().clone() for p in w.module.parameters()]
        _set(w, self.before)
        loss = super().forward(w, batch, loss_fn)
        _set(w, loaded)
        self.before = []
        return loss


def _set(w: Wrapped, values: list[Tensor]) -> None:
    """Other storages for the parameters, behind autograd's back."""
    for parameter, value in zip(w.module.parameters(), values, strict=True):
        parameter.data = value


@mutant(check="resume.model", cause=Cause.NOT_LOADED, case=FULL, world=1)
class MasterWeightsOverwriteLoad(Adapter):
    """Loading the optimizer's state puts its own copy of the weights into the model."""

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """The copy is older than the load."""
        self.master = [p.detach().clone() for p in w.module.parameters()]
        super().load_model_state(w, kind, state)

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Put it there."""
        super().load_optim_state(w, kind, state)
        _set(w, self.master)


@mutant(check="resume.model", cause=Cause.OTHER_RANK, case=BUFFERS)
class BuffersOfRankOneLoaded(Adapter):
    """A full state of rank 0 brings back rank 1's buffers."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Keep them."""
        self.kept = [b.detach().clone() for b in self.bare(w).buffers()]
        for buffer in self.kept:
            dist.broadcast(buffer, src=1)
        return super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Put them there."""
        super().load_model_state(w, kind, state)
        for buffer, value in zip(self.bare(w).buffers(), self.kept, strict=True):
            buffer.copy_(value)


@mutant(
    check="resume.options",
    cause=Cause.WRONG_HYPERPARAMETER,
    case=FULL,
    bugs=("pytorch/pytorch#140900",),
    world=1,
)
class UnknownOptionsDroppedByLoad(Adapter):
    """A load drops what the fresh optimizer's parameter groups do not have."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Drop it."""
        known = [set(group) for group in w.optimizer.param_groups]
        super().load_optim_state(w, kind, state)
        for group, keys in zip(w.optimizer.param_groups, known, strict=True):
            for key in set(group) - keys:
                del group[key]


@mutant(
    check="resume.optimizer",
    cause=Cause.UNEXPECTED_KEY,
    case="frozen/checkpoint/kind=full,options=default",
    world=1,
)
class FrozenGetStateOnLoad(Adapter):
    """A load gives a state of zeros to parameters that do not train."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Give it."""
        super().load_optim_state(w, kind, state)
        for parameter in w.module.parameters():
            if parameter not in w.optimizer.state:
                w.optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}


@mutant(
    check="resume.optimizer",
    cause=Cause.PERMUTED,
    case=SHARDED,
    base=FSDP2,
    bugs=("pytorch/pytorch#54736",),
    world=1,
)
class MomentsExchangedByLoad(Adapter):
    """Loading a sharded optimizer state puts each moment where the other belongs."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Exchange after the load."""
        super().load_optim_state(w, kind, state)
        for held in w.optimizer.state.values():
            held["exp_avg"], held["exp_avg_sq"] = held["exp_avg_sq"], held["exp_avg"]


@mutant(check="resume.model", cause=Cause.NOT_LOADED, case=SHARDED, base=FSDP2, world=1)
class ShardedLoadIntoACopy(Adapter):
    """A sharded state is loaded into tensors that the model does not hold."""

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load, then put the model's own values back."""
        own = [local(p.detach()).clone() for p in w.module.parameters()]
        super().load_model_state(w, kind, state)
        with torch.no_grad():
            for parameter, value in zip(w.module.parameters(), own, strict=True):
                local(parameter).copy_(value)


@mutant(
    check="resume.options",
    cause=Cause.WRONG_STEP_COUNT,
    case=LOCAL,
    base=FSDP1,
    bugs=("huggingface/accelerate#3971",),
)
class StepsResetByLocalLoad(Adapter):
    """Loading a local optimizer state starts the count of steps again."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Reset after the load."""
        super().load_optim_state(w, kind, state)
        for held in w.optimizer.state.values():
            held["step"] = torch.zeros_like(held["step"])


@mutant(
    check="resume.optimizer",
    cause=Cause.ZERO,
    case=LOCAL,
    base=FSDP1,
)
class LocalMomentsZeroAfterLoad(Adapter):
    """A local load brings the step count but not the moments."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Zero them after the load."""
        super().load_optim_state(w, kind, state)
        for _, value in states(w):
            value.zero_()


@mutant(check="resume.model", cause=Cause.ALIASED, case=DIRECTORY, base=FSDP2, world=1)
class DirectoryWrittenLate(Adapter):
    """A save in the background reads the tensors when training has gone on."""

    def save(self, w: Wrapped, directory: Path) -> None:
        """Note what is to be written."""
        self.waiting = w

    def load(self, w: Wrapped, directory: Path) -> None:
        """Now it is."""
        super().save(self.waiting, directory)
        super().load(w, directory)


@mutant(check="resume.optimizer", cause=Cause.NOT_LOADED, case=DIRECTORY, base=FSDP2, world=1)
class DirectoryWithoutOptimizer(Adapter):
    """A checkpoint directory brings back the model, and the optimizer's state is left fresh."""

    def load(self, w: Wrapped, directory: Path) -> None:
        """Load, then drop the state."""
        super().load(w, directory)
        w.optimizer.state.clear()


@mutant(
    check="resume.model",
    cause=Cause.OTHER_RANK,
    case=DIRECTORY,
    base=FSDP2,
    bugs=("NVIDIA/Megatron-LM#7452",),
)
class ShardsOfADirectoryExchanged(Adapter):
    """Each rank reads the file of the rank from the other end."""

    def load(self, w: Wrapped, directory: Path) -> None:
        """Exchange after the load."""
        super().load(w, directory)
        rank, world = dist.get_rank(), dist.get_world_size()
        own = [local(parameter.detach()) for parameter in w.module.parameters()]
        of_ranks: list[Any] = [None] * world
        dist.all_gather_object(of_ranks, [part.cpu() for part in own])
        for part, other in zip(own, of_ranks[world - 1 - rank], strict=True):
            if part.shape == other.shape:
                part.copy_(other)


@mutant(
    check="save.unchanged",
    cause=Cause.ZERO,
    case=DIRECTORY,
    base=FSDP2,
    world=1,
)
class SaveEmptiesMoments(Adapter):
    """Moments that are moved to the file are not moved back."""

    def save(self, w: Wrapped, directory: Path) -> None:
        """Save, then empty them."""
        super().save(w, directory)
        for _, value in states(w):
            value.zero_()

"""Defects that show when another job loads what one has saved.

In the job that saved, all is well: there they find in memory what they should have written, or the
number of ranks is still the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.adapter import Adapter, StateKind, Wrapped, local, whole
from conformance.causes import Cause
from conformance.mutants.optimizer import states
from conformance.mutants.registry import mutant
from conformance.mutants.states import FSDP2

GROWN = "mlp/resume/kind=save,ranks=double"
SHRUNK = "mlp/resume/kind=save,ranks=half"


class InAnotherJob(Adapter):
    """Base of the defects of a load from a directory in a job that has not saved."""

    saved = False

    def save(self, w: Wrapped, directory: Path) -> None:
        """Save, and know it."""
        super().save(w, directory)
        self.saved = True

    def load(self, w: Wrapped, directory: Path) -> None:
        """Load; in another job, with the defect."""
        groups = [dict(group) for group in w.optimizer.param_groups]
        super().load(w, directory)
        if not self.saved:
            self.spoil(w, groups)

    def spoil(self, w: Wrapped, groups: list[dict[str, Any]]) -> None:
        """The defect; `groups` are the optimizer's as they were before the load."""
        raise NotImplementedError


@mutant(
    check="resume.optimizer",
    cause=Cause.CUT_FOR_OTHER_RANKS,
    case=GROWN,
    base=FSDP2,
    bugs=("Lightning-AI/pytorch-lightning#16815",),
    world=1,
)
class CutWithOldShardLength(InAnotherJob):
    """Each rank looks for its part of the moments where that of half as many ranks would begin."""

    def spoil(self, w: Wrapped, groups: list[dict[str, Any]]) -> None:
        """Cut them there; past the end there is nothing."""
        rank, world = dist.get_rank(), dist.get_world_size()
        for _, value in states(w):
            rows, own = whole(value), local(value)
            own.zero_()
            found = rows[rank * -(-rows.shape[0] * 2 // world) :][: own.shape[0]]
            own[: found.shape[0]] = found


@mutant(
    check="resume.optimizer",
    cause=Cause.ZERO,
    case=GROWN,
    base=FSDP2,
    bugs=("databricks/flashoptim#3",),
)
class MomentsOfRankOneMissing(InAnotherJob):
    """After growing, rank 1 has the parameters right and the moments zero."""

    def spoil(self, w: Wrapped, groups: list[dict[str, Any]]) -> None:
        """Empty them."""
        if dist.get_rank() == 1:
            for _, value in states(w):
                local(value).zero_()


@mutant(
    check="resume.options",
    cause=Cause.WRONG_HYPERPARAMETER,
    case=SHRUNK,
    base=FSDP2,
    bugs=("pytorch/pytorch#140900",),
    world=1,
)
class OptionsKeptInMemory(InAnotherJob):
    """The options of parameter groups are not in the directory; only the saving job knows them."""

    def spoil(self, w: Wrapped, groups: list[dict[str, Any]]) -> None:
        """Those of before the load stay."""
        for group, before in zip(w.optimizer.param_groups, groups, strict=True):
            group.update({k: v for k, v in before.items() if k != "params"})


@mutant(
    check="resume.model",
    cause=Cause.NOT_LOADED,
    case="batchnorm/resume/kind=full,ranks=double",
    world=1,
)
class NewRanksKeepTheirBuffers(Adapter):
    """Ranks that the saving job did not have load parameters, and no buffers."""

    saved = False

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The right state; this rank was there."""
        self.saved = True
        return super().model_state(w, kind, cpu=cpu, rank0_only=rank0_only)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """On the second half of the ranks of another job, put the buffers back."""
        kept = [buffer.clone() for buffer in self.bare(w).buffers()]
        super().load_model_state(w, kind, state)
        if not self.saved and 2 * dist.get_rank() >= dist.get_world_size():
            for buffer, value in zip(self.bare(w).buffers(), kept, strict=True):
                buffer.copy_(value)


@mutant(
    check="gradients.value",
    cause=Cause.SCALED,
    case="mlp/resume/kind=full,ranks=double",
)
class DividedByRanksThatSaved(Adapter):
    """With the state comes the number by which gradients are divided: the ranks that saved."""

    divisor = 0

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Load it, too: half as many as there are."""
        super().load_model_state(w, kind, state)
        self.divisor = dist.get_world_size() // 2

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Divide by it and not by the number of ranks."""
        super().backward(w, loss)
        if self.divisor:
            with torch.no_grad():
                for p in w.module.parameters():
                    p.grad.mul_(dist.get_world_size() / self.divisor)  # type: ignore[union-attr]

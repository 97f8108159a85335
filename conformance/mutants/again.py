"""Defects that show the second time only: at another save, or at a load between two evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from conformance.adapter import Adapter, LossFn, Wrapped, local
from conformance.causes import Cause
from conformance.mutants.checkpoint import EXPLICIT
from conformance.mutants.registry import mutant
from conformance.mutants.saving import DIRECTORY
from conformance.mutants.states import FSDP2


@mutant(
    check="resume.model",
    cause=Cause.STALE,
    case=DIRECTORY,
    base=FSDP2,
    world=1,
)
class SecondSaveWritesTheFirst(Adapter):
    """Every save into a directory writes what the first one had staged."""

    staged: list[Tensor] | None = None

    def save(self, w: Wrapped, directory: Path) -> None:
        """Put the first values in, save, and take them out again."""
        live = [local(p.detach()) for p in w.module.parameters()]
        now = [t.clone() for t in live]
        self.staged = self.staged or now
        _fill(live, self.staged)
        super().save(w, directory)
        _fill(live, now)


@mutant(
    check="losses.value",
    cause=Cause.NOT_LOADED,
    case=EXPLICIT,
    bugs=("pytorch/pytorch#117421",),
    world=1,
)
class EvaluationKeepsItsWeightsAtALoad(Adapter):
    """Weights are merged once for evaluations; a step makes them anew, a load does not."""

    merged: list[Tensor] | None = None

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Evaluate with what is merged."""
        live = [p.detach() for p in w.module.parameters()]
        now = [t.clone() for t in live]
        self.merged = self.merged or now
        _fill(live, self.merged)
        loss = super().evaluate(w, batch, loss_fn)
        _fill(live, now)
        return loss

    def optimizer_step(self, w: Wrapped) -> None:
        """Step; what was merged is old."""
        super().optimizer_step(w)
        self.merged = None


def _fill(targets: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)

"""Several micro-batches per step: the sum of their gradients, and who divides it."""

from __future__ import annotations

from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, compare_trees, observed, place
from conformance.checks.gradients import (
    GRADIENTS,
    common_factor,
    gradient_suspects,
    several_micro_batches,
)
from conformance.checks.registry import check
from conformance.models import ModelCase


def one_batch_is_possible(case: Case, model: ModelCase) -> bool:
    """A step accumulates, and one batch of all its samples gives the same gradient."""
    return several_micro_batches(case, model) and model.concatenate


@check("conventions.kept", profile="core", needs=GRADIENTS, applies=several_micro_batches)
def conventions_kept(evidence: Evidence, ledger: Ledger) -> None:
    """Accumulated gradients have the declared scale, not that of another convention."""
    for rank, seen, got in observed(evidence, "gradients"):
        factor, error, bound = common_factor(evidence, rank, seen, got)
        if factor is None or error > bound:
            continue  # no factor separates them: not a matter of conventions
        instead = "" if abs(factor - 1.0) <= bound else other_convention(factor, evidence)
        if abs(factor - 1.0) > bound and not instead:
            continue  # a factor that no convention gives is judged by value
        ledger.hold(
            not instead,
            moment=seen.moment,
            cause=Cause.CONVENTION_BROKEN,
            sentence=f"gradients at {place(seen.where, rank)} are {factor:.6g} times what is"
            f" declared, as if {instead}: {MEANING[Cause.CONVENTION_BROKEN]}",
            rank=rank,
            factor=factor,
            **seen.where,
        )


def other_convention(factor: float, evidence: Evidence) -> str:
    """What the wrapper does instead of what is declared; empty if `factor` fits nothing known."""
    world, micro = float(evidence.world), float(evidence.case.accumulation)
    declared = evidence.conventions
    summed = (
        (world, "summed over ranks")
        if declared.gradients == "mean"
        else (
            1.0 / world,
            "averaged over ranks",
        )
    )
    divided = (
        (micro, "the wrapper left the loss undivided")
        if declared.loss_divided_by_accumulation
        else (1.0 / micro, "the wrapper divided the loss by the micro-batches as well")
    )
    both = (summed[0] * divided[0], f"{summed[1]}, and {divided[1]}")
    for value, words in (divided, summed, both):
        if abs(factor - value) < 1e-3 * value:
            return words
    return ""


@check("accumulation.big_batch", profile="core", needs=GRADIENTS, applies=one_batch_is_possible)
def accumulation_big_batch(evidence: Evidence, ledger: Ledger) -> None:
    """The gradient of accumulated micro-batches is that of one batch with all their samples."""
    compare_trees(
        evidence,
        ledger,
        "gradients_big_batch",
        got_as="gradients",
        noun="accumulated gradient of",
        suspects=gradient_suspects(evidence),
    )

"""Unusual but legal sequences: an evaluation between steps, two forwards before two backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, compare_trees, observed, place
from conformance.checks.gradients import GRADIENTS, gradient_suspects
from conformance.checks.registry import check
from conformance.history import Observation, as_tensor
from conformance.oracle_precision import cast, low


@check(
    "two_forwards.gradients",
    profile="robustness",
    scenarios=frozenset({"two_forwards"}),
    needs=GRADIENTS | {"two_forwards"},
)
def two_forwards_gradients(evidence: Evidence, ledger: Ledger) -> None:
    """After two forwards and two backwards the gradient is that of both."""
    compare_trees(
        evidence, ledger, "gradients", noun="gradient of", suspects=gradient_suspects(evidence)
    )


@check("eval.unchanged", profile="robustness", scenarios=frozenset({"train", "eval_first"}))
def eval_unchanged(evidence: Evidence, ledger: Ledger) -> None:
    """An evaluation leaves parameters and buffers as they were, bit for bit."""
    for what in ("parameters", "buffers"):
        for rank, seen, after in observed(evidence, f"{what}_after_eval"):
            # under this convention a forward may first take over rank 0's
            sources = {rank, 0} if _taken_over(evidence, what) else {rank}
            before = [_before(evidence, source, what, seen) for source in sorted(sources)]
            declared = low(evidence.conventions.buffers_as) if what == "buffers" else None
            if declared is not None:  # and then the first forward may cast them
                before += [{k: cast(v, declared) for k, v in tree.items()} for tree in before]
            for name, value in after.items():
                ledger.hold(
                    any(_unchanged(value, tree.get(name)) for tree in before),
                    moment=seen.moment,
                    cause=Cause.CHANGED_BY_EVAL,
                    sentence=f"{name} ({what}) at {place(seen.where, rank)}:"
                    f" {MEANING[Cause.CHANGED_BY_EVAL]}",
                    rank=rank,
                    fqn=name,
                    **seen.where,
                )


def _taken_over(evidence: Evidence, what: str) -> bool:
    return what == "buffers" and evidence.conventions.buffers == "rank0"


def _before(evidence: Evidence, rank: int, what: str, seen: Observation) -> Any:
    """The wrapper's own newest observation of `what` before the evaluation."""
    just = evidence.history.find(rank, f"{what}_before_eval", seen.where)
    if just is not None:
        return just.value
    earlier = [one for one in evidence.expected(what, rank) if one.moment < seen.moment]
    return evidence.history.get(rank, what, **earlier[-1].where)


def _unchanged(after: Any, before: Any) -> bool:
    if not (isinstance(after, Tensor) and isinstance(before, Tensor)):
        return after is before
    return after.dtype == before.dtype and torch.equal(after, before)


@check(
    "unfrozen.training",
    profile="robustness",
    scenarios=frozenset({"unfrozen"}),
    needs=GRADIENTS | {"unused_parameters.varying"},
)
def unfrozen_training(evidence: Evidence, ledger: Ledger) -> None:
    """Parameters have gradients, and move, in those steps in which they are not frozen."""
    compare_trees(
        evidence, ledger, "gradients", noun="gradient of", suspects=gradient_suspects(evidence)
    )
    compare_trees(evidence, ledger, "parameters", noun="parameter")


@check("repeated.bits", profile="robustness", scenarios=frozenset({"repeated"}))
def repeated_bits(evidence: Evidence, ledger: Ledger) -> None:
    """The same training twice in the same ranks gives the same bits: losses and parameters."""
    for what in ("repeated_loss", "repeated_parameters"):
        for rank, seen, got in observed(evidence, what):
            if not seen.where["life"]:
                continue
            before = evidence.history.get(rank, what, **{**seen.where, "life": 0})
            again, first = (v if isinstance(v, dict) else {"loss": v} for v in (got, before))
            for name, value in again.items():
                ledger.hold(
                    torch.equal(as_tensor(value), as_tensor(first[name])),
                    moment=seen.moment,
                    cause=Cause.NOT_REPEATED,
                    sentence=f"{name} at {place(seen.where, rank)} is"
                    f" {MEANING[Cause.NOT_REPEATED]}",
                    rank=rank,
                    fqn=name,
                    **seen.where,
                )

"""How many bytes a step moves, and when, against what the strategy needs: read from the record.

A record has what each rank issued, in order, with sizes. It does not have which stream waits for
which, nor when an asynchronous collective ends, nor that a parameter is read while it is sharded:
of these only the values tell.
"""

from __future__ import annotations

from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.communication import REDUCTIONS
from conformance.checks.evidence import Evidence, Ledger, Moment
from conformance.checks.registry import check
from conformance.checks.sent import (
    GATHERS,
    Need,
    Traffic,
    elements_sent,
    in_units,
    need,
    sent,
    shards_of,
    size_sent,
    traffic,
    travelling,
    with_gradients,
)
from conformance.models import ModelCase
from conformance.report.words import number

LAST = 10**9
"""Position of what can be judged only when its phase is over."""
PASSES = {"once": 1, "twice": 2}
"""How often a micro-batch gathers each parameter, by the convention's word for it."""


def called_once(case: Case, model: ModelCase) -> bool:
    """Every unit runs once in a forward, so what it moves is known."""
    return "reused" not in model.traits


@check(
    "collectives.bytes",
    profile="communication",
    needs=frozenset({"gradients"}),
    applies=called_once,
)
def collectives_bytes(evidence: Evidence, ledger: Ledger) -> None:
    """A step sends what its strategy needs: parameters as often as declared, gradients once."""
    shards = shards_of(evidence)
    if shards == 1:
        ledger.notes.append("no parameters are gathered")
    for of_step in traffic(evidence):
        if shards > 1:
            _hold_gathers(evidence, ledger, of_step, shards)
        _hold_reductions(evidence, ledger, of_step, shards)


def _hold_gathers(evidence: Evidence, ledger: Ledger, step: Traffic, shards: int) -> None:
    """No more parameters than the passes need, in no wider dtype."""
    declared = evidence.conventions
    model = anatomy(evidence.model)
    due = need(evidence, model.distinct, shards)
    times = PASSES[declared.gathers] * step.micro_batches
    size = size_sent(evidence, declared.gathered_as)
    share = (shards - 1) / shards
    told = sum(sent(row) for row in step.gathers)
    allowed = due.allowed(times, len(step.gathers)) * share * size
    allowed += model.buffer_bytes * sum(row["op"] == "broadcast" for row in step.gathers)
    wide = elements_sent(step.gathers) * size <= allowed
    cause = Cause.WRONG_DTYPE if wide else Cause.GATHERED_REPEATEDLY
    _hold(
        evidence,
        ledger,
        step,
        held=told <= allowed,
        cause=cause,
        got=told,
        expected=due.elements * times * share * size,
        noun="byte",
        what=f"of parameters sent in {number(len(step.gathers), 'collective')}, where each"
        f" micro-batch gathers {declared.gathers}",
    )


def _hold_reductions(evidence: Evidence, ledger: Ledger, step: Traffic, shards: int) -> None:
    """Every gradient is reduced once, and no more than that travels."""
    if evidence.world == 1 or not step.reductions:
        ledger.comparisons += 1  # by other means than reductions: whether they are, values tell
        return
    used = need(evidence, with_gradients(evidence, step.step), shards)
    most = need(evidence, travelling(evidence.model), shards)
    own = "no_sync" in evidence.capabilities and not step.at_once
    times = 1 if own else step.micro_batches
    size = size_sent(evidence, evidence.conventions.reduced_as)
    count = len(step.reductions)
    # who has a gradient at all may be said in numbers of the same dtype
    flags = times * len(anatomy(evidence.model).distinct)
    allowed = _reduced(evidence, most.allowed(times, count, flags=flags), shards) * size
    elements = elements_sent(step.reductions)
    told = sum(sent(row) for row in step.reductions)
    # who does not claim no_sync may wait for the last micro-batch all the same
    least = _reduced(evidence, used.elements, shards, least=True)
    expected = _reduced(evidence, times * used.elements, shards) * size
    # of a parameter that is cut each rank is due its part: this is seen whatever padding may be
    free = shards == 1 or evidence.conventions.reduces == "whole"
    scattered = free or step.whole(shards) <= times * most.uncut
    if elements < least:
        cause = Cause.NOT_REDUCED
    elif not scattered:
        cause = Cause.NOT_SCATTERED
    elif elements * size <= allowed:
        cause = Cause.WRONG_DTYPE
    else:
        cause = _why_more(evidence, step, most, times)
    _hold(
        evidence,
        ledger,
        step,
        held=least <= elements and told <= allowed and scattered,
        cause=cause,
        got=told,
        expected=expected,
        noun="byte",
        what=f"of gradients sent in {number(count, 'collective')}",
    )


def _why_more(evidence: Evidence, step: Traffic, most: Need, times: int) -> Cause:
    """Why more gradient elements have travelled than is allowed."""
    shards, count = most.shards, len(step.reductions)
    every = need(evidence, anatomy(evidence.model).distinct, shards).allowed(times, count)
    enough = elements_sent(step.reductions) <= _reduced(evidence, every, shards)
    return Cause.UNEXPECTED_GRADIENT if enough else Cause.REDUCED_REPEATEDLY


def _reduced(evidence: Evidence, elements: float, shards: int, *, least: bool = False) -> float:
    """Elements that one rank sends so that all gradients are reduced.

    To its part: a reduce-scatter, then an all-reduce of the shard among replicas. Else an
    all-reduce, of which at `least` half is due: the other half may be gathered parameters.
    """
    if shards == 1 or evidence.conventions.reduces == "whole":
        return (1 if least else 2) * elements * (evidence.world - 1) / evidence.world
    replicas = evidence.world // shards
    scattered = elements * (shards - 1) / shards
    return scattered + 2 * elements / shards * (replicas - 1) / replicas


def _end_of_step(evidence: Evidence, step: int) -> Moment:
    """After all that is observed of it: only then is known what a step has sent."""
    phases = evidence.oracle.reference.ranks[0].phases
    return next(phase.ordinal for phase in phases if phase.name == f"step {step}"), LAST


def _hold(  # noqa: PLR0913 - one comparison, all of it
    evidence: Evidence,
    ledger: Ledger,
    step: Traffic,
    *,
    held: bool,
    cause: Cause,
    got: float,
    expected: float,
    noun: str,
    what: str,
) -> None:
    ledger.hold(
        held,
        moment=_end_of_step(evidence, step.step),
        cause=cause,
        sentence=f"step {step.step}, rank {step.rank}: {number(round(got), noun)} {what}, expected"
        f" {expected:.0f} without padding: {MEANING[cause]}",
        rank=step.rank,
        step=step.step,
        got=round(got),
        expected=round(expected),
    )


def freed_before(case: Case, model: ModelCase) -> bool:
    """Every step begins after a backward or an evaluation: a forward alone frees nothing."""
    return called_once(case, model) and "m" not in case.option("acts")


@check(
    "collectives.regathered",
    profile="communication",
    needs=frozenset({"gradients", "shard.parameters", "memory.reshard"}),
    applies=freed_before,
)
def collectives_regathered(evidence: Evidence, ledger: Ledger) -> None:
    """Parameters that are freed after backward are gathered again for every micro-batch."""
    shards = shards_of(evidence)
    if shards == 1:
        ledger.comparisons += 1
        ledger.notes.append("every rank holds all parameters: nothing has to be gathered")
        return
    kept = in_units(evidence.model)
    for step in traffic(evidence):
        if step.at_once:
            continue  # who frees when is not said
        used = with_gradients(evidence, step.step, step.rank) & kept
        due = need(evidence, used, shards).elements * step.micro_batches
        got = sum(int(row["numel"]) for row in step.gathers if len(row["group_ranks"]) > 1)
        _hold(
            evidence,
            ledger,
            step,
            held=got >= due,
            cause=Cause.NOT_FREED,
            got=got,
            expected=due,
            noun="element",
            what="of parameters gathered",
        )


@check(
    "collectives.after_backward",
    profile="communication",
    needs=frozenset({"gradients"}),
    applies=called_once,
)
def collectives_after_backward(evidence: Evidence, ledger: Ledger) -> None:
    """Once gradients are final none is reduced again, and only stepped parameters are sent."""
    names = anatomy(evidence.model).distinct
    every = need(evidence, names, 1)
    # who cuts nothing but the optimizer's state sends what each rank has stepped
    alone = {"shard.optimizer"} & evidence.capabilities and shards_of(evidence) == 1
    for step in traffic(evidence):
        for kinds, times, cause in (
            (REDUCTIONS, 0, Cause.REDUCED_REPEATEDLY),
            (GATHERS, 1 if alone else 0, Cause.GATHERED_REPEATEDLY),
        ):
            # a single element may be a norm, also where the model is no larger than that
            rows = [r for r in step.later if r["op"] in kinds and r["numel"] > 1]
            rows = [row for row in rows if len(row["group_ranks"]) > 1]
            got = sum(int(row["numel"]) for row in rows)
            # norms and the like travel, too: one for each parameter, less than all their elements
            used = with_gradients(evidence, step.step)
            allowed = max(need(evidence, used, 1).elements - 1, len(used))
            allowed = every.allowed(times, len(rows)) if times else allowed
            _hold(
                evidence,
                ledger,
                step,
                held=got <= allowed or evidence.world == 1,
                cause=cause,
                got=got,
                expected=times * every.elements,
                noun="element",
                what=f"{'reduced' if kinds is REDUCTIONS else 'gathered'} after backward",
            )

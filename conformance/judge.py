"""From the evidence of one case to its findings. Pure: no processes, no files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.adapter import REFUSALS
from conformance.causes import DESCRIBES, MEANING, OF_FORM, Cause
from conformance.checks import CHECKS, Check, Evidence, Ledger
from conformance.checks.evidence import OF_GRADIENTS, Moment, blocked_by, raised
from conformance.checks.traffic import LAST
from conformance.frames import first_line, user_part
from conformance.history import NotObserved
from conformance.ranks import RankVerdict
from conformance.room import NO_ROOM
from conformance.verdicts import COMPLETED, REFUSED, UNCLAIMED, Verdict, told_first

OF_BYTES = frozenset({"sharding", "memory", "communication"})
"""Profiles of what is stored and sent; nothing that is computed later is wrong because of it."""

LOSS_MUST_MOVE = 1e-3
"""A loss that moves by less than this fraction over a scenario proves nothing."""

_RAN_BADLY: Mapping[RankVerdict, tuple[Verdict, Cause]] = {
    RankVerdict.HANG: (Verdict.HANG, Cause.HUNG),
    RankVerdict.DESYNC: (Verdict.DESYNC, Cause.DESYNCHRONISED),
    RankVerdict.CRASH: (Verdict.CRASH, Cause.CRASHED),
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How the ranks fared, whatever they recorded.

    Attributes:
        verdict: of the pool.
        sentence: who, what and where; empty if all went well.
        seconds: wall time.
        reported: whether every rank reported by itself.
    """

    verdict: RankVerdict
    sentence: str = ""
    seconds: float = 0.0
    reported: bool = True

    @property
    def no_room(self) -> bool:
        """Whether a rank had no room for a file, which is no fault of what it ran."""
        return any(os.strerror(number) in self.sentence for number in NO_ROOM)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A finding without its address."""

    check: str
    verdict: Verdict
    cause: Cause | None = None
    sentence: str = ""
    error: float | None = None
    bound: float | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    moment: tuple[int, int] | None = None


def judge(evidence: Evidence, ran: Ran, checks: Iterable[Check]) -> list[Judgement]:
    """Every given check's judgement, in the order in which things went wrong in time.

    That a rank died comes before all else. A finding says which one came first.
    """
    judged = [with_remarks(judge_completion(evidence, ran), evidence)]
    judged += [
        judge_check(check, evidence, ran)
        for check in checks
        if check.judge is not None and check.judges(evidence.case, evidence.model)
    ]
    order = {check: index for index, check in enumerate(CHECKS)}
    judged.sort(key=lambda j: (told_first(j.verdict, j.moment), order[j.check]))
    return in_view_of_the_first(named_first(judged))


def named_first(judged: Sequence[Judgement]) -> list[Judgement]:
    """`judged`, with a finding that names a defect before the number of its phase that does not.

    Of one phase, what is seen first is what comes out of it, such as a loss, and not what was done:
    a first wrong value that says only how it looks gives way to the next one that says more.
    """
    first = next((j for j in judged if _is_value(j)), None)
    if first is None or first.cause not in DESCRIBES or first.moment is None:
        return [*judged]
    place = judged.index(first)
    for one in judged[place + 1 :]:
        own = one.cause not in DESCRIBES | {None, Cause.EXCEPTION}
        if own and _is_value(one) and one.moment is not None and one.moment[0] == first.moment[0]:
            told = replace(one, moment=first.moment)
            return [*judged[:place], told, *(j for j in judged[place:] if j is not one)]
    return [*judged]


def in_view_of_the_first(judged: Sequence[Judgement]) -> list[Judgement]:
    """`judged`, in order of time; findings after the first wrong value name it.

    A wrong value spreads into all that is computed from it. What tells only how a later one looks
    is said to follow from it; a later one with a cause of its own keeps that.
    """
    first = next((j for j in judged if _is_value(j)), None)
    if first is None:
        return [*judged]
    upto = judged.index(first) + 1
    return [*judged[:upto], *(_after(first, one) for one in judged[upto:])]


def _is_value(one: Judgement) -> bool:
    """Whether it found a wrong value, or an exception where there should be one."""
    of_bytes = CHECKS[one.check].profile in OF_BYTES
    return one.verdict is Verdict.FAIL and not of_bytes and one.cause not in OF_FORM


def _after(first: Judgement, one: Judgement) -> Judgement:
    if one.verdict is not Verdict.FAIL or one.cause in (None, Cause.EXCEPTION):
        return one
    where = {**one.where, "first": first.check}
    if one.cause in DESCRIBES and CHECKS[one.check].profile not in OF_BYTES:
        told, _, note = one.sentence.partition(f": {MEANING[one.cause]}")
        sentence = f"{told}: follows from what {first.check} found{note}"
        return replace(one, cause=Cause.FOLLOWS, sentence=sentence, where=where)
    return replace(one, sentence=f"{one.sentence} (after {first.check})", where=where)


def with_remarks(completion: Judgement, evidence: Evidence) -> Judgement:
    """`completion` with what the adapter remarked about the models that it wrapped."""
    remarks = [r for seen in evidence.history.every("remarks") for r in seen.value]
    if not remarks:
        return completion
    unique = list(dict.fromkeys(remarks))
    return replace(completion, where={**completion.where, "remarks": unique})


def judge_completion(evidence: Evidence, ran: Ran) -> Judgement:
    """``run.completed``: every rank ran the scenario to its end and reported."""
    if ran.no_room:
        return Judgement(check=COMPLETED, verdict=Verdict.ERROR, sentence=ran.sentence)
    if ran.verdict in _RAN_BADLY:
        verdict, cause = _RAN_BADLY[ran.verdict]
        return Judgement(
            check=COMPLETED,
            verdict=verdict,
            cause=cause,
            sentence=_exited(evidence) + ran.sentence,
            moment=(broken_off(evidence), LAST if ran.verdict is RankVerdict.HANG else 0),
        )
    if ran.verdict is RankVerdict.OK:
        return Judgement(check=COMPLETED, verdict=Verdict.PASS)
    refused = refusal(evidence, ran)
    if refused is not None:
        return Judgement(check=COMPLETED, verdict=Verdict.UNSUPPORTED, sentence=refused)
    failed = evidence.history.failed_phase()
    if failed is None:
        return Judgement(check=COMPLETED, verdict=Verdict.ERROR, sentence=ran.sentence)
    rank, phase = failed
    return Judgement(
        check=COMPLETED,
        verdict=Verdict.FAIL,
        cause=Cause.EXCEPTION,
        sentence=raised(rank, phase),
        where={"rank": rank, "phase": phase.name, "traceback": user_part(phase.traceback)},
        moment=(phase.ordinal, 0),
    )


def refusal(evidence: Evidence, ran: Ran) -> str | None:
    """The sentence of a refusal by `Adapter.build` on all ranks; ``None`` if there was none.

    Building is the first phase of every job.
    """
    for first in evidence.history.jobs:
        errors = [
            next((phase.error for phase in history.phases if phase.ordinal == first), None)
            for history in evidence.history.ranks
        ]
        if all(error and error.split(":", 1)[0].rpartition(".")[2] in REFUSALS for error in errors):
            return f"{REFUSED}: {first_line(errors[0])}"
    return None


def all_unsupported(checks: Iterable[Check], reason: str) -> list[Judgement]:
    """What is said of a case that cannot be run here."""
    unsupported = Verdict.UNSUPPORTED
    ids = [COMPLETED, *(check.id for check in checks if check.judge is not None)]
    return [Judgement(check=id, verdict=unsupported, sentence=reason) for id in ids]


def judge_check(check: Check, evidence: Evidence, ran: Ran) -> Judgement:
    """One check's judgement."""
    unclaimed = sorted(check.needs - evidence.capabilities)
    if unclaimed:
        return Judgement(
            check=check.id,
            verdict=Verdict.UNSUPPORTED,
            sentence=f"{UNCLAIMED}: {', '.join(unclaimed)}",
        )
    if check.any_of and not check.any_of & evidence.capabilities:
        return Judgement(
            check=check.id,
            verdict=Verdict.UNSUPPORTED,
            sentence=f"none is claimed of {', '.join(sorted(check.any_of))}",
        )
    if refusal(evidence, ran) is not None:
        return Judgement(check=check.id, verdict=Verdict.UNSUPPORTED, sentence=REFUSED)
    assert check.judge is not None, f"{check.id} is not judged from a history"
    ledger = Ledger()
    missing: NotObserved | None = None
    try:
        check.judge(evidence, ledger)
    except NotObserved as gap:
        missing = gap
    first = ledger.first()
    if first is not None and _is_late(check, first.moment, evidence, ran):
        return _cut_off(check, evidence, ran)
    if first is not None:
        return Judgement(
            check=check.id,
            verdict=Verdict.FAIL,
            cause=first.cause,
            sentence=first.sentence,
            error=first.error,
            bound=first.bound,
            where=first.where,
            moment=first.moment,
        )
    if missing is not None:
        return _without_observation(check, evidence, ran, missing)
    if not ledger.comparisons and ran.verdict is not RankVerdict.OK:
        return _cut_off(check, evidence, ran)
    if not ledger.comparisons and ledger.powerless:
        return Judgement(check=check.id, verdict=Verdict.NO_POWER, sentence=ledger.powerless)
    if not ledger.comparisons:
        return Judgement(
            check=check.id, verdict=Verdict.VACUOUS, sentence="nothing was there to compare"
        )
    vacuous = below_the_floor(evidence)
    if vacuous and ran.verdict in _RAN_BADLY:
        return _cut_off(check, evidence, ran)  # a record may be lost with its rank
    return Judgement(
        check=check.id,
        verdict=Verdict.VACUOUS if vacuous else Verdict.PASS,
        sentence=vacuous or "; ".join(ledger.notes),
        error=ledger.error,
        bound=ledger.bound,
    )


def _without_observation(
    check: Check, evidence: Evidence, ran: Ran, missing: NotObserved
) -> Judgement:
    own, sentence = blocked_by(evidence, missing)
    if own and not ran.no_room and ran.verdict not in _RAN_BADLY:
        return Judgement(
            check=check.id,
            verdict=Verdict.FAIL,
            cause=Cause.EXCEPTION,
            sentence=sentence,
            where=missing.where,
            moment=(_last_phase(evidence), 1),
        )
    if ran.verdict is RankVerdict.OK:
        return Judgement(
            check=check.id,
            verdict=Verdict.FAIL,
            cause=Cause.MISSING_KEY,
            sentence=f"the wrapper's run lacks {missing.named}{_unwatched(missing.what)}",
            moment=(_last_phase(evidence), 1),
        )
    return _cut_off(check, evidence, ran)


def _unwatched(what: str) -> str:
    """What an adapter may have forgotten that makes steps of its own, as a question."""
    if what not in OF_GRADIENTS:
        return ""
    return f": does the adapter's own step() call w.observe({what!r})?"


def _is_late(check: Check, moment: Moment, evidence: Evidence, ran: Ran) -> bool:
    """Whether what was seen may be the doing of a rank that is gone or went elsewhere.

    Who waits has computed what it has; only what it sent is not all of it.
    """
    if ran.verdict not in _RAN_BADLY or moment[0] < broken_off(evidence):
        return False
    return ran.verdict is not RankVerdict.HANG or check.profile in OF_BYTES


def _cut_off(check: Check, evidence: Evidence, ran: Ran) -> Judgement:
    """What is said of a check that has seen nothing of a run that ended early."""
    failed = None if ran.verdict in _RAN_BADLY else evidence.history.failed_phase()
    reason = first_line(ran.sentence) if failed is None else raised(*failed)
    return Judgement(check=check.id, verdict=Verdict.BLOCKED, sentence=reason)


def below_the_floor(evidence: Evidence) -> str:
    """Why this run proves nothing; empty if it does prove something."""
    losses = [float(seen.value) for seen in evidence.expected("loss")]
    if len(losses) < 2:
        return "fewer than two losses"
    scale = max(abs(loss) for loss in losses)
    if max(losses) - min(losses) < LOSS_MUST_MOVE * scale:
        return f"the loss moved by less than {LOSS_MUST_MOVE:g} of itself"
    if evidence.world > 1:
        for history in evidence.history.ranks:
            if not any(record.get("judged", True) for record in history.collectives):
                return f"rank {history.rank} issued no collective"
    return ""


def broken_off(evidence: Evidence) -> int:
    """The phase in which the first rank did not go on, by death, by waiting or by an exception.

    The one after the last if ranks went on to the end: all that was seen until then counts.
    """
    ends = (
        next((p.ordinal for p in h.phases if not p.ended or p.error is not None), None)
        for h in evidence.history.ranks
    )
    return min((end for end in ends if end is not None), default=_last_phase(evidence) + 1)


def _exited(evidence: Evidence) -> str:
    """Who called ``sys.exit`` where, if that is how a rank died; empty otherwise."""
    failed = evidence.history.failed_phase()
    exited = failed is not None and (failed[1].error or "").startswith(SystemExit.__name__)
    return f"{raised(*failed)}; " if failed is not None and exited else ""


def _last_phase(evidence: Evidence) -> int:
    return max((p.ordinal for h in evidence.history.ranks for p in h.phases), default=0)

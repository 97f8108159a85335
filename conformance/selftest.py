"""The kill diagonal: every mutant on its own case, and its base without the defect on the same one.

A mutant is killed if its check is the first to fail, with the stated verdict and cause. Knows the
register of mutants and the session; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from conformance.case import Case
from conformance.checks import CHECKS
from conformance.errors import unknown
from conformance.globs import matches
from conformance.mutants import MUTANTS, Mutant
from conformance.session import Session, Setting
from conformance.stored import judge_stored
from conformance.subject import Subject
from conformance.verdicts import BAD, Finding, Verdict

JOBS = 2
ALARM = BAD | {Verdict.ERROR}


class Kill(StrEnum):
    """What became of one mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    WRONG_CAUSE = "wrong cause"
    NOT_FIRST = "not first"
    FALSE_ALARM = "false alarm"
    WORLD_TOO_SMALL = "world too small"
    OTHER_DEVICE = "other device"
    TOO_FEW_DEVICES = "too few devices"
    ERROR = "error"


LEFT_OUT = frozenset({Kill.WORLD_TOO_SMALL, Kill.OTHER_DEVICE, Kill.TOO_FEW_DEVICES})
"""Nothing was run, for a reason that lies in the setting or the machine."""

GOOD = frozenset({Kill.KILLED}) | LEFT_OUT


@dataclass(frozen=True, kw_only=True)
class Diagonal:
    """One mutant's result.

    Attributes:
        mutant: its name.
        check: the check that had to report it.
        cause: the cause that this check had to state.
        kill: what became of it.
        mutated: what every check said of the case with the defect, in order of time.
        base: the same without it.
        sentence: one line for the reader.
    """

    mutant: str
    check: str
    cause: str
    kill: Kill
    mutated: tuple[Finding, ...] = ()
    base: tuple[Finding, ...] = ()
    sentence: str = ""

    @property
    def failed(self) -> list[Finding]:
        """What failed with the defect, in order of time."""
        return failed(self.mutated)

    @property
    def first(self) -> Finding | None:
        """What failed first, ``None`` if nothing failed."""
        return next(iter(self.failed), None)


def failed(findings: Iterable[Finding]) -> list[Finding]:
    """Those that say that something is wrong."""
    return [finding for finding in findings if finding.verdict in ALARM]


def said_by(check: str, findings: Iterable[Finding]) -> Finding | None:
    """What `check` said among `findings`, ``None`` if it did not judge."""
    return next((finding for finding in findings if finding.check == check), None)


def select_mutants(patterns: Sequence[str] = ()) -> list[Mutant]:
    """The mutants whose name matches one of the patterns; all without patterns.

    Raises:
        UsageError: a pattern that matches no mutant.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in MUTANTS):
            raise unknown("mutant", pattern, MUTANTS, listed="mutants", patterns=True)
    return [
        mutant
        for name, mutant in MUTANTS.items()
        if not patterns or any(matches(name, pattern) for pattern in patterns)
    ]


def diagonal(
    setting: Setting,
    mutants: Iterable[Mutant] | None = None,
    *,
    jobs: int = JOBS,
    done: Callable[[Diagonal], None] = lambda result: None,
) -> list[Diagonal]:
    """Measure the kill diagonal.

    Args:
        setting: world, device, seed, timeout and the folder of the histories.
        mutants: which; all by default.
        jobs: cases that run at a time, each with ranks of its own.
        done: called with each result as it comes, by one thread at a time.

    Returns:
        The results in the order of `mutants`.
    """
    chosen = list(MUTANTS.values() if mutants is None else mutants)
    with Session(setting, jobs=jobs) as session, ThreadPoolExecutor(jobs) as threads:
        pending = [threads.submit(measure, session, mutant) for mutant in chosen]
        results = []
        for future in pending:
            results.append(future.result())
            done(results[-1])
        return results


def measure(session: Session, mutant: Mutant) -> Diagonal:
    """Run one mutant and its base, and say what became of it."""
    if session.setting.world < mutant.world:
        return _result(mutant, Kill.WORLD_TOO_SMALL, sentence=f"shows from {mutant.world} ranks on")
    if not mutant.shows_on(session.setting.device):
        return _result(mutant, Kill.OTHER_DEVICE, sentence="shows on an accelerator")
    try:
        beyond = session.beyond(Case.parse(mutant.case))
        if beyond:
            return _result(mutant, Kill.TOO_FEW_DEVICES, sentence=beyond)
        base = _findings(session, mutant, planted=False)
        mutated = _findings(session, mutant, planted=True)
    except Exception as error:  # one mutant's trouble must not hide the results of the others
        return _result(mutant, Kill.ERROR, sentence=f"{type(error).__name__}: {error}")
    return assess(mutant, mutated, base)


def _findings(session: Session, mutant: Mutant, *, planted: bool) -> list[Finding]:
    subject = Subject(
        adapter=mutant.base, variant=mutant.variant, mutant=mutant.name if planted else None
    )
    timeout = mutant.timeout if planted else None
    directory = session.run(subject, Case.parse(mutant.case), timeout=timeout)
    return judge_stored(directory, session.setting.directory, list(CHECKS.values()))


def assess(mutant: Mutant, mutated: Sequence[Finding], base: Sequence[Finding]) -> Diagonal:
    """What the findings on a mutant and on its base amount to; both in order of time."""
    first = next(iter(failed(mutated)), None)
    kill, sentence = _became(mutant, first, said_by(mutant.check, mutated), failed(base))
    return _result(mutant, kill, mutated=tuple(mutated), base=tuple(base), sentence=sentence)


def _became(
    mutant: Mutant, first: Finding | None, own: Finding | None, alarms: Sequence[Finding]
) -> tuple[Kill, str]:
    if alarms:
        return Kill.FALSE_ALARM, f"without the defect: {alarms[0].id}: {alarms[0].sentence}"
    if own is None or own.verdict not in ALARM:
        said = "did not judge" if own is None else f"said {own.verdict}"
        return Kill.SURVIVED, f"{mutant.check} {said}" + _instead(first)
    if own is not first:
        return Kill.NOT_FIRST, f"{mutant.check} failed" + _instead(first)
    if own.cause is not mutant.cause or own.verdict is not mutant.verdict:
        wanted = f"expected {mutant.verdict} {mutant.cause}"
        return Kill.WRONG_CAUSE, f"{own.verdict} {own.cause}, {wanted}: {own.sentence}"
    return Kill.KILLED, own.sentence


def _instead(first: Finding | None) -> str:
    return "" if first is None else f"; first came {first.check}, {first.cause}: {first.sentence}"


def _result(
    mutant: Mutant,
    kill: Kill,
    *,
    mutated: tuple[Finding, ...] = (),
    base: tuple[Finding, ...] = (),
    sentence: str = "",
) -> Diagonal:
    return Diagonal(
        mutant=mutant.name,
        check=mutant.check,
        cause=mutant.cause,
        kill=kill,
        mutated=mutated,
        base=base,
        sentence=sentence,
    )

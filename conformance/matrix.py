"""The loop of a run: adapters × variants × cases, each judged once, in several threads.

Knows the order of work and what turns a raw finding into a reported one: the control, checks
without power, probes, expectations. Histories come from a function, so a stored run is judged again
by the same loop. Must not know files of a report, nor how anything is printed.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from conformance.checks import Check
from conformance.control import weigh
from conformance.expectations import Expectations
from conformance.item import Item
from conformance.power import without_power
from conformance.probes import claim_finding
from conformance.report.lines import Reported, Role
from conformance.room import NO_ROOM, told
from conformance.session import OracleFailed
from conformance.stored import judge_stored
from conformance.verdicts import COMPLETED, Finding, Verdict


class NotStored(LookupError):
    """A stored run lacks the history of a case."""


Histories = Callable[[Item], Path]
"""Runs the item, or finds its stored history; its folder."""


@dataclass(kw_only=True)
class _Queue:
    """Hands out items in their order, each thread's models before those of others.

    A thread has ranks of its own, and what a wrapper has once worked out for the shapes of a model,
    as DTensor does for every operator, these need not work out again.

    Attributes:
        items: those that are left.
    """

    items: list[Item]
    _owners: dict[str, int] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take(self) -> Item:
        """The next item of this thread: of a model of its own or nobody's, else somebody's last."""
        own = threading.get_ident()
        with self._lock:
            for index, item in enumerate(self.items):
                if self._owners.setdefault(item.planned.case.model, own) == own:
                    return self.items.pop(index)
            return self.items.pop()


@dataclass(kw_only=True)
class Matrix:
    """Judges items.

    Attributes:
        histories: where the folder of an item's history comes from.
        root: folder in which the oracle's histories lie.
        world: ranks.
        seed: of the run.
        expectations: applied to what is judged.
        with_control: whether the baseline wrapper is asked about every wrong number.
    """

    histories: Histories
    root: Path
    world: int
    seed: int
    expectations: Expectations = field(default_factory=Expectations)
    with_control: bool = True

    def run(self, items: Sequence[Item], *, jobs: int) -> Iterator[tuple[Item, list[Reported]]]:
        """Judge all items, `jobs` at a time; yields each as soon as it is judged."""
        executor = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="case")
        queue = _Queue(items=list(items))
        try:
            for done in as_completed([executor.submit(self._next, queue) for _ in items]):
                yield done.result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def _next(self, queue: _Queue) -> tuple[Item, list[Reported]]:
        item = queue.take()
        return item, self.report(item)

    def report(self, item: Item) -> list[Reported]:
        """What the log says about one item."""
        findings = self.judge(item)
        if item.role is Role.PROBE:
            return [Reported(finding=claim_finding(item.planned, findings), role=Role.PROBE)]
        if item.role is Role.CONTROL:
            return [Reported(finding=finding, role=Role.CONTROL) for finding in findings]
        if self.with_control:
            findings = weigh(item, findings, self._judge_baseline)
        reported = []
        for finding in findings:
            powered = without_power(finding, self.world)
            expected, reason = self.expectations.apply(powered)
            reported.append(Reported(finding=expected, reason=reason))
        return reported

    def judge(self, item: Item) -> list[Finding]:
        """Raw findings of one item; a fault of ours becomes a finding, never an exception."""
        try:
            directory = self.histories(item)
        except NotStored:
            raise
        except OracleFailed as error:
            return [self._fault(item, str(error))]
        except Exception as error:
            return [self._fault(item, _said_by(error), traceback.format_exc())]
        checks = item.planned.checks
        try:
            return judge_stored(directory, self.root, checks)
        except Exception:
            return self._one_by_one(item, directory, checks)

    def _judge_baseline(self, item: Item) -> list[Finding]:
        try:
            return self.judge(item)
        except NotStored:
            return []

    def _one_by_one(self, item: Item, directory: Path, checks: Sequence[Check]) -> list[Finding]:
        """After a check raised: every check by itself, so that the others still judge."""
        findings: list[Finding] = []
        for check in (None, *checks):
            chosen = () if check is None else (check,)
            try:
                judged = judge_stored(directory, self.root, chosen)
            except Exception as error:
                id = COMPLETED if check is None else check.id
                text = f"the check itself raised {type(error).__name__}: {error}"
                findings.append(self._fault(item, text, traceback.format_exc(), check=id))
            else:
                findings += [f for f in judged if (f.check == COMPLETED) == (check is None)]
        return findings

    def _fault(
        self, item: Item, sentence: str, trace: str = "", *, check: str = COMPLETED
    ) -> Finding:
        first, _, rest = sentence.partition("\n")
        detail = "\n".join(part for part in (rest, trace) if part)
        return Finding(
            check=check,
            adapter=item.subject.adapter,
            variant=item.subject.variant,
            case=str(item.planned.case),
            seed=self.seed,
            verdict=Verdict.ERROR,
            sentence=first,
            where={"traceback": detail} if detail else {},
        )


def _said_by(error: Exception) -> str:
    """One line; that the system had no room for a file stands with the remedy."""
    if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename:
        return told(error, "the case was not run to its end")
    return f"{type(error).__name__}: {error}"

"""Wait for the ranks of one job, within bounds, and gather what they leave behind.

Decides when to stop waiting, never what it means: that is `diagnose`. Knows handles and files.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.ranks.diagnose import (
    RankTrace,
    diagnose,
    find_desync,
    find_missing,
    streams_agree,
)
from conformance.ranks.evidence import OutputFile, innermost_frame, is_whole, tail_of
from conformance.ranks.outcome import Outcome, RankReport, RankStatus
from conformance.ranks.process import ForkServer, RankProcess
from conformance.ranks.records import read_ring, ring_counts
from conformance.ranks.setup import STACK_SIGNAL
from conformance.ranks.wire import WireError

__all__ = ["Supervisor"]

GRACE = 3.0
"""Seconds that the other ranks get once one has failed."""
STILL = 3.0
"""Seconds without any movement after which records are asked whether to wait on is pointless."""
LINGER = 0.3
"""Seconds before a failed rank is ended, so that an exception on all ranks is told by all."""
_TICK = 0.1
_EXIT_WAIT = 15.0
_STACK_WAIT = 5.0
_STACK_BYTES = 200_000


@dataclass(kw_only=True)
class _Watched:
    """One rank during one job."""

    process: RankProcess
    output: OutputFile
    report: RankReport | None = None
    fault: str | None = None
    stack: str | None = None
    exit: str | None = None
    """How it died by itself; stays None if the controller ended it."""
    ended: bool = False
    """The controller has ended it after it failed."""

    @property
    def ring(self) -> Path:
        return Path(self.process.setup.ring)

    @property
    def waiting(self) -> bool:
        return self.report is None and self.fault is None and self.exit is None

    @property
    def failed(self) -> bool:
        if self.report is not None:
            return self.report.status is RankStatus.ERROR
        return not self.waiting

    def trace(self, *, last: int | None = None) -> RankTrace:
        """What is known of it; with `last`, only so many of its records."""
        return RankTrace(
            rank=self.process.setup.rank,
            records=read_ring(self.ring) if last is None else read_ring(self.ring, last=last),
            report=self.report,
            exit=self.exit,
            fault=self.fault,
            where=innermost_frame(self.stack or ""),
        )


@dataclass(kw_only=True)
class Supervisor:
    """Watches one job; made before the job is sent, since a rank may write and die at once.

    Attributes:
        server: where the ranks come from.
        ranks: the ranks, in rank order.
        timeout: bound on the whole job in seconds.
    """

    server: ForkServer
    ranks: Sequence[RankProcess]
    timeout: float
    _failed_at: float | None = None
    _moved_at: float = 0.0
    _counts: list[tuple[int, int]] = field(default_factory=list)
    _watched: list[_Watched] = field(init=False)

    def __post_init__(self) -> None:
        """Note where the output of earlier jobs ends."""
        self._watched = [
            _Watched(process=process, output=OutputFile(process.setup.output))
            for process in self.ranks
        ]

    def watch(self) -> Outcome:
        """Wait until every rank has reported or died, or the bound is reached.

        Never raises for what ranks do; *blocks* at most `timeout` plus a few seconds.
        """
        started = time.monotonic()
        self._moved_at = started
        watched = self._watched
        with selectors.DefaultSelector() as selector:
            selector.register(self.server.exits_fd, selectors.EVENT_READ)
            for item in watched:
                item.process.channel.setblocking(False)
                selector.register(item.process.channel, selectors.EVENT_READ, item)
            while any(item.waiting for item in watched):
                if self._must_stop(watched, started + self.timeout):
                    break
                self._wait(selector, watched)
        self._take_stacks([item for item in watched if item.waiting])
        return self._outcome(watched, started)

    def _wait(self, selector: selectors.BaseSelector, watched: Sequence[_Watched]) -> None:
        for key, _ in selector.select(_TICK):
            if key.data is not None and self._read(key.data):
                selector.unregister(key.fileobj)
        self.server.collect_exits(self.ranks)
        for item in watched:
            if item.waiting and item.process.exit is not None:
                self._read(item)  # a report that it sent before it died
                if item.waiting:
                    item.exit = item.process.exit
            item.output.cap()

    def _read(self, item: _Watched) -> bool:
        """Take what a rank says; True when it has nothing more to say in this job."""
        try:
            chunk = item.process.channel.recv(2**20)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk:
            if not self.server.wait_exits([item.process], _EXIT_WAIT):
                item.fault = "closed its channel without a report"
            return True
        try:
            messages = item.process.inbox.feed(chunk)
            if messages:
                item.report = _report(json.loads(messages[0]))
        except (WireError, ValueError, KeyError, TypeError, AttributeError) as error:
            item.fault = f"sent a report that cannot be read ({error})"
            return True
        return bool(messages)

    def _must_stop(self, watched: Sequence[_Watched], deadline: float) -> bool:
        now = time.monotonic()
        if now >= deadline:
            return True
        if any(item.failed for item in watched):
            if self._failed_at is None:
                self._failed_at = now
            if now - self._failed_at >= GRACE:
                return True
            if now - self._failed_at >= LINGER:
                self._end_failed(watched)
        counts = [ring_counts(item.ring) for item in watched]
        if counts != self._counts:
            self._counts, self._moved_at = counts, now
        return now - self._moved_at >= STILL and self._is_stuck(watched)

    def _is_stuck(self, watched: Sequence[_Watched]) -> bool:
        """Whether to wait on is pointless: ranks disagree, or one waits for another that ended."""
        self._moved_at = time.monotonic()  # look again after as long
        traces = [item.trace() for item in watched]
        if find_desync(traces) is not None:
            return True
        missing = find_missing(traces)
        return missing is not None and missing.present.waiting and not missing.absent.waiting

    def _end_failed(self, watched: Sequence[_Watched]) -> None:
        """End ranks that failed, so that those which wait for them fail too instead of waiting."""
        ending = [item for item in watched if item.failed and not item.ended]
        for item in ending:
            item.ended = True
        self._signal(ending, signal.SIGKILL, group=True)

    def _signal(self, items: Sequence[_Watched], number: int, *, group: bool) -> None:
        if items:
            with contextlib.suppress(RuntimeError):  # a dead forkserver took its ranks with it
                self.server.signal([item.process for item in items], number, group=group)

    def _take_stacks(self, waiting: Sequence[_Watched]) -> None:
        if not waiting:
            return
        paths = [item.process.setup.stacks for item in waiting]
        self._signal(waiting, STACK_SIGNAL, group=False)
        deadline = time.monotonic() + _STACK_WAIT
        texts = [""] * len(paths)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, texts = texts, [tail_of(path, 0, _STACK_BYTES) for path in paths]
            if texts == before and all(map(is_whole, texts)):
                break
        for item, text in zip(waiting, texts, strict=True):
            item.stack = text.strip() or "(no Python stack: the rank did not react to the signal)"

    def _outcome(self, watched: Sequence[_Watched], started: float) -> Outcome:
        now = time.monotonic()
        reports = tuple(item.report for item in watched)
        last = 1 if streams_agree(reports) else None
        traces = [item.trace(last=last) for item in watched]
        diagnosis = diagnose(traces, now=now, timeout=self.timeout)
        return Outcome(
            verdict=diagnosis.verdict,
            sentence=diagnosis.sentence,
            reports=reports,
            collectives=tuple(trace.last for trace in traces),
            stacks=tuple(item.stack for item in watched),
            exits=tuple(item.exit for item in watched),
            outputs=tuple(item.output.tail() for item in watched),
            seconds=now - started,
        )


def _report(data: dict[str, Any]) -> RankReport:
    streams = {
        name: (int(count), int(checksum), tuple(members))
        for name, (count, checksum, members) in data.pop("streams").items()
    }
    return RankReport(status=RankStatus(data.pop("status")), streams=streams, **data)

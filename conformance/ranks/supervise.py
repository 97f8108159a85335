"""Wait for the ranks of one job, within bounds, and gather what they leave behind.

Decides when to stop waiting, never what it means: that is `diagnose`. Knows handles and files.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.ranks.diagnose import RankTrace, diagnose, find_desync, find_missing
from conformance.ranks.forkserver import STACK_SIGNAL
from conformance.ranks.outcome import Outcome, RankReport, RankStatus
from conformance.ranks.process import ForkServer, RankProcess
from conformance.ranks.records import read_ring, ring_counts
from conformance.ranks.wire import WireError

__all__ = ["Supervisor"]

GRACE = 3.0
"""Seconds that the other ranks get once one has failed, or once none of them moves any more."""
LINGER = 0.3
"""Seconds before a failed rank is ended, so that an exception on all ranks is told by all."""
OUTPUT_CAP = 16 * 2**20
OUTPUT_TAIL = 8192
_TICK = 0.25
_STACK_WAIT = 1.0


@dataclass(kw_only=True)
class _Watched:
    """One rank during one job."""

    process: RankProcess
    ring: Path
    output_start: int
    report: RankReport | None = None
    fault: str | None = None
    stack: str | None = None
    bounded: bool = False
    own_exit: str | None = None

    @property
    def waiting(self) -> bool:
        return self.report is None and self.fault is None and self.own_exit is None


@dataclass(kw_only=True)
class Supervisor:
    """Watches one job from the moment it was sent.

    Attributes:
        server: where the ranks come from.
        ranks: the ranks, in rank order.
        directory: the job's directory, with the rings.
        timeout: bound on the whole job in seconds.
    """

    server: ForkServer
    ranks: Sequence[RankProcess]
    directory: Path
    timeout: float
    _failed_at: float | None = None
    _moved_at: float = 0.0
    _counts: list[tuple[int, int]] = field(default_factory=list)

    def watch(self) -> Outcome:
        """Wait until every rank has reported or died, or the bound is reached. Never raises for
        what ranks do; returns at most `timeout` plus a few seconds after the call.
        """
        started = time.monotonic()
        self._moved_at = started
        watched = [self._watched(process) for process in self.ranks]
        with selectors.DefaultSelector() as selector:
            selector.register(self.server.exits_fd, selectors.EVENT_READ)
            for item in watched:
                selector.register(item.process.channel, selectors.EVENT_READ, item)
            while any(item.waiting for item in watched):
                if self._must_stop(watched, started + self.timeout):
                    break
                self._wait(selector, watched)
        self._take_stacks([item for item in watched if item.waiting])
        return self._outcome(watched, started)

    def _watched(self, process: RankProcess) -> _Watched:
        return _Watched(
            process=process,
            ring=self.directory / f"rank{process.setup.rank}.ring",
            output_start=_size(process.setup.output),
        )

    def _wait(self, selector: selectors.BaseSelector, watched: Sequence[_Watched]) -> None:
        for key, _ in selector.select(_TICK):
            if key.data is not None and self._read(key.data):
                selector.unregister(key.fileobj)
        self.server.collect_exits(self.ranks)
        for item in watched:
            if item.waiting and item.process.exit is not None:
                self._read(item)  # a report that it sent before it died
                if item.waiting:
                    item.own_exit = item.process.exit
            _cap(item)

    def _read(self, item: _Watched) -> bool:
        """Take what a rank says; True when it has nothing more to say in this job."""
        try:
            chunk = item.process.channel.recv(2**20, socket.MSG_DONTWAIT)
            messages = item.process.inbox.feed(chunk)
            if messages:
                item.report = _report(json.loads(messages[0]))
        except BlockingIOError:
            return False
        except OSError:
            chunk, messages = b"", []
        except (WireError, ValueError, KeyError, TypeError) as error:
            item.fault = f"sent a report that cannot be read ({error})"
            return True
        if not chunk and not self.server.wait_exits([item.process], _STACK_WAIT):
            item.fault = "closed its channel without a report"
        return not chunk or bool(messages)

    def _must_stop(self, watched: Sequence[_Watched], deadline: float) -> bool:
        now = time.monotonic()
        if now >= deadline:
            return True
        if any(_failed(item) for item in watched):
            if self._failed_at is None:
                self._failed_at = now
            if now - self._failed_at >= GRACE:
                return True
            if now - self._failed_at >= LINGER:
                self._end_failed(watched)
        counts = [ring_counts(item.ring) for item in watched]
        if counts != self._counts:
            self._counts, self._moved_at = counts, now
        return now - self._moved_at >= GRACE and self._is_stuck(watched)

    def _is_stuck(self, watched: Sequence[_Watched]) -> bool:
        """Whether waiting on is pointless: the ranks disagree, or a rank that ended is waited for."""
        self._moved_at = time.monotonic()  # look again after another grace
        traces = [self._trace(item) for item in watched]
        if find_desync(traces) is not None:
            return True
        missing = find_missing(traces)
        return missing is not None and missing.present.waiting and not missing.absent.waiting

    def _end_failed(self, watched: Sequence[_Watched]) -> None:
        """End ranks that failed, so that those which wait for them fail too instead of waiting."""
        ranks = [i.process for i in watched if _failed(i) and not i.bounded]
        if ranks:
            self.server.signal(ranks, signal.SIGKILL, group=True)
        for item in watched:
            item.bounded = item.bounded or _failed(item)

    def _take_stacks(self, waiting: Sequence[_Watched]) -> None:
        if not waiting:
            return
        self.server.signal([item.process for item in waiting], STACK_SIGNAL, group=False)
        deadline = time.monotonic() + _STACK_WAIT
        while time.monotonic() < deadline:
            sizes = [_size(item.process.setup.stacks) for item in waiting]
            time.sleep(0.05)
            if all(sizes) and sizes == [_size(item.process.setup.stacks) for item in waiting]:
                break
        for item in waiting:
            text = _tail(item.process.setup.stacks, 0, 200_000).strip()
            item.stack = text or "(no Python stack: the rank did not react to the signal)"

    def _trace(self, item: _Watched) -> RankTrace:
        return RankTrace(
            rank=item.process.setup.rank,
            records=read_ring(item.ring),
            report=item.report,
            exit=item.own_exit,
            fault=item.fault,
            where=_innermost(item.stack),
        )

    def _outcome(self, watched: Sequence[_Watched], started: float) -> Outcome:
        now = time.monotonic()
        traces = [self._trace(item) for item in watched]
        diagnosis = diagnose(traces, now=now, timeout=self.timeout)
        return Outcome(
            verdict=diagnosis.verdict,
            sentence=diagnosis.sentence,
            reports=tuple(item.report for item in watched),
            collectives=tuple(trace.last for trace in traces),
            stacks=tuple(item.stack for item in watched),
            exits=tuple(item.own_exit for item in watched),
            outputs=tuple(
                _tail(item.process.setup.output, item.output_start, OUTPUT_TAIL) for item in watched
            ),
            seconds=now - started,
        )


def _failed(item: _Watched) -> bool:
    if item.report is not None:
        return item.report.status is RankStatus.ERROR
    return not item.waiting


def _report(data: dict[str, Any]) -> RankReport:
    streams = {name: (int(n), int(crc)) for name, (n, crc) in data.pop("streams").items()}
    return RankReport(status=RankStatus(data.pop("status")), streams=streams, **data)


def _innermost(stack: str | None) -> str:
    """The frame where the main thread stands, as `function (file:line)`."""
    lines = (stack or "").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), None)
    if start is None or start + 1 >= len(lines):
        return ""
    frame = lines[start + 1].strip()  # File "x.py", line 3 in function
    parts = frame.removeprefix("File ").rsplit(" in ", 1)
    if len(parts) != 2:
        return ""
    file, _, line = parts[0].partition(", line ")
    return f"{parts[1]} ({os.path.basename(file.strip(chr(34)))}:{line})"


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _cap(item: _Watched) -> None:
    path = item.process.setup.output
    if _size(path) > OUTPUT_CAP:
        os.truncate(path, 0)  # the rank appends, so it goes on at the new end
        item.output_start = 0


def _tail(path: str, start: int, limit: int) -> str:
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""

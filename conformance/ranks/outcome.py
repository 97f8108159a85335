"""What running a job on several ranks came to: the verdict, each rank's report, and its marks.

Knows plain data only. Must not know processes, sockets or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from conformance.ranks.records import CollectiveRecord

__all__ = ["Outcome", "RankReport", "RankStatus", "RankVerdict"]


class RankVerdict(StrEnum):
    """The verdict on one job, over all of its ranks."""

    OK = "OK"
    """Every rank returned a value, and all ranks issued the same collectives."""
    ERROR = "ERROR"
    """A Python exception on at least one rank, or a skip on some ranks only."""
    SKIP = "SKIP"
    """Every rank skipped."""
    HANG = "HANG"
    """A rank never came to a collective that the others wait in, or never ended."""
    DESYNC = "DESYNC"
    """The ranks issued different collectives, whatever the symptom was."""
    CRASH = "CRASH"
    """A rank died: a signal, an exit without a report, or a report that cannot be read."""


class RankStatus(StrEnum):
    """How the job function ended on one rank, in that rank's own words."""

    OK = "OK"
    ERROR = "ERROR"
    SKIP = "SKIP"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank said about its own run of the job.

    Attributes:
        status: how the job function ended.
        value: what it returned, after a round trip through JSON (tuples are lists, keys strings).
        error: type name of the exception or of the skip; empty if there was none.
        message: its text.
        traceback: its formatted traceback, the job's own frames first.
        seconds: how long the job function ran.
        ended: `time.monotonic()` at its end; comparable between the ranks of one host.
        streams: per stream of collectives, how many were entered, a checksum of what they were, and
            the member ranks.
    """

    status: RankStatus
    value: Any = None
    error: str = ""
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0
    ended: float = 0.0
    streams: Mapping[str, tuple[int, int, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of `RankPool.run`. Every tuple has one entry per rank, in rank order.

    Attributes:
        verdict: the verdict over all ranks.
        sentence: who, what and where, in one line; empty for OK.
        reports: each rank's report, None for a rank that gave none.
        collectives: the last collective that each rank entered, None if it entered none.
        stacks: Python stacks (all threads) of the ranks that were still alive when bounded.
        exits: "signal SIGKILL", "exit 3", ...; None for a rank that reported or was bounded.
        outputs: the end of what each rank wrote to stdout and stderr during the job.
        seconds: wall time of the whole job as the controller saw it.
    """

    verdict: RankVerdict
    sentence: str
    reports: tuple[RankReport | None, ...]
    collectives: tuple[CollectiveRecord | None, ...]
    stacks: tuple[str | None, ...]
    exits: tuple[str | None, ...]
    outputs: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def values(self) -> tuple[Any, ...]:
        """What each rank returned, in rank order; None for a rank without a value."""
        return tuple(report.value if report is not None else None for report in self.reports)

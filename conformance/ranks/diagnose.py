"""From what the ranks left behind to one verdict and one sentence.

A pure function of records, reports and exits. Must not know processes, files or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conformance.ranks import wording
from conformance.ranks.outcome import RankReport, RankStatus, RankVerdict
from conformance.ranks.records import CollectiveRecord
from conformance.ranks.signature import difference

__all__ = ["Diagnosis", "RankTrace", "diagnose", "find_desync", "find_missing", "streams_agree"]


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What is known of one rank when the job is over or was bounded.

    Attributes:
        rank: the rank.
        records: its last collectives, oldest first.
        report: what it said, None if nothing.
        exit: how it died, None if it lived or was ended by the controller.
        fault: why its report cannot be read, None if it can or there is none.
        where: innermost Python frame if it was alive when bounded, "" if unknown.
    """

    rank: int
    records: tuple[CollectiveRecord, ...] = ()
    report: RankReport | None = None
    exit: str | None = None
    fault: str | None = None
    where: str = ""

    @property
    def dead(self) -> bool:
        """Whether it crashed: it will never speak again, by its own doing."""
        return self.report is None and (self.exit is not None or self.fault is not None)

    @property
    def waiting(self) -> bool:
        """Whether it neither reported nor died."""
        return self.report is None and not self.dead

    @property
    def last(self) -> CollectiveRecord | None:
        """The last collective it entered."""
        return self.records[-1] if self.records else None

    def ended_with(self, status: RankStatus) -> bool:
        """Whether it reported this status."""
        return self.report is not None and self.report.status is status


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A verdict and why, in one line."""

    verdict: RankVerdict
    sentence: str = ""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A collective that `present` entered and `absent` did not."""

    record: CollectiveRecord
    present: RankTrace
    absent: RankTrace


def diagnose(traces: Sequence[RankTrace], *, now: float, timeout: float) -> Diagnosis:
    """Judge one job.

    Args:
        traces: one per rank, in rank order.
        now: `time.monotonic()` when the job ended or was bounded.
        timeout: the job's bound in seconds, for the sentence.
    """
    desync = find_desync(traces)
    if desync is not None:
        return Diagnosis(verdict=RankVerdict.DESYNC, sentence=desync)
    missing = find_missing(traces)
    dead = [trace for trace in traces if trace.dead]
    if dead:
        if missing is not None and _gave_up_waiting(dead, missing):
            return _hang(missing, traces, now)
        return Diagnosis(verdict=RankVerdict.CRASH, sentence=_crash(dead, traces, now))
    failed = [trace for trace in traces if trace.ended_with(RankStatus.ERROR)]
    if failed:
        return Diagnosis(verdict=RankVerdict.ERROR, sentence=_error(failed, traces, now))
    skipped = [trace for trace in traces if trace.ended_with(RankStatus.SKIP)]
    if skipped and len(skipped) < len(traces):
        sentence = _partial_skip(skipped, traces, now)
        return Diagnosis(verdict=RankVerdict.ERROR, sentence=sentence)
    if any(trace.waiting for trace in traces):
        return _hang(missing, traces, now) if missing else _endless(traces, timeout)
    if missing is not None:
        return Diagnosis(verdict=RankVerdict.DESYNC, sentence=_unfinished(missing))
    if skipped:
        reason = wording.first_line(skipped[0].report.message) if skipped[0].report else ""
        return Diagnosis(verdict=RankVerdict.SKIP, sentence=reason)
    return Diagnosis(verdict=RankVerdict.OK)


def find_desync(traces: Sequence[RankTrace]) -> str | None:
    """The earliest collective on which the members of its group disagree, as a sentence."""
    found: list[tuple[float, str]] = []
    table: dict[tuple[str, tuple[int, ...], int], tuple[int, CollectiveRecord]] = {}
    for trace in traces:
        for record in trace.records:
            key = (record.stream, record.group_ranks, record.nth)
            rank, first = table.setdefault(key, (trace.rank, record))
            what = difference(first, record)
            if what is not None:
                sentence = wording.desync((rank, first), (trace.rank, record), what)
                found.append((min(first.entered, record.entered), sentence))
    return min(found)[1] if found else _lost_desync(traces)


def find_missing(traces: Sequence[RankTrace]) -> Missing | None:
    """The earliest collective that one member has entered and another one has not."""
    found: list[tuple[float, Missing]] = []
    by_rank = {trace.rank: trace for trace in traces}
    reached = {trace.rank: _reached(trace) for trace in traces}
    for present in traces:
        for record in present.records:
            for rank in _partners(record):
                absent = by_rank.get(rank)
                if absent is None or absent is present:
                    continue
                position = _position(reached[rank], absent, record)
                if position is not None and position < record.nth:
                    missing = Missing(record=record, present=present, absent=absent)
                    found.append((record.entered, missing))
    return min(found, key=lambda item: item[0])[1] if found else None


def streams_agree(reports: Sequence[RankReport | None]) -> bool:
    """Whether all ranks reported, and each stream is the same on all of its members.

    A cheap answer for the ordinary case; False means no more than that the records must be looked
    at.
    """
    if any(report is None for report in reports):
        return False
    known = [report.streams for report in reports if report is not None]
    return all(
        all(known[member].get(name) == end for member in end[2] if member < len(known))
        for streams in known
        for name, end in streams.items()
    )


def _lost_desync(traces: Sequence[RankTrace]) -> str | None:
    """A disagreement that only the checksums show, because the records are overwritten."""
    ends = [
        (trace.rank, name, end)
        for trace in traces
        if trace.report is not None
        for name, end in trace.report.streams.items()
    ]
    first: dict[str, tuple[int, int, int]] = {}
    for rank, name, (count, checksum, _) in ends:
        other, its_count, its_checksum = first.setdefault(name, (rank, count, checksum))
        if its_count == count and its_checksum != checksum:
            return (
                f"ranks {other} and {rank} entered {count} collectives each in {name}, and not the "
                "same ones; the first difference is no longer on record"
            )
    return None


def _partners(record: CollectiveRecord) -> tuple[int, ...]:
    """Ranks that must enter the same collective."""
    if record.op in {"send", "recv"}:
        return () if record.root is None else (record.root,)
    return record.group_ranks


def _reached(trace: RankTrace) -> dict[str, int]:
    """How far a rank has come in each stream, as far as its report and its records tell."""
    reached: dict[str, int] = {}
    if trace.report is not None:
        reached = {name: end[0] for name, end in trace.report.streams.items()}
    for record in trace.records:
        reached[record.stream] = max(record.nth, reached.get(record.stream, 0))
    return reached


def _position(reached: dict[str, int], trace: RankTrace, record: CollectiveRecord) -> int | None:
    """How far `trace` has come in the stream of `record`; None if that cannot be told."""
    if record.stream in reached:
        return reached[record.stream]
    if record.op == "send" and any(":*>" in name for name in reached):
        return None  # it receives from any source, so its sender is not known
    overwritten = trace.report is None and bool(trace.records) and trace.records[0].index > 0
    return None if overwritten else 0


def _gave_up_waiting(dead: Sequence[RankTrace], missing: Missing) -> bool:
    """Whether a backend aborted because it waited in vain: then the hang is the cause."""
    aborted = all(trace.exit == "signal SIGABRT" for trace in dead)
    return aborted and missing.present.dead and not missing.absent.dead


def _hang(missing: Missing, traces: Sequence[RankTrace], now: float) -> Diagnosis:
    absent, record = missing.absent, missing.record
    parts = [_never(missing)]
    there = [trace for trace in traces if trace.waiting and trace is not absent]
    parts += [_waits(trace, now, known=record) for trace in there]
    if absent.waiting:
        parts.append(_waits(absent, now))
    parts += [f"rank {t.rank} gave up: {t.exit}" for t in traces if t.dead]
    return Diagnosis(verdict=RankVerdict.HANG, sentence="; ".join(parts))


def _endless(traces: Sequence[RankTrace], timeout: float) -> Diagnosis:
    parts = []
    for trace in traces:
        if trace.waiting:
            at = f", it is at {trace.where}" if trace.where else ""
            parts.append(f"rank {trace.rank} did not end within {timeout:g} s{at}{_last(trace)}")
    return Diagnosis(verdict=RankVerdict.HANG, sentence="; ".join(parts))


def _crash(dead: Sequence[RankTrace], traces: Sequence[RankTrace], now: float) -> str:
    parts = []
    for trace in dead:
        how = trace.fault or f"died without a report ({trace.exit})"
        parts.append(f"rank {trace.rank} {how}{_last(trace)}")
    parts += [_waits(trace, now) for trace in traces if trace.waiting]
    failed = [trace for trace in traces if trace.ended_with(RankStatus.ERROR)]
    parts += [f"rank {t.rank} failed with {t.report.error}" for t in failed if t.report is not None]
    return "; ".join(parts)


def _error(failed: Sequence[RankTrace], traces: Sequence[RankTrace], now: float) -> str:
    """Equal exceptions once, the first in time first."""
    reports = sorted(
        ((trace.report.ended, trace.rank, trace.report) for trace in failed if trace.report),
        key=lambda item: item[0],
    )
    texts: dict[str, list[int]] = {}
    for _, rank, report in reports:
        texts.setdefault(wording.exception(report), []).append(rank)
    parts = [f"{wording.ranks(who, len(traces))}: {text}" for text, who in texts.items()]
    parts += [_waits(trace, now) for trace in traces if trace.waiting]
    parts += [f"rank {t.rank} skipped" for t in traces if t.ended_with(RankStatus.SKIP)]
    return "; ".join(parts)


def _partial_skip(skipped: Sequence[RankTrace], traces: Sequence[RankTrace], now: float) -> str:
    others = [trace for trace in traces if trace not in skipped]
    report = skipped[0].report
    reason = wording.first_line(report.message) if report is not None else ""
    parts = [
        f"{wording.ranks([t.rank for t in skipped], len(traces))} skipped"
        + (f" ({reason})" if reason else "")
        + f", {wording.ranks([t.rank for t in others], len(traces))} did not"
    ]
    parts += [_waits(trace, now) for trace in others if trace.waiting]
    return "; ".join(parts)


def _never(missing: Missing) -> str:
    absent, record = missing.absent, missing.record
    how = "never" if absent.report is None else "ended and never"
    verb = {"send": "received", "recv": "sent what answers"}.get(record.op, "entered")
    by = f" of rank {missing.present.rank}" if verb != "entered" else ""
    return f"rank {absent.rank} {how} {verb} {wording.collective(record)}{by}"


def _unfinished(missing: Missing) -> str:
    return (
        f"rank {missing.present.rank} entered {wording.collective(missing.record)}, "
        f"rank {missing.absent.rank} ended without it"
    )


def _last(trace: RankTrace) -> str:
    return f", its last collective was {wording.collective(trace.last)}" if trace.last else ""


def _waits(trace: RankTrace, now: float, known: CollectiveRecord | None = None) -> str:
    """What a living rank does; "there" if it stands in the collective named before."""
    if trace.last is None:
        at = f" at {trace.where}" if trace.where else ", outside of every collective"
        return f"rank {trace.rank} is{at}"
    seconds = max(0.0, now - trace.last.entered)
    if known is not None and (known.stream, known.nth) == (trace.last.stream, trace.last.nth):
        return f"rank {trace.rank} waits there for {seconds:.1f} s"
    at = f" and is at {trace.where}" if trace.where else ""
    name = wording.collective(trace.last)
    return f"rank {trace.rank} entered {name} {seconds:.1f} s ago, its last{at}"

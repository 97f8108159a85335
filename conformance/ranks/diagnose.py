"""From what the ranks left behind to one verdict and one sentence.

A pure function of records, reports and exits. Must not know processes, files or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conformance.ranks.outcome import RankReport, RankStatus, RankVerdict
from conformance.ranks.records import CollectiveRecord
from conformance.ranks.signature import difference

__all__ = ["Diagnosis", "RankTrace", "diagnose", "find_desync", "find_missing"]


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
        traces: one per rank.
        now: `time.monotonic()` when the job ended or was bounded.
        timeout: the job's bound in seconds, for the sentence.
    """
    desync = find_desync(traces)
    if desync is not None:
        return Diagnosis(verdict=RankVerdict.DESYNC, sentence=desync)
    dead = [trace for trace in traces if trace.dead]
    failed = [t for t in traces if t.report is not None and t.report.status is RankStatus.ERROR]
    missing = find_missing(traces)
    if dead:
        hang = _aborted_by_a_hang(dead, missing)
        return _hang(hang, traces, now) if hang is not None else _crash(dead, traces, now)
    if failed:
        return _error(failed, traces, now)
    if any(trace.waiting for trace in traces):
        return _hang(missing, traces, now) if missing else _endless(traces, now, timeout)
    return _all_reported(traces, missing)


def find_desync(traces: Sequence[RankTrace]) -> str | None:
    """The first collective of a group on which its members disagree, as a sentence."""
    found: list[tuple[float, str]] = []
    for (stream, nth), entries in _by_position(traces).items():
        del stream
        (first_rank, first), *others = entries
        for rank, record in others:
            field = difference(first, record)
            if field is not None:
                sentence = (
                    f"rank {first_rank} entered {_name(first)} with {_payload(first)}, rank {rank} "
                    f"entered {_name(record)} with {_payload(record)} as collective {nth} of group "
                    f"{first.group}: they differ in {field}"
                )
                found.append((min(first.entered, record.entered), sentence))
    return min(found)[1] if found else None


def find_missing(traces: Sequence[RankTrace]) -> Missing | None:
    """The earliest collective that a member has entered and another member has not."""
    found: list[tuple[float, Missing]] = []
    by_rank = {trace.rank: trace for trace in traces}
    positions = {trace.rank: _positions(trace) for trace in traces}
    for present in traces:
        for record in present.records:
            for rank in _partners(record):
                absent = by_rank.get(rank)
                if absent is None or absent is present:
                    continue
                at = _position(positions[rank], absent, record.stream)
                if at is not None and at < record.nth:
                    missing = Missing(record=record, present=present, absent=absent)
                    found.append((record.entered, missing))
    return min(found, key=lambda item: item[0])[1] if found else None


def _by_position(
    traces: Sequence[RankTrace],
) -> dict[tuple[str, int], list[tuple[int, CollectiveRecord]]]:
    table: dict[tuple[str, int], list[tuple[int, CollectiveRecord]]] = {}
    for trace in traces:
        for record in trace.records:
            key = (f"{record.stream}|{record.group_ranks}", record.nth)
            table.setdefault(key, []).append((trace.rank, record))
    return table


def _partners(record: CollectiveRecord) -> tuple[int, ...]:
    """Ranks that must enter the same collective."""
    if record.op in {"send", "recv"}:
        return () if record.root is None else (record.root,)
    return record.group_ranks


def _positions(trace: RankTrace) -> dict[str, int]:
    positions: dict[str, int] = {}
    for record in trace.records:
        positions[record.stream] = max(record.nth, positions.get(record.stream, 0))
    return positions


def _position(positions: dict[str, int], trace: RankTrace, stream: str) -> int | None:
    """How far a rank is in a stream; None if its older records are lost and it cannot be told."""
    if stream in positions:
        return positions[stream]
    if trace.report is not None and stream in trace.report.streams:
        return trace.report.streams[stream][0]
    any_source = any(record.op == "recv" and record.root is None for record in trace.records)
    lost = bool(trace.records) and trace.records[0].index > 0 and trace.report is None
    return None if any_source or lost else 0


def _aborted_by_a_hang(dead: Sequence[RankTrace], missing: Missing | None) -> Missing | None:
    """A backend that gives up waiting aborts its process: the hang is the cause, not the abort."""
    if missing is None or missing.absent.dead:
        return None
    aborted = all(trace.exit == "signal SIGABRT" for trace in dead)
    return missing if aborted and missing.present.dead else None


def _hang(missing: Missing, traces: Sequence[RankTrace], now: float) -> Diagnosis:
    absent, record = missing.absent, missing.record
    did = f"rank {absent.rank} never entered {_name(record)}"
    if absent.report is not None:
        did = f"rank {absent.rank} ended without entering {_name(record)}"
    elif absent.last is not None:
        did += f" (its last was {_name(absent.last)})"
    sentences = [did]
    waiting = [t for t in traces if t.waiting and t is not absent]
    sentences += [_waits(trace, now) for trace in waiting]
    if absent.waiting and absent.where:
        sentences.append(f"rank {absent.rank} is at {absent.where}")
    return Diagnosis(verdict=RankVerdict.HANG, sentence="; ".join(sentences))


def _endless(traces: Sequence[RankTrace], now: float, timeout: float) -> Diagnosis:
    parts = []
    for trace in traces:
        if trace.waiting:
            where = f" at {trace.where}" if trace.where else ""
            last = f"; its last collective was {_name(trace.last)}" if trace.last else ""
            parts.append(f"rank {trace.rank} did not end within {timeout:g} s{where}{last}")
    del now
    return Diagnosis(verdict=RankVerdict.HANG, sentence="; ".join(parts))


def _crash(dead: Sequence[RankTrace], traces: Sequence[RankTrace], now: float) -> Diagnosis:
    parts = []
    for trace in dead:
        how = trace.fault or f"died without a report: {trace.exit}"
        place = f", {_place(trace.last)}" if trace.last is not None else ""
        parts.append(f"rank {trace.rank} {how}{place}")
    parts += [_waits(trace, now) for trace in traces if trace.waiting]
    parts += [
        f"rank {t.rank} then failed with {t.report.error}"
        for t in traces
        if t.report is not None and t.report.status is RankStatus.ERROR
    ]
    return Diagnosis(verdict=RankVerdict.CRASH, sentence="; ".join(parts))


def _error(failed: Sequence[RankTrace], traces: Sequence[RankTrace], now: float) -> Diagnosis:
    reports = [(t.rank, t.report) for t in failed if t.report is not None]
    reports.sort(key=lambda pair: pair[1].ended)
    texts: dict[str, list[int]] = {}
    for rank, report in reports:
        texts.setdefault(_exception(report), []).append(rank)
    parts = [f"{_ranks(ranks, len(traces))}: {text}" for text, ranks in texts.items()]
    parts += [_waits(trace, now) for trace in traces if trace.waiting]
    return Diagnosis(verdict=RankVerdict.ERROR, sentence="; ".join(parts))


def _all_reported(traces: Sequence[RankTrace], missing: Missing | None) -> Diagnosis:
    skipped = [t for t in traces if t.report is not None and t.report.status is RankStatus.SKIP]
    if skipped and len(skipped) < len(traces):
        others = [trace.rank for trace in traces if trace not in skipped]
        sentence = (
            f"{_ranks([t.rank for t in skipped], len(traces))} skipped, "
            f"{_ranks(others, len(traces))} did not: {_reason(skipped[0])}"
        )
        return Diagnosis(verdict=RankVerdict.ERROR, sentence=sentence)
    if missing is not None:
        sentence = (
            f"rank {missing.present.rank} entered {_name(missing.record)}, "
            f"rank {missing.absent.rank} ended without it"
        )
        return Diagnosis(verdict=RankVerdict.DESYNC, sentence=sentence)
    if skipped:
        return Diagnosis(verdict=RankVerdict.SKIP, sentence=_reason(skipped[0]))
    return Diagnosis(verdict=RankVerdict.OK)


def _waits(trace: RankTrace, now: float) -> str:
    last = trace.last
    if last is None:
        at = f" at {trace.where}" if trace.where else ""
        return f"rank {trace.rank} waits outside of every collective{at}"
    return f"rank {trace.rank} waits in {_name(last)} since {max(0.0, now - last.entered):.1f} s"


def _name(record: CollectiveRecord) -> str:
    parts = [f"{record.op} {record.nth} of group {record.group}"]
    if record.module is not None:
        parts.append(f"({record.module or 'root module'})")
    if record.phase:
        parts.append(f"in phase {record.phase}")
    return " ".join(parts)


def _place(record: CollectiveRecord) -> str:
    inside = "in" if record.left is None else "after"
    return f"{inside} {_name(record)}"


def _payload(record: CollectiveRecord) -> str:
    shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in record.shapes[:3])
    parts = [f"{record.numel} {record.dtype}" + (f" [{shapes}]" if shapes else "")]
    if record.reduce_op:
        parts.append(record.reduce_op)
    if record.root is not None:
        parts.append(f"root {record.root}")
    return ", ".join(parts)


def _exception(report: RankReport) -> str:
    first = next(_lines(report.message), "")
    return f"{report.error}: {first}" if first else report.error


def _reason(trace: RankTrace) -> str:
    return next(_lines(trace.report.message), "") if trace.report is not None else ""


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if line.strip())


def _ranks(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world and world > 1:
        return "all ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))

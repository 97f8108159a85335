"""Which collectives were issued, when, and by whom: read from the record, not from numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.causes import Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.evidence import Evidence, Ledger, Moment
from conformance.checks.gradients import several_micro_batches
from conformance.checks.moments import moment_of
from conformance.checks.registry import OBSERVED, check
from conformance.ranks import CollectiveRecord
from conformance.ranks.signature import difference
from conformance.report.words import number

REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})
ALIGNMENT = 4
"""Elements to which wrappers align a parameter, each rank's piece of it, and a rank's part of a
collective, in a buffer."""

Row = Mapping[str, Any]  # one recorded collective


def reduces_gradients(row: Row) -> bool:
    """A reduction of floating elements that no module's forward issued, and no side door."""
    return (
        bool(row["judged"])
        and row["op"] in REDUCTIONS
        and str(row["dtype"]).startswith(("float", "bfloat"))
        and (row["backward"] or row["module"] is None)
    )


@check(
    "no_sync.collectives",
    profile="communication",
    needs=frozenset({"no_sync"}),
    applies=several_micro_batches,
)
def no_sync_collectives(evidence: Evidence, ledger: Ledger) -> None:
    """Gradients are reduced at the last micro-batch of a step only, and there once per group."""
    last = evidence.case.accumulation - 1
    for rank in range(evidence.world):
        rows = [r for r in evidence.history.ranks[rank].collectives if reduces_gradients(r)]
        for seen in evidence.expected("loss", rank):
            evidence.history.get(rank, "loss", **seen.where)  # the step was really run
            step, micro = int(seen.where["step"]), int(seen.where["micro"])
            if micro < last:
                inside = [r for r in rows if r["phase"] == f"step {step}/micro {micro}"]
                _hold_silence(ledger, inside, rank, step, micro, seen.moment)
            else:
                syncing = {f"step {step}/micro {last}", f"step {step}/micro {last + 1}"}
                synced = [r for r in rows if r["phase"] in syncing]
                _hold_once(evidence, ledger, synced, rank, step, seen.moment)


def _hold_silence(
    ledger: Ledger, rows: list[Row], rank: int, step: int, micro: int, moment: Moment
) -> None:
    """No row reduces more than a scalar, which is bookkeeping."""
    loud = [row for row in rows if row["numel"] > 1]
    told = f"{loud[0]['op']} of {loud[0]['numel']} elements" if loud else ""
    ledger.hold(
        not loud,
        moment=moment,
        cause=Cause.REDUCED_IN_NO_SYNC,
        sentence=f"step {step}, micro {micro}, rank {rank}: {told} inside no_sync",
        rank=rank,
        step=step,
        micro=micro,
    )


def _hold_once(
    evidence: Evidence, ledger: Ledger, rows: list[Row], rank: int, step: int, moment: Moment
) -> None:
    """Per group of ranks, as many elements are reduced as there are, padding allowed."""
    needed, allowed = _elements(evidence, step, len(rows))
    scattering = [len(r["group_ranks"]) for r in rows if r["op"] == "reduce_scatter"]
    for ranks in sorted({tuple(row["group_ranks"]) for row in rows}):
        of_group = [row for row in rows if tuple(row["group_ranks"]) == ranks]
        # hybrid: what a shard group has scattered is a part of that size in the replicate group
        scatters = any(row["op"] == "reduce_scatter" for row in of_group)
        parts = 1 if scatters or not scattering else max(scattering)
        total = sum(int(row["numel"]) for row in of_group) * parts
        cause = Cause.NOT_REDUCED if total < needed else Cause.REDUCED_REPEATEDLY
        thawed = _frozen_with_gradient(evidence, rank, step) if total > allowed else ""
        cause = Cause.UNEXPECTED_GRADIENT if thawed else cause
        ledger.hold(
            needed <= total <= allowed,
            moment=moment,
            cause=cause,
            sentence=f"step {step}, rank {rank}: {total} gradient elements reduced over ranks"
            f" {list(ranks)} in {number(len(of_group), 'collective')}, expected {needed}"
            f" (at most {allowed} with padding){thawed}",
            rank=rank,
            step=step,
            got=total,
            expected=needed,
        )


def _frozen_with_gradient(evidence: Evidence, rank: int, step: int) -> str:
    """Why more is reduced than is due, if frozen parameters were seen to have gradients."""
    seen = evidence.history.find(rank, "gradients", {"step": step})
    held = {} if seen is None else seen.value
    names = [name for name in sorted(anatomy(evidence.model).frozen) if held.get(name) is not None]
    return f"; frozen {names[0]} has a gradient" if names else ""


def _elements(evidence: Evidence, step: int, collectives: int) -> tuple[int, int]:
    """(elements that have a gradient, most that may be reduced, padding included).

    Twice what is needed is never padding, unless the parameters are smaller than their padding, or
    units mix frozen parameters in: one flat gradient of a unit has room for these, too.
    """
    parts = anatomy(evidence.model)
    trainable = [name for name in parts.distinct if name not in parts.frozen]
    used = {
        name
        for rank in range(evidence.world)
        for name in evidence.oracle.reference.get(rank, "gradients_of_rank", step=step)
    }
    needed = sum(parts.numel(name) for name in trainable if name in used)
    world = evidence.world
    padded = sum(
        max(
            world * rounded_up(parts.padded(name, world) // world),
            rounded_up(parts.numel(name)),
        )
        for name in (parts.distinct if "mixed" in evidence.model.traits else trainable)
    )
    flags = len(trainable)  # who has a gradient at all may be said in the same buffer
    aligned = padded + flags + ALIGNMENT * world * collectives
    return needed, min(aligned, max(padded, 2 * needed - 1))


def rounded_up(elements: int) -> int:
    """`elements` with its alignment."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


@check(
    "collectives.order",
    profile="communication",
    scenarios=OBSERVED | {"two_forwards", "checkpoint"},
)
def collectives_order(evidence: Evidence, ledger: Ledger) -> None:
    """In every process group all ranks issue the same collectives in the same order."""
    streams = [_streams(history.collectives) for history in evidence.history.ranks]
    complete = all(
        phase.ended and phase.error is None
        for history in evidence.history.ranks
        for phase in history.phases
    )
    for name, first, rank in _pairs(streams):
        here, there = streams[first][name], streams[rank].get(name, [])
        for one, other in zip(here, there, strict=False):
            _hold_same(evidence, ledger, one, other, (first, rank))
        if complete and len(here) != len(there):
            longer, ahead = (here, first) if len(here) > len(there) else (there, rank)
            extra = longer[min(len(here), len(there))]
            ledger.hold(
                False,
                moment=moment_of(evidence.oracle.reference, extra.phase),
                cause=Cause.OTHER_COLLECTIVE,
                sentence=f"collective {extra.nth} of group {extra.group} in {extra.phase!r}"
                f" ({_told(extra)}) was issued by rank {ahead} only",
                rank=ahead,
            )


def _streams(rows: tuple[Row, ...]) -> dict[str, list[CollectiveRecord]]:
    found: dict[str, list[CollectiveRecord]] = {}
    for row in rows:
        if row["judged"]:
            found.setdefault(row["stream"], []).append(CollectiveRecord.from_json(dict(row)))
    return found


def _pairs(streams: list[dict[str, list[CollectiveRecord]]]) -> Iterator[tuple[str, int, int]]:
    """(stream, first rank that has it, another member of its group)."""
    for first, own in enumerate(streams):
        for name, records in own.items():
            if any(name in earlier for earlier in streams[:first]):
                continue
            one = records[0]
            members = {first, one.root} if one.op in ("send", "recv") else set(one.group_ranks)
            for rank in sorted(m for m in members if m is not None and m != first):
                yield name, first, rank


def _hold_same(
    evidence: Evidence,
    ledger: Ledger,
    one: CollectiveRecord,
    other: CollectiveRecord,
    ranks: tuple[int, int],
) -> None:
    ledger.hold(
        difference(one, other) is None,
        moment=moment_of(evidence.oracle.reference, one.phase),
        cause=Cause.OTHER_COLLECTIVE,
        sentence=f"collective {one.nth} of group {one.group} in {one.phase!r} is {_told(one)}"
        f" on rank {ranks[0]} and {_told(other)} on rank {ranks[1]}",
        rank=ranks[1],
        got=_told(other),
        expected=_told(one),
    )


def _told(record: CollectiveRecord) -> str:
    reduced = f" by {record.reduce_op}" if record.reduce_op else ""
    root = "" if record.root is None else f" with root {record.root}"
    return f"{record.op} of {record.numel} {record.dtype}{reduced}{root}"

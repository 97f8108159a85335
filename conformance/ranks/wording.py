"""Words for collectives, ranks and exceptions in a diagnosis. Knows records and reports only."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ranks.outcome import RankReport
from conformance.ranks.records import CollectiveRecord

__all__ = ["collective", "desync", "exception", "first_line", "payload", "ranks"]

_MAX_LINE = 300


def collective(record: CollectiveRecord) -> str:
    """For example `all_gather 7 of group dp (layers.3) in phase step 2`."""
    parts = [f"{record.op} {record.nth} of group {record.group}"]
    if record.op in {"send", "recv"} and record.root is not None:
        parts.append(f"{'to' if record.op == 'send' else 'from'} rank {record.root}")
    if record.module is not None:
        parts.append(f"({record.module or 'root module'})")
    if record.phase:
        parts.append(f"in phase {record.phase}")
    return " ".join(parts)


def payload(record: CollectiveRecord) -> str:
    """For example `6 float32 [2x3], sum`."""
    if record.op == "barrier":
        return "no payload"
    shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in record.shapes[:3])
    parts = [f"{record.numel} {record.dtype}" + (f" [{shapes}]" if shapes else "")]
    if record.reduce_op:
        parts.append(record.reduce_op)
    if record.root is not None:
        parts.append(f"root {record.root}")
    return ", ".join(parts)


def desync(
    first: tuple[int, CollectiveRecord], second: tuple[int, CollectiveRecord], what: str
) -> str:
    """Two ranks and what each of them entered."""
    (rank, record), (other, its) = first, second
    return (
        f"rank {rank} entered {collective(record)} with {payload(record)}; "
        f"there rank {other} entered {its.op} with {payload(its)}"
        f"{f' ({its.module})' if its.module and its.module != record.module else ''}: "
        f"different {what}"
    )


def exception(report: RankReport) -> str:
    """Type and first line of the message."""
    line = first_line(report.message)
    return f"{report.error}: {line}" if line else report.error


def first_line(text: str) -> str:
    """First line that is not blank, cut to a readable length."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 3] + "..."


def ranks(numbers: Sequence[int], world: int) -> str:
    """`rank 1`, `ranks 0, 2` or `all ranks`."""
    if len(numbers) == world and world > 1:
        return "all ranks"
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, sorted(numbers)))

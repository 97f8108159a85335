"""The matrix checks × adapters: the worst verdict of each pair, and how many findings have it."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.report.lines import Reported, Role
from conformance.verdicts import WORST_FIRST, Verdict, adapter_label

_CELL = 16  # "NO_POWER 12/108" and a space


def matrix_text(reported: Sequence[Reported], columns: Sequence[str], width: int) -> str:
    """The matrix, in blocks of as many columns as `width` holds; empty for a single adapter.

    Args:
        reported: all findings; those of the adapters that were asked for count.
        columns: adapters with their variants.
        width: columns of the terminal.
    """
    if len(columns) < 2:
        return ""
    cells: dict[str, dict[str, list[Verdict]]] = {}
    for item in reported:
        finding = item.finding
        if item.role is Role.JUDGED:
            label = adapter_label(finding.adapter, finding.variant)
            cells.setdefault(finding.check, {}).setdefault(label, []).append(finding.verdict)
    first = max((len(check) for check in cells), default=0) + 2
    room = max(1, (width - first) // _CELL)
    blocks = ["\n".join(f"{n:>3}  {label}" for n, label in enumerate(columns, start=1))]
    for start in range(0, len(columns), room):
        part = range(start, min(start + room, len(columns)))
        rows = [_row("", [str(index + 1) for index in part], first)]
        for check, row in cells.items():
            rows.append(_row(check, [_cell(row.get(columns[index], ())) for index in part], first))
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def _row(name: str, texts: Sequence[str], first: int) -> str:
    return f"{name:<{first}}{''.join(f'{text:<{_CELL}}' for text in texts)}".rstrip()


def _cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "-"
    worst = min(verdicts, key=WORST_FIRST.index)
    times, total = verdicts.count(worst), len(verdicts)
    return f"{worst} {times}" if times == total else f"{worst} {times}/{total}"

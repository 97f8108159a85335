"""The text of a failed test: the verdict, each traceback once, what the ranks left behind.

Knows outcomes. Must not know test classes or pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from conformance.ranks import Outcome, RankReport, RankStatus
from conformance.ranks.wording import ranks

__all__ = ["failure_text", "prefixed_output"]

_HERE = str(Path(__file__).parent)


def failure_text(outcome: Outcome) -> str:
    """The whole message of a test that did not pass.

    The first line is ``VERDICT: sentence``. Then come the tracebacks, equal ones once and the
    first in time first, the Python stacks of ranks that had to be ended, and the last output of
    ranks that gave no report.

    Args:
        outcome: of the job.
    """
    parts = [f"{outcome.verdict}: {outcome.sentence}"]
    parts += _tracebacks(outcome)
    for rank, stack in enumerate(outcome.stacks):
        if stack:
            parts.append(f"Python stacks of rank {rank} when it was ended:\n{stack.rstrip()}")
    for rank, (report, text) in enumerate(zip(outcome.reports, outcome.outputs, strict=True)):
        if report is None and text.strip():
            parts.append(f"last output of rank {rank}:\n{text.rstrip()}")
    return "\n\n".join(parts)


def prefixed_output(outcome: Outcome) -> str:
    """What the ranks wrote, every line under the name of its rank."""
    lines = [
        f"[rank {rank}] {line}\n"
        for rank, text in enumerate(outcome.outputs)
        for line in text.splitlines()
    ]
    return "".join(lines)


def _tracebacks(outcome: Outcome) -> Iterator[str]:
    failed = [
        (report.ended, rank, report)
        for rank, report in enumerate(outcome.reports)
        if report is not None and report.status is RankStatus.ERROR
    ]
    same: dict[tuple[str, str], list[int]] = {}
    texts: dict[tuple[str, str], RankReport] = {}
    for _, rank, report in sorted(failed, key=lambda item: item[0]):
        key = (report.error, report.traceback)
        same.setdefault(key, []).append(rank)
        texts.setdefault(key, report)
    for key, who in same.items():
        yield f"traceback of {ranks(who, len(outcome.reports))}:\n{_trimmed(texts[key].traceback)}"


def _trimmed(traceback: str) -> str:
    """The traceback without the leading frames of this package."""
    lines = traceback.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    for start, end in pairwise(starts):
        if _HERE not in lines[start]:
            break
        lines[start:end] = [""] * (end - start)
    return "\n".join(line for line in lines if line)

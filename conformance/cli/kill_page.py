"""The measured kill matrix: what every check said of every mutant and of its base.

Knows the diagonal's results as data. Must not know how they were come by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from conformance.report.words import number
from conformance.selftest import LEFT_OUT, Diagonal, Kill, said_by
from conformance.verdicts import Finding


def kills_page(results: Sequence[Diagonal], circumstances: str) -> str:
    """The matrix as a page.

    Args:
        results: one for each mutant.
        circumstances: when, where and with what they were measured, in a sentence.
    """
    return "\n".join(_page(results, circumstances)) + "\n"


def counted(results: Iterable[Diagonal]) -> str:
    """How many mutants became what."""
    counts = Counter(result.kill for result in results)
    return ", ".join(f"{counts[kill]} {kill}" for kill in Kill if counts[kill])


def _page(results: Sequence[Diagonal], circumstances: str) -> Iterator[str]:
    measured = [result for result in results if result.kill not in LEFT_OUT]
    yield "# The kill matrix, measured"
    yield from ("", "Written by `fsdp-conformance selftest --page FILE`.", "", circumstances, "")
    yield f"{number(len(results), 'mutant')}: {counted(results)}."
    yield from ("", "## Every mutant", "")
    yield "A row for each: what its check says, the error over the bound where that check first"
    yield "fails, the largest error over the bound that the same check sees on the same case"
    yield "without the defect, and which other checks fail as well. `-`: nothing with a bound was"
    yield "compared."
    yield ""
    yield "| mutant | outcome | check | cause | with the defect | without | also failing |"
    yield "|---|---|---|---|---:|---:|---|"
    for result in measured:
        yield _row(result)
    yield from ("", "## Every check", "")
    yield "How many mutants it reports first, and on how many cases of a mutant it fails at all."
    yield ""
    yield from ("| check | first | at all |", "|---|---:|---:|")
    first = Counter(result.first.check for result in measured if result.first is not None)
    failed = Counter(finding.check for result in measured for finding in result.failed)
    for check in sorted(failed):
        yield f"| `{check}` | {first[check]} | {failed[check]} |"
    left_out = [result for result in results if result.kill in LEFT_OUT]
    if left_out:
        yield from ("", "## Not measured", "", "| mutant | why |", "|---|---|")
        for result in left_out:
            yield f"| {result.mutant} | {result.kill}: {result.sentence} |"


def _row(result: Diagonal) -> str:
    own = said_by(result.check, result.mutated)
    others = ", ".join(f"`{f.check}`" for f in result.failed if f is not own) or "none"
    cells = (
        result.mutant,
        str(result.kill),
        f"`{result.check}`",
        str(own.cause if own is not None and own.cause is not None else "none"),
        _over_bound(own),
        _over_bound(said_by(result.check, result.base)),
        others,
    )
    return f"| {' | '.join(cells)} |"


def _over_bound(finding: Finding | None) -> str:
    """The largest error in units of its bound."""
    if finding is None or finding.error is None or finding.bound is None:
        return "-"
    if not finding.bound:
        return "0" if not finding.error else "inf"
    return f"{finding.error / finding.bound:.2g}"

"""What a run says of its mutant, and the table of all of them. Must not know processes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from crew import Answer
from witness import LOST

KILLED, SURVIVED = "killed", "survived"
UNIMPORTABLE, TIME_OUT, HARNESS = "unimportable", "time-out", "harness"
OUTCOMES = (KILLED, SURVIVED, TIME_OUT, HARNESS, UNIMPORTABLE)
_TESTS_FAILED = (1, 2)
_UNSTABLE = re.compile(r"DeadlineExceeded|FlakyFailure|hypothesis\.errors|MemoryError")
_TIMED_OUT = re.compile(r"^E\s+[\w.]*Time(outExpired|outError|dOut)\b", re.M)


def outcome(answer: Answer) -> tuple[str, str]:
    """Return how a run ended, and the test that told or what happened instead.

    Killed is only what an assertion or an exception of a test has told. Ranks that hang, die or
    lose each other are `time-out` and `harness`, as are a file of tests that cannot be imported and
    a run that ends in another way, unless a later test tells.
    """
    if not answer.imports:
        return UNIMPORTABLE, answer.order.module
    found = [_of_failure(failure, answer.exit) for failure in answer.failures]
    kill = next((each for each in found if each[0] == KILLED), None)
    if kill is not None:
        return kill
    if answer.exit is None:
        return TIME_OUT, "the run"
    if answer.exit == 0:
        return SURVIVED, ""
    return found[0] if found else (HARNESS, f"exit status {answer.exit}: {answer.output[-200:]}")


def _of_failure(failure: Mapping[str, str], status: int | None) -> tuple[str, str]:
    if status not in _TESTS_FAILED:
        return HARNESS, f"exit status {status}: {failure['text'][-200:]}"
    if failure["ranks"] in LOST:
        kind = TIME_OUT if failure["ranks"] == "HANG" else HARNESS
        return kind, f"{failure['ranks']} in {failure['test']}"
    if _TIMED_OUT.search(failure["text"]):
        return TIME_OUT, failure["test"]
    if failure["when"] == "collect" or _UNSTABLE.search(failure["text"]):
        return HARNESS, failure["test"]
    return KILLED, failure["test"]


def report(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the table by module and what was not killed, in Markdown."""
    records = sorted(records, key=lambda r: (not r["whole"], r["module"], r["line"], r["key"]))
    lines: list[str] = []
    for whole, title in ((True, "Every mutant"), (False, "A sample")):
        part = [record for record in records if record["whole"] is whole]
        if part:
            lines += [f"## {title}", "", *_table(part), ""]
    rest = [r for r in records if r["outcome"] in (SURVIVED, TIME_OUT, HARNESS)]
    lines += ["## Not killed", ""]
    for record in rest:
        where = f"`{record['module']}:{record['line']}`"
        told = f" ({record['told']})" if record["told"] else ""
        lines += [
            f"- {where} {record['operator']}: {record['outcome']}{told}",
            f"  - `{record['old']}`",
            f"  - `{record['new']}`",
        ]
    return lines


def _table(records: list[Mapping[str, Any]]) -> list[str]:
    modules = dict.fromkeys(record["module"] for record in records)
    rows = [(module, _count(r for r in records if r["module"] == module)) for module in modules]
    lines = [
        f"| module | mutants | {' | '.join(OUTCOMES)} | killed / imported |",
        f"|---|{'---:|' * (len(OUTCOMES) + 2)}",
    ]
    for name, counts in [*rows, ("**all**", _count(records))]:
        cells = (str(counts[each]) for each in OUTCOMES)
        share = f"{rate(counts):.1%}" if counts.total() > counts[UNIMPORTABLE] else "-"
        lines.append(f"| {name} | {counts.total()} | {' | '.join(cells)} | {share} |")
    return lines


def rate(counts: Counter[str]) -> float:
    """Return the killed among those that can be imported; time-outs and the like count against."""
    return counts[KILLED] / (counts.total() - counts[UNIMPORTABLE])


def _count(records: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(record["outcome"] for record in records)

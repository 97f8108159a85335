"""What ``repro`` tells: one finding with all that is known of it, then the others of its case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from conformance.causes import Cause
from conformance.report.lines import Reported
from conformance.report.plain import case_lines
from conformance.report.text import about_text
from conformance.report.words import WIDTH, indented
from conformance.verdicts import Verdict

SILENT = frozenset({Verdict.BLOCKED, Verdict.UNSUPPORTED})
"""Verdicts of other checks that are counted only: nothing was seen."""

TRACE = "traceback"
"""Where the finding of an exception holds the wrapper's part of its traceback."""


def repeated_text(reported: Sequence[Reported], wanted: str) -> str:
    """The finding of the check that was asked for, and below it what the others of its case say."""
    asked = [one for one in reported if one.finding.check == wanted]
    others = [one for one in reported if one.finding.check != wanted]
    lines = [line for one in asked for line in detail_lines(one)]
    if any(_by_exception(one) for one in asked):
        traces = (one.finding.where[TRACE] for one in others if TRACE in one.finding.where)
        lines += [line for trace in traces for line in _block(TRACE, trace)]
    heard = [one for one in others if one.finding.verdict not in SILENT]
    silent = Counter(one.finding.verdict for one in others if one.finding.verdict in SILENT)
    told = [_here(line, others[0]) for line in case_lines(heard)]
    if silent:
        told.append(", ".join(f"{times} {verdict}" for verdict, times in silent.items()))
    if told:
        lines += ["", "the other checks of this case, first divergence first:"]
        lines += [part for line in told for part in indented(line, 2, 14)]
    return "".join(f"{line}\n" for line in lines)


def detail_lines(reported: Reported) -> list[str]:
    """One finding with everything that is known about it."""
    finding = reported.finding
    lines = [f"{finding.verdict}  {finding.id}", *indented(finding.sentence, 6)]
    lines += about_text(finding)
    if finding.error is not None:
        lines.append(f"      error {finding.error:.3g}, bound {finding.bound:.3g}")
    for key, value in finding.where.items():
        text = str(value)
        if "\n" in text:
            lines += _block(key, text)
        elif len(text) < WIDTH:
            lines.append(f"      {key}: {text}")
    return lines


def _here(line: str, one: Reported) -> str:
    """A line about the case of `one` without its name."""
    place = one.finding.id.partition("@")[2]
    return line.replace(f"@{place}", "").replace(f"{place}  ", "")


def _by_exception(reported: Reported) -> bool:
    finding = reported.finding
    return finding.cause is Cause.EXCEPTION or finding.verdict is Verdict.BLOCKED


def _block(key: str, text: str) -> list[str]:
    """Text of several lines, below its name."""
    return [f"      {key}:", *(f"        {line}" for line in text.splitlines())]

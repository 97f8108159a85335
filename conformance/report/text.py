"""A log as text for people, at most 100 columns wide where ids allow it.

Everything is derived from the lines of the log. Pure: strings out, nothing printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from textwrap import wrap

from conformance.report.group import CaseFailure, Family, families
from conformance.report.lines import Log, Reported, Role
from conformance.report.log import counts
from conformance.verdicts import BAD, UNDECIDED, WORST_FIRST, Finding, Verdict, adapter_label

WIDTH = 100
_CELL = 16  # "NO_POWER 12/108" and a space


def finding_text(reported: Reported) -> str:
    """One plain line per finding, for a terminal that is none."""
    finding = reported.finding
    tail = finding.sentence or _margin(finding)
    role = "" if reported.role is Role.JUDGED else f" ({reported.role})"
    reason = f" (expected: {reported.reason})" if reported.reason else ""
    return f"{finding.verdict:<11} {finding.id}{role}{'  ' + tail if tail else ''}{reason}"


def report_text(log: Log) -> str:
    """The whole report: bad findings first, then what is undecided, then the summaries."""
    blocks = [
        *(family_text(family) for family in families(log.reported)),
        undecided_text(log.reported),
        control_text(log.reported),
        *(summary_text(log, label) for label in labels(log)),
        matrix_text(log),
        claims_text(log.reported),
        verdict_text(log),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def labels(log: Log) -> list[str]:
    """The judged adapters with their variants, in the order of the header."""
    return [adapter_label(a["name"], a["variant"]) for a in log.header["adapters"]]


def family_text(family: Family) -> str:
    """Failures that look alike: the first in full, the others by number."""
    first = family.failures[0]
    finding = first.finding
    lines = [f"{finding.verdict}  {finding.id}", *indented(finding.sentence, 6)]
    if finding.cause is not None:
        lines.append(f"      cause: {finding.cause}")
    if first.later:
        names = ", ".join(dict.fromkeys(first.later))
        lines += indented(f"and {_number(len(first.later), 'later check')}: {names}", 6)
    if len(family.failures) > 1:
        lines += indented(f"the same in {_others(family)}", 6)
    lines.append(f"      {finding.repro}")
    return "\n".join(lines)


def _others(family: Family) -> str:
    others = family.failures[1:]
    shown = [_short(failure) for failure in others[:3]]
    more = f", … ({len(others) - 3} more)" if len(others) > 3 else ""
    return f"{_number(len(others), 'more case')}: {', '.join(shown)}{more}"


def _short(failure: CaseFailure) -> str:
    finding = failure.finding
    return f"{adapter_label(finding.adapter, finding.variant)}/{finding.case}"


def undecided_text(reported: Sequence[Reported]) -> str:
    """What proves nothing, one line for each verdict, check and reason."""
    groups: dict[tuple[Verdict, str, str], list[Finding]] = {}
    for item in reported:
        finding = item.finding
        if item.role is Role.JUDGED and finding.verdict in UNDECIDED - {Verdict.BLOCKED}:
            groups.setdefault((finding.verdict, finding.check, finding.sentence), []).append(finding)
    lines: list[str] = []
    for (verdict, check, sentence), findings in groups.items():
        lines.append(f"{verdict}  {check}: {_number(len(findings), 'finding')}, such as {findings[0].id}")
        lines += indented(sentence, 6)
    return "\n".join(lines)


def control_text(reported: Sequence[Reported]) -> str:
    """Whether the baseline wrapper agrees with the oracle, in one line."""
    control = [item.finding for item in reported if item.role is Role.CONTROL]
    if not control:
        return ""
    bad = [f for f in control if f.verdict in BAD or f.verdict is Verdict.ERROR]
    cases = len({f.case for f in control})
    name = control[0].adapter
    if not bad:
        return f"control: {name} agrees with the oracle on {_number(cases, 'case')}{_worst(control)}"
    first = bad[0]
    lines = [
        f"ERROR  control: {name} itself fails {_number(len(bad), 'finding')} on"
        f" {_number(cases, 'case')}: the suite or the environment is at fault",
        *indented(f"{first.check}: {first.sentence}", 6),
        f"      {first.repro}",
    ]
    return "\n".join(line for line in lines if line.strip())


def summary_text(log: Log, label: str) -> str:
    """One adapter: how much was judged, how it went, and how close to the bounds."""
    own = [r for r in log.reported if r.role is Role.JUDGED and _label(r.finding) == label]
    if not own:
        return f"{label}: nothing judged"
    findings = [r.finding for r in own]
    cases = len({f.case for f in findings})
    checks = len({f.check for f in findings if f.verdict is not Verdict.UNSUPPORTED})
    head = f"{label}: {_number(cases, 'case')}, {_number(checks, 'check')}"
    per_verdict = ", ".join(f"{n} {v}" for v, n in counts(own).items())
    lines = [head, *indented(per_verdict + _worst(findings), 2)]
    unclaimed = Counter(
        f.sentence for f in findings if f.verdict is Verdict.UNSUPPORTED and f.check != "run.completed"
    )
    refused = [f for f in findings if f.verdict is Verdict.UNSUPPORTED and f.check == "run.completed"]
    if refused:
        lines += indented(f"{_number(len(refused), 'case')} {refused[0].sentence}", 2)
    for sentence, number in sorted(unclaimed.items()):
        if sentence.startswith("not claimed"):
            lines += indented(f"{sentence} ({_number(number, 'finding')})", 2)
    return "\n".join(lines)


def matrix_text(log: Log) -> str:
    """Checks × adapters: the worst verdict of each pair, and how many findings have it."""
    columns = labels(log)
    if len(columns) < 2:
        return ""
    cells: dict[str, dict[str, list[Verdict]]] = {}
    for item in log.reported:
        if item.role is Role.JUDGED:
            finding = item.finding
            row = cells.setdefault(finding.check, {})
            row.setdefault(_label(finding), []).append(finding.verdict)
    width = max(len(check) for check in cells) + 2
    room = max(1, (WIDTH - width) // _CELL)
    legend = [f"{index + 1:>3}  {label}" for index, label in enumerate(columns)]
    blocks = ["\n".join(legend)]
    for start in range(0, len(columns), room):
        part = columns[start : start + room]
        numbers = "".join(f"{index + 1:<{_CELL}}" for index in range(start, start + len(part)))
        rows = [" " * width + numbers.rstrip()]
        for check, row in cells.items():
            row_text = "".join(f"{_cell(row.get(label, [])):<{_CELL}}" for label in part)
            rows.append(f"{check:<{width}}{row_text}".rstrip())
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def _cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "-"
    worst = min(verdicts, key=WORST_FIRST.index)
    number, total = verdicts.count(worst), len(verdicts)
    return f"{worst} {number}" if number == total else f"{worst} {number}/{total}"


def claims_text(reported: Sequence[Reported]) -> str:
    """Capabilities that work although they are not claimed."""
    lines = [
        f"{_label(item.finding)}: {line}"
        for item in reported
        if item.role is Role.PROBE and item.finding.where.get("works")
        for line in [item.finding.sentence]
    ]
    return "\n".join(part for line in lines for part in indented(line, 0))


def verdict_text(log: Log) -> str:
    """The last line: counts, time and exit status; or that the log is partial."""
    total = counts(log.reported)
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in total.items()) or "nothing"
    setting = f"{_number(log.header['world'], 'rank')} on {log.header['device']}"
    if log.footer is None:
        return f"PARTIAL: the run did not come to its end; so far {verdicts} ({setting})"
    stale = log.footer["stale_expectations"]
    lines = [f"stale expectation, it matches no finding: {pattern}" for pattern in stale]
    lines.append(
        f"{verdicts} in {log.footer['seconds']:.1f} s ({setting}); exit status"
        f" {log.footer['exit_status']}"
    )
    return "\n".join(lines)


def _worst(findings: Iterable[Finding]) -> str:
    ratios = [(f.error / f.bound, f) for f in findings if f.error is not None and f.bound]
    if not ratios:
        return ""
    ratio, finding = max(ratios, key=lambda pair: pair[0])
    return f"; largest error / bound {ratio:.2g} ({finding.check}, {finding.case})"


def _margin(finding: Finding) -> str:
    if finding.error is None or finding.bound is None:
        return ""
    return f"error {finding.error:.2g}, bound {finding.bound:.2g}"


def _label(finding: Finding) -> str:
    return adapter_label(finding.adapter, finding.variant)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def indented(text: str, indent: int) -> list[str]:
    """`text` as lines of at most `WIDTH` columns, all indented."""
    pad = " " * indent
    return wrap(
        text,
        WIDTH,
        initial_indent=pad,
        subsequent_indent=pad,
        break_long_words=False,
        break_on_hyphens=False,
    )

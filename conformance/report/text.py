"""A log as text for people, at most 100 columns wide where ids allow it.

Everything is derived from the lines of the log. Pure: strings out, nothing printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from conformance.case import Case
from conformance.report.claims import claims_line, ledger
from conformance.report.group import CaseFailure, Family, families
from conformance.report.lines import Log, Reported, Role
from conformance.report.log import counts
from conformance.report.table import matrix_text
from conformance.report.words import WIDTH, indented, number, shortened
from conformance.scenarios import SCENARIOS
from conformance.verdicts import (
    BAD,
    COMPLETED,
    UNCLAIMED,
    UNDECIDED,
    Finding,
    Verdict,
    adapter_label,
)


def report_text(log: Log) -> str:
    """The whole report: bad findings first, then what is undecided, then the summaries."""
    shown = labels(log)
    blocks = [
        *(family_text(family) for family in families(log.reported)),
        undecided_text(log.reported),
        control_text(log.reported, log.header.get("baseline", "oracle")),
        *(summary_text(log, label) for label in shown),
        matrix_text(log.reported, shown, WIDTH),
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
    lines = [f"{finding.verdict}  {finding.id}", *indented(shortened(finding.sentence), 6)]
    lines += about_text(finding)
    if first.later:
        names = ", ".join(dict.fromkeys(first.later))
        lines += indented(f"and {number(len(first.later), 'later check')}: {names}", 6)
    others = [_case(failure) for failure in family.failures[1:]]
    if others:
        more = f", and {len(others) - 3} more" if len(others) > 3 else ""
        shown = f"{', '.join(others[:3])}{more}"
        lines += indented(f"the same in {number(len(others), 'more case')}: {shown}", 6)
    lines.append(f"      {finding.repro}")
    return "\n".join(lines)


def about_text(finding: Finding) -> list[str]:
    """The cause, and what happens in the case: a sentence names a place in it."""
    lines = [] if finding.cause is None else [f"      cause: {finding.cause}"]
    scenario = SCENARIOS.get(Case.parse(finding.case).scenario)
    if scenario is not None:
        lines += indented(f"{scenario.name}: {scenario.why}", 6)
    return lines


def _case(failure: CaseFailure) -> str:
    finding = failure.finding
    return finding.case if finding.variant == "default" else f"[{finding.variant}]/{finding.case}"


def undecided_text(reported: Sequence[Reported]) -> str:
    """What proves nothing: one entry for each verdict, check and reason."""
    groups: dict[tuple[Verdict, str, str], list[Finding]] = {}
    for item in reported:
        finding = item.finding
        # what is blocked stands with the failure that blocks it
        if item.role is Role.JUDGED and finding.verdict in UNDECIDED - {Verdict.BLOCKED}:
            key = (finding.verdict, finding.check, finding.sentence)
            groups.setdefault(key, []).append(finding)
    lines: list[str] = []
    for (verdict, check, sentence), findings in groups.items():
        lines.append(f"{verdict}  {check} in {number(len(findings), 'case')}")
        lines += indented(shortened(sentence), 6)
        lines.append(f"      {findings[0].id}")
    return "\n".join(lines)


def control_text(reported: Sequence[Reported], truth: str = "oracle") -> str:
    """Whether the baseline wrapper agrees with what the run takes for right."""
    control = [item.finding for item in reported if item.role is Role.CONTROL]
    if not control:
        return ""
    bad = [f for f in control if f.verdict in BAD or f.verdict is Verdict.ERROR]
    name = control[0].adapter
    cases = number(len({f.case for f in control}), "plain case")
    if not bad:
        words = "the oracle" if truth == "oracle" else f"the {truth} baseline"
        agrees = f"control: {name} agrees with {words} on {cases}{_worst(control)}"
        return "\n".join(indented(agrees, 0))
    first = bad[0]
    lines = indented(
        f"ERROR  control: {name} itself fails {number(len(bad), 'time')} on {cases}:"
        " the suite or the environment is at fault",
        0,
    )
    lines += indented(f"{first.check}: {first.sentence}", 6)
    return "\n".join([*lines, f"      {first.repro}"])


def summary_text(log: Log, label: str) -> str:
    """One adapter: how much was judged, how it went, how close it came, what of it is claimed."""
    own = [r for r in log.reported if r.role is Role.JUDGED and _label(r.finding) == label]
    findings = [r.finding for r in own]
    cases = number(len({f.case for f in findings}), "case")
    checks = number(len({f.check for f in findings}), "check")
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in counts(own).items())
    lines = [f"{label}: {cases}, {checks}", *indented(f"{verdicts}{_worst(findings)}", 2)]
    lines += indented(_claims(log, label, findings), 2)
    expected = Counter(r.reason for r in own if r.finding.verdict is Verdict.XFAIL)
    for reason, times in expected.items():
        lines += indented(f"as expected: {reason} ({number(times, 'finding')})", 2)
    unsupported = [f for f in findings if f.verdict is Verdict.UNSUPPORTED]
    refused = Counter(f.sentence for f in unsupported if f.check == COMPLETED)
    for sentence, times in refused.items():
        lines += indented(f"{number(times, 'case')} {shortened(sentence)}", 2)
    for remark, models in _remarks(findings).items():
        lines += indented(f"{', '.join(models)}: {remark}", 2)
    before = f"{UNCLAIMED}: "
    unclaimed = Counter(
        f.sentence.removeprefix(before) for f in unsupported if f.sentence.startswith(before)
    )
    told = (f"{names} ({number(times, 'finding')})" for names, times in sorted(unclaimed.items()))
    if unclaimed:
        lines += indented(f"not claimed, so not judged: {'; '.join(told)}", 2)
    return "\n".join(lines)


def _claims(log: Log, label: str, findings: Sequence[Finding]) -> str:
    adapters = log.header["adapters"]
    names = next(
        a["capabilities"] for a in adapters if adapter_label(a["name"], a["variant"]) == label
    )
    return claims_line(
        ledger(names, findings), whole=not log.partial and not log.header["narrowed"]
    )


def claims_text(reported: Sequence[Reported]) -> str:
    """Capabilities that work although they are not claimed, unless what is claimed does not."""
    failed = {
        _label(r.finding) for r in reported if r.role is Role.JUDGED and r.finding.verdict in BAD
    }
    tried: dict[str, dict[tuple[str, ...], bool]] = {}
    for finding in (r.finding for r in reported if r.role is Role.PROBE):
        names = tuple(finding.where.get("capabilities", ()))
        found = tried.setdefault(_label(finding), {})
        found[names] = found.get(names, True) and bool(finding.where.get("works"))
    lines: list[str] = []
    for label, found in tried.items():
        works = sorted({name for names, all_work in found.items() if all_work for name in names})
        if works and label not in failed:
            named = ", ".join(f'"{name}"' for name in works)
            lines.append(f"{label}: not claimed, but it works here; you may claim")
            lines.append(f"      frozenset({{{named}}})")
    return "\n".join(lines)


def verdict_text(log: Log) -> str:
    """The last line: counts, time and exit status; or that the log is partial."""
    total = counts(log.reported)
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in total.items()) or "nothing judged"
    setting = f"{number(log.header['world'], 'rank')} on {log.header['device']}"
    if log.header.get("baseline", "oracle") != "oracle":
        setting += f", baseline {log.header['baseline']}"
    if log.footer is None:
        judged = {
            (r.finding.adapter, r.finding.variant, r.finding.case)
            for r in log.reported
            if r.role is Role.JUDGED
        }
        far = f"{len(judged)} of {number(log.header['cases'], 'case')}"
        told = f"PARTIAL: the run did not come to its end; so far {far}: {verdicts} ({setting})"
        return "\n".join(indented(told, 0))
    stale = log.footer["stale_expectations"]
    seconds, status = log.footer["seconds"], log.footer["exit_status"]
    lines = [f"stale expectation, it matches no finding: {pattern}" for pattern in stale]
    lines += indented(f"{verdicts} in {seconds:.1f} s ({setting}); exit status {status}", 0)
    return "\n".join(lines)


def _remarks(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """What the adapter remarked about builds, with the models that it concerns."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        model = finding.case.partition("/")[0]
        for remark in finding.where.get("remarks", ()):
            models = found.setdefault(remark, [])
            if model not in models:
                models.append(model)
    return found


def _worst(findings: Iterable[Finding]) -> str:
    """How close what passes came to failing; what fails has a story of its own."""
    passed = [f for f in findings if f.verdict is Verdict.PASS]
    ratios = [(f.error / f.bound, f) for f in passed if f.error is not None and f.bound]
    if not ratios:
        return ""
    ratio, finding = max(ratios, key=lambda pair: pair[0])
    return f"; largest error / bound of a PASS {ratio:.2g} ({finding.check}, {finding.case})"


def _label(finding: Finding) -> str:
    return adapter_label(finding.adapter, finding.variant)

"""A log as JUnit XML, for CI systems that show test results."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from conformance.report.lines import Log, Reported, Role
from conformance.verdicts import BAD, UNDECIDED, Verdict, adapter_label


def write_junit(log: Log, path: Path) -> None:
    """Write the findings of `log`, one suite per adapter variant, one test case per finding."""
    root = ET.Element("testsuites", name="fsdp-conformance")
    suites: dict[str, list[Reported]] = {}
    for reported in log.reported:
        finding = reported.finding
        suites.setdefault(adapter_label(finding.adapter, finding.variant), []).append(reported)
    for label, members in suites.items():
        suite = ET.SubElement(root, "testsuite", name=label)
        for reported in members:
            _add(suite, reported)
        suite.set("tests", str(len(suite)))
        for kind in ("failure", "error", "skipped"):
            plural = {"failure": "failures", "error": "errors"}.get(kind, kind)
            suite.set(plural, str(len(suite.findall(f"testcase/{kind}"))))
    ET.indent(root)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _add(suite: ET.Element, reported: Reported) -> None:
    finding = reported.finding
    case = ET.SubElement(
        suite,
        "testcase",
        classname=finding.check,
        name=finding.id,
        time=f"{finding.seconds:.3f}",
    )
    kind = _kind(reported)
    if kind:
        sentence = " ".join(part for part in (finding.sentence, reported.reason) if part)
        message = f"{finding.verdict}: {sentence}"
        ET.SubElement(case, kind, message=_printable(message)).text = _printable(finding.repro)


def _kind(reported: Reported) -> str:
    """Element that states the outcome; empty for a pass."""
    verdict = reported.finding.verdict
    if verdict in BAD or verdict is Verdict.ERROR:
        return "error" if verdict is Verdict.ERROR or reported.role is Role.CONTROL else "failure"
    if verdict in UNDECIDED or verdict in (Verdict.UNSUPPORTED, Verdict.XFAIL):
        return "skipped"
    return ""


def _printable(text: str) -> str:
    """`text` without the control characters that XML cannot hold."""
    return "".join(c if c in "\t\n\r" or c >= " " else "\N{REPLACEMENT CHARACTER}" for c in text)

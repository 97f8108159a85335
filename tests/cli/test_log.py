"""The log of a run: every line fits its schema and survives reading; status follows from roles."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from conformance.causes import Cause
from conformance.report.lines import (
    LogError,
    Reported,
    Role,
    dumps,
    finding_line,
    read_log,
    reported_of,
    schema,
)
from conformance.report.log import RunLog, status_of
from conformance.verdicts import Finding, Verdict
from tests.cli.literal import control, finding, header, judged

VALIDATOR = jsonschema.Draft202012Validator(schema("run"))

FULL = Reported(
    finding=finding(
        "FAIL",
        "gradients.value",
        cause=Cause.NON_FINITE,
        sentence="gradient of a is nan",
        error=math.inf,
        bound=1e-7,
        where={"rank": 1, "step": 2, "fqn": "a", "index": [0, 1], "got": math.nan, "expected": 2.5},
        moment=(3, 7),
        seconds=1.25,
    ),
    reason="reported upstream",
)


def validate(line: str) -> None:
    VALIDATOR.validate(json.loads(line, parse_constant=pytest.fail))


@pytest.mark.parametrize("name", ["run", "history"])
def test_a_schema_is_a_valid_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))


@pytest.mark.parametrize("verdict", Verdict)
def test_a_finding_of_each_verdict_fits_the_schema(verdict: Verdict) -> None:
    validate(dumps(finding_line(judged(verdict))))


def test_a_line_without_a_field_does_not_fit_the_schema() -> None:
    line = json.loads(dumps(finding_line(judged())))
    del line["repro"]
    assert not VALIDATOR.is_valid(line)


def test_a_finding_survives_the_log() -> None:
    line = dumps(finding_line(FULL))
    validate(line)
    again = reported_of(json.loads(line))
    assert math.isnan(again.finding.where["got"])
    plain = {"where": {}}
    assert replace(again, finding=replace(again.finding, **plain)) == replace(
        FULL, finding=replace(FULL.finding, **plain)
    )


def test_a_finished_log_fits_the_schema_and_reads_back(tmp_path: Path) -> None:
    with RunLog(tmp_path, header()) as log:
        log.add(FULL)
        log.add(control())
        log.finish(stale=["a@b/*"], seconds=1.0)
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        validate(line)
    again = read_log(tmp_path / "run.jsonl")
    assert [one.role for one in again.reported] == [Role.JUDGED, Role.CONTROL]
    assert again.footer is not None
    assert again.footer["counts"] == {"FAIL": 1}
    assert not again.partial


def test_every_line_is_in_the_file_before_the_next_one(tmp_path: Path) -> None:
    with RunLog(tmp_path, header()) as log:
        for count in range(3):
            assert len((tmp_path / "run.jsonl").read_text().splitlines()) == count + 1
            log.add(judged())


def test_half_a_line_at_the_end_makes_a_partial_log(tmp_path: Path) -> None:
    with RunLog(tmp_path, header()) as log:
        log.add(judged())
    path = tmp_path / "run.jsonl"
    path.write_text(path.read_text() + '{"kind": "find')
    again = read_log(path)
    assert again.partial
    assert len(again.reported) == 1


def test_half_a_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [dumps({"kind": "header", "schema": 1, **header()}), '{"kind": "find', "{}"]
    path.write_text("\n".join(lines))
    with pytest.raises(LogError, match=r"run\.jsonl', line 2: not JSON"):
        read_log(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with a header"),
        ('{"kind": "finding"}\n', "does not begin with a header"),
        ('{"kind": "header", "schema": 99}\n', "has schema 99; this version reads 1"),
        ('["header"]\n', r"run\.jsonl', line 1: not a line of a log"),
        ('{"kind": "header", "schema": 1}\n{}\n', r"run\.jsonl', line 2: not a line of a log"),
        ("\xff\xfe", "does not begin with a header"),
    ],
)
def test_what_is_no_log_of_this_version_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(LogError, match=message):
        read_log(tmp_path / "run.jsonl")


def test_a_log_is_never_written_over_another(tmp_path: Path) -> None:
    with RunLog(tmp_path, header()):
        pass
    with pytest.raises(FileExistsError):
        RunLog(tmp_path, header())


def probe(verdict: str) -> Reported:
    return Reported(finding=finding(verdict), role=Role.PROBE)


@pytest.mark.parametrize(
    ("reported", "stale", "status"),
    [
        ([judged()], (), 0),
        ([judged(), judged("FAIL")], (), 1),
        ([judged(), judged("NO_POWER")], (), 2),
        ([judged(), probe("HANG")], (), 0),
        ([judged(), control("FAIL")], (), 2),
        ([judged(), control("ERROR")], (), 2),
        ([judged("FAIL"), control("FAIL")], (), 1),
        ([control()], (), 2),
        ([judged("UNSUPPORTED")], (), 2),
        ([judged()], ("a@b/*",), 1),
        ([judged("XFAIL")], (), 0),
        ([judged(), judged("XPASS")], (), 1),
    ],
    ids=str,
)
def test_the_exit_status_follows_from_roles_and_verdicts(
    reported: list[Reported], stale: tuple[str, ...], status: int
) -> None:
    assert status_of(reported, stale) == status


def test_the_log_keeps_findings_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    found: list[Finding] = [finding(check=f"a.b{number}") for number in (3, 1, 2)]
    with RunLog(tmp_path, header()) as log:
        for one in found:
            log.add(Reported(finding=one))
    again = read_log(tmp_path / "run.jsonl")
    assert [one.finding.check for one in again.reported] == ["a.b3", "a.b1", "a.b2"]

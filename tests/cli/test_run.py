"""The command as a user runs it: an adapter of the working directory, ranks, files, repetition."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from conformance.cli.repeating import recheck_command
from conformance.report.lines import Log, Role, read_log, schema
from tests.cli import here

ADAPTER = '''
from torch.nn.parallel import DistributedDataParallel

from conformance import Adapter, Wrapped


class Half(Adapter):
    """Clips to half of what was asked for."""

    capabilities = frozenset({"gradients", "clip.p2", "clip.gradients"})

    def build(self, model, make_optimizer, config):
        module = DistributedDataParallel(model)
        return Wrapped(module=module, optimizer=make_optimizer(module.parameters()))

    def bare(self, w):
        return w.module.module

    def clip_grad_norm(self, w, max_norm, norm_type):
        return super().clip_grad_norm(w, max_norm / 2, norm_type)
'''
NAME = "mine:Half"
CASE = "mlp/train/accumulation=1,optimizer=sgd"
SELECTION = ["--variant", "default", "--case", CASE, "--device", "cpu", "--jobs", "1"]
Done = subprocess.CompletedProcess[str]
CHECKS = ["--check", "clip.*"]


def command(folder: Path, *arguments: str, timeout: float = 900) -> Done:
    return subprocess.run(
        [sys.executable, "-m", "conformance", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("project")
    (folder / "mine.py").write_text(ADAPTER)
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> Done:
    return command(folder, "run", NAME, *SELECTION, *CHECKS, "--out", "result")


@pytest.fixture
def log(folder: Path, done: Done) -> Log:
    return read_log(folder / "result" / "run.jsonl")


def test_a_wrong_wrapper_fails_for_the_stated_reason(done: Done, log: Log) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    bad = {o.finding.check for o in log.reported if o.finding.verdict == "FAIL"}
    assert "clip.gradients" in bad
    told = re.findall(r"^FAIL  (\S+)@", done.stdout, re.MULTILINE)
    assert told == ["clip.gradients"]  # one story: what follows from it is folded
    assert "\n\nFAIL  clip.gradients@" in done.stdout  # set apart from the lines of the cases


def test_the_control_and_the_probes_stand_in_the_log(log: Log) -> None:
    roles = {one.role for one in log.reported}
    assert roles == set(Role)
    control = [one.finding for one in log.reported if one.role is Role.CONTROL]
    assert {str(finding.verdict) for finding in control} == {"PASS"}
    probes = {one.finding.check for one in log.reported if one.role is Role.PROBE}
    assert {"claim.clip.p1", "claim.clip.pinf"} <= probes


def test_without_a_terminal_all_is_a_line_that_is_not_pass(done: Done, log: Log) -> None:
    lines = done.stdout.splitlines()
    for finding in (one.finding for one in log.reported if one.finding.verdict != "UNSUPPORTED"):
        passed = f"PASS        {finding.id.partition('@')[2]}"
        start = passed if finding.verdict == "PASS" else f"{finding.verdict:<11} {finding.id}"
        assert [line for line in lines if line.startswith(start)], start
    assert not [line for line in lines if line.startswith("PASS") and "@" in line]


def test_every_written_line_fits_its_schema(folder: Path, done: Done) -> None:
    case = "*~train~accumulation=1*sgd*"
    histories = sorted((folder / "result" / "histories").rglob(f"{case}/**/rank1.jsonl"))
    assert len(histories) >= 5  # the wrapper's, the control's, and the oracle's three
    for name, paths in (("run", [folder / "result" / "run.jsonl"]), ("history", histories)):
        validator = jsonschema.Draft202012Validator(schema(name))
        for path in paths:
            for line in path.read_text().splitlines():
                validator.validate(json.loads(line))


def test_junit_counts_what_the_log_counts(folder: Path, log: Log) -> None:
    root = ET.parse(folder / "result" / "junit.xml").getroot()
    names = [case.get("name") for case in root.iter("testcase")]
    assert sorted(map(str, names)) == sorted(one.finding.id for one in log.reported)
    failures = len(root.findall(".//failure"))
    assert failures == sum(o.finding.verdict == "FAIL" for o in log.reported)


def test_recheck_without_ranks_finds_the_same(folder: Path, log: Log, capsys) -> None:
    assert recheck_command(folder / "result") == 1
    roles = Counter(one.role for one in log.reported)
    told = f"{roles[Role.JUDGED]} judged, {roles[Role.CONTROL]} control, {roles[Role.PROBE]} probe"
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"recheck: all {len(log.reported)} findings are the same ({told})"
    )


def test_recheck_sees_a_changed_history(folder: Path, log: Log, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder / "result", copy)
    (case,) = (copy / "histories" / "mine_Half[default]").glob("mlp~train*=1*sgd")
    history = case / "rank0.jsonl"
    lines = history.read_text().splitlines()
    kept = [line for line in lines if '"what": "clipped"' not in line]
    assert len(kept) < len(lines)
    history.write_text("\n".join(kept) + "\n")
    recheck_command(copy)
    shown = capsys.readouterr().out.splitlines()
    changed = [line for line in shown if line.startswith("changed: ")]
    (own,) = [line for line in changed if " clip.gradients@" in line]  # others may name it
    told = "the wrapper's run lacks clipped at step 1: does the adapter's own step() call"
    assert f"{told} w.observe('clipped')?" in own


@pytest.mark.usefixtures("forkserver")
def test_the_repro_line_of_a_failure_repeats_it(folder: Path, log: Log) -> None:
    failed = next(o.finding for o in log.reported if o.finding.verdict == "FAIL")
    program, *arguments = shlex.split(failed.repro)
    assert program == "fsdp-conformance"
    shown = here.command(folder, *arguments)
    assert shown.returncode == 1, shown.stdout + shown.stderr
    asked, _, others = shown.stdout.partition(
        "\nthe other checks of this case, first divergence first:\n"
    )
    assert others
    assert failed.id not in others
    assert asked.startswith(f"FAIL  {failed.id}\n      {failed.sentence[:60]}")
    assert f"cause: {failed.cause}" in asked

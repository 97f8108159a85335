"""The adapter that README.md shows is whole: it runs as it stands there, and nothing is wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from conformance.cli.repeating import recheck_command
from conformance.report.lines import Role, read_log
from tests.cli import here

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"^```python\n# my_adapter\.py\n(.*?)^```$", re.M | re.S)
MODELS = ["--model", "batchnorm", "--model", "transformer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("readme")
    (shown,) = BLOCK.findall(README.read_text(encoding="utf-8"))
    (folder / "my_adapter.py").write_text(shown)
    return folder


@pytest.fixture(scope="module")
def done(folder: Path, forkserver: None) -> here.Done:
    options = ["--depth", "narrow", *MODELS, "--device", "cpu", "--jobs", "2", "--out", "result"]
    return here.command(folder, "run", "my_adapter:MyAdapter", *options)


def test_the_adapter_of_the_readme_passes_every_check(folder: Path, done: here.Done) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nmy_adapter:MyAdapter: " in done.stdout  # under the name that was typed
    reported = read_log(folder / "result" / "run.jsonl").reported
    judged = [one.finding for one in reported if one.role is Role.JUDGED]
    assert {str(finding.verdict) for finding in judged} == {"PASS", "UNSUPPORTED"}
    # what an adapter has to say about names and buffers is among it
    passed = {f.check for f in judged if f.verdict == "PASS"}
    assert {"gradients.value", "buffers.convention", "tied.one", "clip.gradients"} <= passed


def rechecked(folder: Path, capsys) -> tuple[int, str]:
    status = recheck_command(folder)
    return status, capsys.readouterr().out


@pytest.mark.usefixtures("done")
def test_recheck_of_a_good_run_is_good_only_if_the_run_is_whole(
    folder: Path, tmp_path: Path, capsys
) -> None:
    assert rechecked(folder / "result", capsys)[0] == 0
    copy = tmp_path / "copy"
    shutil.copytree(folder / "result", copy)
    log = copy / "run.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-1]))  # an interrupted run has no footer
    status, shown = rechecked(copy, capsys)
    assert status == 2
    assert shown.endswith("the run is partial, so not everything was judged: exit status 2\n")
    log.write_text("".join(lines))
    next((copy / "histories").glob("my_adapter_MyAdapter*/*/case.json")).unlink()
    status, shown = rechecked(copy, capsys)
    assert status == 2
    assert re.search(r"not judged again: \d+ findings?, of 1 case without history", shown)
    assert shown.endswith("histories are missing, so not everything was judged: exit status 2\n")

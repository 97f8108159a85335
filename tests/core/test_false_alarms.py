"""The loop over wrappers that are right: what it runs, remembers and says. No ranks."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from conformance import false_alarms
from conformance.adapters.covering import ROWS
from conformance.adapters.odd import ODD
from conformance.false_alarms import Planned, blocks, main, planned_runs
from conformance.report.repeated import Done, page, recorded
from tests.waiting import PATIENCE, wait_for

RIGHT = 3 + len(ODD)
SHARED_OUT = ("--jobs", "8", "--seeds", "2", "--block", "core", "--adapter", "torch.*")
"""Two runs in two processes."""


def done_of(run: Planned, **more: object) -> Done:
    done = Done(
        key=run.key,
        block=run.block.name,
        adapter=run.subject.adapter,
        world=run.block.world,
        seed=run.seed,
        cases=2,
        verdicts={"PASS": 5, "UNSUPPORTED": 1},
    )
    return replace(done, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many cores there are."""
    monkeypatch.setattr(false_alarms, "default_jobs", lambda world, device: 1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Judges without ranks; the keys of what was asked for."""
    asked: list[str] = []

    def judged(runs: Sequence[Planned], *, jobs: int, until: float) -> Iterator[Done]:
        for run in runs:
            asked.append(run.key)
            yield done_of(run)

    monkeypatch.setattr(false_alarms, "judged", judged)
    return asked


def test_there_are_odd_wrappers_enough() -> None:
    assert len(ODD) >= 8


def test_every_seed_meets_every_wrapper_that_is_right() -> None:
    runs = planned_runs(blocks(20, 3), ())
    assert len(runs) == len({run.key for run in runs})
    core = [run for run in runs if run.block.name == "core"]
    assert len(core) == 20 * RIGHT
    assert {run.seed for run in core} == set(range(20))
    assert len([r for r in runs if r.block.name == "everything"]) == 3 * RIGHT


def test_all_rows_of_options_run_at_two_ranks_and_a_third_of_them_at_four() -> None:
    runs = [run for run in planned_runs(blocks(1, 1), ()) if run.block.name == "options"]
    two, four = ([r.subject.variant for r in runs if r.block.world == w] for w in (2, 4))
    assert len(two) >= len(ROWS)
    assert set(four) < set(two)
    assert len(two) <= 3 * len(four) + 3


def test_what_shares_a_seed_and_a_world_comes_together() -> None:
    runs = planned_runs(blocks(3, 2), ())
    places = [(-run.block.world, run.seed) for run in runs]
    assert places == sorted(places)


def test_what_is_recorded_is_not_done_again(told: list[str], tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--seeds", "2", "--block", "core", "--adapter", "fsdp.*"]
    assert main(arguments) == 0
    assert len(told) == 4
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    assert main(arguments) == 0
    assert len(told) == 5
    assert set(recorded(tmp_path / "runs.jsonl")) == set(told)


def test_an_alarm_is_printed_with_its_repeating_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alarm = {"id": "losses.value@x/mlp/train#1", "sentence": "too high", "repro": "repeat it"}

    def judged(runs: Sequence[Planned], *, jobs: int, until: float) -> Iterator[Done]:
        yield done_of(runs[0], alarms=[alarm], verdicts={"FAIL": 1})

    monkeypatch.setattr(false_alarms, "judged", judged)
    assert main(["--out", str(tmp_path), "--seeds", "1", "--block", "core"]) == 1
    assert "too high\n  repeat it" in capsys.readouterr().out
    text = (tmp_path / "false-alarms.md").read_text()
    assert f"1 run, 2 cases, 1 check judged, 1 alarm; {RIGHT - 1} runs not done." in text
    assert "repeat it" in text


def test_what_time_did_not_allow_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(false_alarms, "judged", lambda runs, *, jobs, until: iter(()))
    assert main(["--out", str(tmp_path), "--seeds", "1"]) == 2
    assert "runs not done" in (tmp_path / "false-alarms.md").read_text()


def test_a_pattern_that_matches_nothing_is_wrong_usage(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--adapter", "nobody"]) == 64


def test_the_page_adds_up_what_several_seeds_gave() -> None:
    runs = planned_runs([blocks(2, 1)[0]], ["fsdp.fully_shard"])
    text = page([done_of(run) for run in runs], 0)
    assert "2 runs, 4 cases, 12 checks judged, 0 alarms; 0 runs not done." in text
    assert "| core | `fsdp.fully_shard` | 2 | 2 | 4 | 10 | 2 | 0 | 0 |" in text


def test_a_record_is_lines_of_plain_json(told: list[str], tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--seeds", "1", "--block", "core", "--adapter", "fsdp.*"])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == told


def test_a_process_that_was_killed_is_told_and_its_runs_are_not_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Mock(return_value=Mock(exitcode=-signal.SIGKILL))
    monkeypatch.setattr(multiprocessing, "get_context", lambda how: Mock(Process=killed))
    arguments = ["--out", str(tmp_path), "--seeds", "1", "--block", "core", "--adapter", "fsdp.*"]
    assert main([*arguments, "--jobs", "8"]) == 2
    told = "the process for 2 ranks, seed 0 ended with status -9: what it has not recorded is not"
    assert capsys.readouterr().err == f"{told} done\n"


@pytest.mark.long
def test_runs_that_are_shared_out_are_all_recorded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "conformance.false_alarms", "--out", str(tmp_path), *SHARED_OUT],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("2 runs, ")
    assert {run.seed for run in recorded(tmp_path / "runs.jsonl").values()} == {0, 1}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="who outlives a parent is found on Linux only")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_that_share_the_runs_end_with_the_command(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "conformance.false_alarms", "--out", str(tmp_path), *SHARED_OUT],
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: len(list(folder.glob("ranks-*"))) == 2)
        process.send_signal(number)
        written = process.communicate(timeout=PATIENCE)[1]
    told = "fsdp-conformance: ended by SIGTERM\n" if number == signal.SIGTERM else ""
    assert (process.returncode in (128 + number, -number), written) == (True, told)
    wait_for(lambda: not list(folder.glob("ranks-*")) and not list(folder.glob("fsdp-*")))
    wait_for(lambda: not _processes_with(f"TMPDIR={folder}"))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
def test_an_interrupt_while_processes_import_is_told_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "conformance.false_alarms", "--out", str(tmp_path), *SHARED_OUT],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for(lambda: _importing_torch(f"TMPDIR={tmp_path}") == 3)
        os.killpg(process.pid, signal.SIGINT)
        written = process.communicate(timeout=PATIENCE)[1]
    assert (process.returncode, written) == (130, "fsdp-conformance: interrupted\n")
    wait_for(lambda: not _processes_with(f"TMPDIR={tmp_path}"))


def _processes_with(setting: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if setting in path.read_text().split("\0") else []
    return found


def _importing_torch(setting: str) -> int:
    """How many of the processes with a setting have torch, or are about to."""
    count = 0
    for process in _processes_with(setting):
        with contextlib.suppress(OSError):
            count += "libtorch" in Path(f"/proc/{process}/maps").read_text()
    return count

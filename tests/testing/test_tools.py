"""`FSDPTest` under pytest with workers, `expecttest` in update mode, and a controller that dies."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.testing.running import run_one

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
"""Seconds after which something does not come about any more."""

EXPECTATIONS = '''
from conformance.testing import FSDPTest, run_tests


class TestExpected(FSDPTest):
    world_size = 2
    device_type = "cpu"

    def test_one(self):
        self.assertExpectedInline(f"a\\nb {self.rank}", """""")

    def test_two(self):
        self.assertExpectedInline(f"c {self.rank}", """old""")


if __name__ == "__main__":
    run_tests()
'''

METHOD = """
import os, time
from conformance.testing import FSDPTest, run_tests

class TestWaiting(FSDPTest):
    world_size = 2
    device_type = "cpu"

    def test_it(self):
        with open({path!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{os.getppid()}}\\n")
        time.sleep(300)

if __name__ == "__main__":
    run_tests()
"""

SCENARIO = """
import os, time, pathlib
from conformance.adapters.torch_ddp import DataParallelAdapter
from conformance.case import Case
from conformance.session import Session, Setting
from conformance.subject import Subject

class Waiting(DataParallelAdapter):
    def optimizer_step(self, w):
        with open({path!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{os.getppid()}}\\n")
        time.sleep(300)

if __name__ == "__main__":
    subject = Subject(adapter=pathlib.Path(__file__).stem + ":Waiting")
    case = Case.parse("mlp/eval_first/optimizer=sgd")
    with Session(Setting(directory=pathlib.Path({path!r} + ".histories"), timeout=300)) as session:
        session.judge_case(subject, case, [])
"""


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTEST_ADDOPTS": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.long
def test_pytest_with_workers_finds_the_same_outcomes() -> None:
    done = run("-m", "pytest", "-q", "-rA", "-n", "2", "-p", "no:cacheprovider",
               "-k", "not 37 and not Many", "tests/testing/samples.py")  # fmt: skip
    failed = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))
    passed = set(re.findall(r"^PASSED \S+::(\w+)", done.stdout, re.MULTILINE))
    assert failed == {name for name in failed | passed if "fail" in name}, done.stdout
    assert len(failed) == 8
    assert {"test_expanded_0_one", "test_grid_number_1_named", "test_property"} <= passed
    assert "2 skipped" in done.stdout
    assert done.returncode == 1


def test_expectations_are_written_into_the_source(tmp_path: Path) -> None:
    file = tmp_path / "expected.py"
    file.write_text(EXPECTATIONS)
    update = run(str(file), cwd=tmp_path, EXPECTTEST_ACCEPT="1")
    assert update.returncode == 0, update.stderr
    text = file.read_text()
    assert '"""\\\na\nb 0"""' in text
    assert '"""c 0"""' in text
    spec = importlib.util.spec_from_file_location("expected", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["expected"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for method in ("test_one", "test_two"):
        ran = run_one(module.TestExpected, method)
        assert ran.verdict == "pass", ran.text
    del sys.modules["expected"]


@pytest.mark.parametrize(
    ("source", "numbers"),
    [
        (METHOD, (signal.SIGTERM,)),
        # tests/cli/test_ending.py ends a scenario, tests/ranks/test_controller.py kills ranks
        pytest.param(METHOD, (signal.SIGINT, signal.SIGKILL), marks=pytest.mark.long),
        pytest.param(SCENARIO, (signal.SIGINT, signal.SIGKILL), marks=pytest.mark.long),
    ],
    ids=["terminated method", "method", "scenario"],
)
def test_no_rank_survives_its_controller(
    source: str, numbers: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    controllers = {}
    with ExitStack() as stack:
        for number in numbers:
            file = tmp_path / f"waiting_{number.name}.py"
            pids = tmp_path / number.name
            file.write_text(source.format(path=str(pids)))
            process = subprocess.Popen(
                [sys.executable, str(file)],
                cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            controllers[number] = (process, pids)
        ranks = {number: _ranks_of(pids) for number, (_, pids) in controllers.items()}
        assert all(_alive(pid) for pids in ranks.values() for pid in pids)
        for number, (process, _) in controllers.items():
            process.send_signal(number)
        deadline = time.monotonic() + PATIENCE
        for number, (process, _) in controllers.items():
            process.wait(max(0.0, deadline - time.monotonic()))
            while living := [pid for pid in ranks[number] if _alive(pid)]:
                assert time.monotonic() < deadline, (number, living)
                time.sleep(0.05)


def _ranks_of(path: Path) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        text = path.read_text() if path.exists() else ""
        lines = text.splitlines()
        if len(lines) == 2 and text.endswith("\n"):
            return [int(pid) for line in lines for pid in line.split()]
        time.sleep(0.1)
    pytest.fail("the ranks did not start")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

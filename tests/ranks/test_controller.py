"""Nothing outlives the controller, however it ends, and it survives the death of its forkserver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conformance.ranks import Job, RankContext, RankPool, RankVerdict
from tests.ranks import jobs

PATIENCE = 120.0
"""Seconds after which something does not come about any more."""

CONTROLLER = """
import sys
from conformance.ranks import Job, shared_pool

job = Job(
    module="tests.ranks.jobs",
    qualname="write_pids_and_wait",
    sys_path=(".",),
    cwd=".",
    kwargs={"path": sys.argv[1]},
)
shared_pool(2).run(job, timeout=240)
assert "torch" not in sys.modules
"""


def lines_of(path: Path) -> list[str]:
    """Lines that ranks have written to their end; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def processes(path: Path) -> list[int]:
    """Ranks, their children and the forkserver, once both ranks have said who they are."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        lines = lines_of(path)
        if len(lines) == 2:
            return sorted({int(pid) for line in lines for pid in line.split()})
        time.sleep(0.05)
    raise AssertionError(f"ranks did not start within {PATIENCE} s")


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def wait_until_dead(pids: list[int]) -> list[int]:
    """Those that live on."""
    deadline = time.monotonic() + PATIENCE
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    root = Path(__file__).parents[2]
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(path)],
        cwd=root,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    try:
        pids = processes(path)
        assert len(pids) == 9
        controller.kill()
        controller.wait(PATIENCE)
        assert wait_until_dead(pids) == []
    finally:
        controller.kill()
        controller.wait()
    assert list(tmp_path.glob("ranks-*")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupted_controller_ends_the_job_and_can_go_on(
    pool: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "pids"

    def interrupt() -> None:
        processes(path)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run(Job.of(jobs.write_pids_and_wait, path=str(path)), timeout=2 * PATIENCE)
    thread.join()
    ranks_and_children = [
        int(pid) for line in path.read_text().splitlines() for pid in line.split()[:4]
    ]
    assert len(ranks_and_children) == 8
    assert wait_until_dead(ranks_and_children) == []
    assert pool.run(Job.of(jobs.sum_over_ranks)).verdict is RankVerdict.OK


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_death_of_the_forkserver_is_a_crash_and_the_pool_recovers(pool: RankPool) -> None:
    outcome = pool.run(Job.of(kill_parent), timeout=PATIENCE)
    assert outcome.verdict is RankVerdict.CRASH, outcome
    assert "gone with its forkserver" in outcome.sentence
    assert pool.run(Job.of(jobs.sum_over_ranks)).verdict is RankVerdict.OK


def kill_parent(context: RankContext) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)

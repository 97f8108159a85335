"""Devices are leased whole, to one job at a time, and come back when their holder dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock, Timeout

from conformance.ranks import Job, RankContext, RankPool, RankVerdict
from conformance.ranks.leases import Visible, leases_of, visible_devices
from conformance.ranks.setup import RankSetup
from conformance.ranks.worker import _hide_devices, _take_device
from tests.ranks.leasing import fake_leases
from tests.waiting import PATIENCE, wait_for

"""Seconds after which something does not come about any more."""
EIGHT = "0,1,2,3,4,5,6,7"
ROOT = Path(__file__).parents[2]


class Held(NamedTuple):
    """One lease, in seconds of the machine's clock."""

    start: float
    end: float
    devices: frozenset[str]


@contextmanager
def process(
    directory: Path, names: str, counts: str, milliseconds: int
) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.leasing", directory, names, counts, str(milliseconds)],
        cwd=ROOT,
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def run_all(directory: Path, *processes: tuple[str, str, int]) -> list[Held]:
    with ExitStack() as stack:
        running = [stack.enter_context(process(directory, *each)) for each in processes]
        assert [each.wait(PATIENCE) for each in running] == [0] * len(running)
    lines = [line for log in directory.glob("*.log") for line in log.read_text().splitlines()]
    fields = [line.split() for line in lines]
    return sorted(Held(float(s), float(e), frozenset(devices)) for s, e, *devices in fields)


def clashes(held: list[Held]) -> list[tuple[Held, Held]]:
    """Pairs of leases that had a device in common at the same time."""
    return [
        (one, other)
        for index, one in enumerate(held)
        for other in held[index + 1 :]
        if one.devices & other.devices and other.start < one.end
    ]


def most_at_once(held: list[Held]) -> int:
    """Devices in use at the busiest moment."""
    return max(
        sum(len(other.devices) for other in held if other.start <= one.start < other.end)
        for one in held
    )


def test_eight_devices_are_shared_by_processes_without_a_clash(tmp_path: Path) -> None:
    plans = ("1,2,1,4,1,8,1,2", "2,2,2,2,2,2,2,2", "8,1,4,1,2,1,1,1", "4,4,1,1,2,2,8,1",
             "1,1,1,1,1,1,1,1")  # fmt: skip
    held = run_all(tmp_path, *((EIGHT, plan, 20) for plan in plans))
    assert len(held) == 5 * 8
    assert clashes(held) == []
    assert sorted({len(lease.devices) for lease in held}) == [1, 2, 4, 8]
    assert most_at_once(held) > 2


def test_on_two_devices_wide_jobs_take_turns_and_narrow_ones_run_side_by_side(
    tmp_path: Path,
) -> None:
    held = run_all(tmp_path, *[("0,1", "2,1,1,2,1,1,1,2", 60)] * 2)
    assert clashes(held) == []
    leases = fake_leases(tmp_path, "0,1")
    with process(tmp_path, "0,1", "1", 600_000) as holder:
        wait_for(lambda: (tmp_path / f"{holder.pid}.holds").exists())
        with pytest.raises(RuntimeError, match="not free"), leases.hold(2, timeout=0.0):
            pytest.fail("both are free")
        with leases.hold(1, timeout=0.0) as devices:
            assert devices == (1,)


def test_processes_that_see_different_devices_share_the_common_one(tmp_path: Path) -> None:
    held = run_all(tmp_path, ("2,3", "2,2,2,2", 20), ("3", "1,1,1,1", 20), ("5", "1,1,1,1", 20))
    assert {device for lease in held for device in lease.devices} == {"2", "3", "5"}
    assert clashes(held) == []


def test_the_death_of_a_holder_frees_its_devices(tmp_path: Path) -> None:
    with process(tmp_path, EIGHT, "8", 600_000) as holder:
        wait_for(lambda: list(tmp_path.glob("*.holds")) != [])
        holder.kill()
        holder.wait()
        with fake_leases(tmp_path, EIGHT).hold(8, timeout=0.0) as devices:
            assert devices == tuple(range(8))


def test_who_waits_holds_nothing_and_who_cannot_wait_longer_is_told(tmp_path: Path) -> None:
    leases = fake_leases(tmp_path, "0,1,2,3")
    with leases.hold(3) as devices:
        assert devices == (0, 1, 2)
        waiting = threading.Thread(target=hold_once, args=(tmp_path, 2))
        waiting.start()
        wait_for(lambda: is_held(tmp_path / "fake-queue.lock"))
        with FileLock(tmp_path / "fake-3.lock", timeout=PATIENCE, poll_interval=0.001):
            assert waiting.is_alive()
        queue = rf"1 of 4 devices of type fake were not free within 0\.1 s.*{tmp_path}"
        with pytest.raises(RuntimeError, match=queue), leases.hold(1, timeout=0.1):
            pytest.fail("it overtook the one that waits")
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


@pytest.mark.parametrize("taken", ["fake-0", "fake-queue"])
def test_for_what_a_process_waits_long_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, taken: str
) -> None:
    leases = fake_leases(tmp_path, "0,1,2")

    def wait() -> list[str]:
        with pytest.raises(RuntimeError, match="not free"), leases.hold(3, timeout=0.05):
            pytest.fail("they were free")
        return caplog.messages

    told = "waiting for 3 fake devices that other jobs of this user hold (lock files in {})"
    with FileLock(tmp_path / f"{taken}.lock"):
        assert wait() == []
        monkeypatch.setattr("conformance.ranks.leases.TOLD_AFTER", 0.0)
        assert wait() == wait() == [told.format(tmp_path)]
    with leases.hold(3):
        assert len(caplog.messages) == 1


def is_held(path: Path) -> bool:
    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True


def hold_once(directory: Path, count: int) -> None:
    with fake_leases(directory, "0,1,2,3").hold(count, timeout=PATIENCE):
        pass


def test_a_large_job_is_not_starved_by_small_ones(tmp_path: Path) -> None:
    small = ",".join(["1"] * 20_000)  # that is ten minutes
    with process(tmp_path, "0,1", small, 30), process(tmp_path, "0,1", small, 30):
        wait_for(lambda: len(list(tmp_path.glob("*.holds"))) == 2)
        with fake_leases(tmp_path, "0,1").hold(2, timeout=PATIENCE):
            running = list(tmp_path.glob("*.log"))
        assert running == []


def test_preferred_devices_are_taken_again_and_wide_jobs_get_aligned_ones(tmp_path: Path) -> None:
    leases = fake_leases(tmp_path, EIGHT)
    with leases.hold(1, prefer=(5,)) as one:
        assert one == (5,)
        with leases.hold(1, prefer=(5,)) as other, leases.hold(2) as pair:
            assert (other, pair) == ((0,), (2, 3))
            with leases.hold(4) as four:
                assert four == (1, 4, 6, 7)


@pytest.mark.parametrize("count", [0, 9])
def test_a_lease_of_more_than_there_are_is_refused(tmp_path: Path, count: int) -> None:
    with (
        pytest.raises(ValueError, match="8 are visible"),
        fake_leases(tmp_path, EIGHT).hold(count),
    ):
        pytest.fail("it got them")


@pytest.mark.parametrize(
    ("environ", "variable", "names"),
    [
        ({}, "FAKE_VISIBLE_DEVICES", ("0", "1")),
        ({"FAKE_VISIBLE_DEVICES": "4, GPU-ab"}, "FAKE_VISIBLE_DEVICES", ("4", "GPU-ab")),
        ({"OTHER_VISIBLE_DEVICES": "6,7"}, "OTHER_VISIBLE_DEVICES", ("6", "7")),
        ({"OTHER_VISIBLE_DEVICES": "6,7,8"}, "FAKE_VISIBLE_DEVICES", ("0", "1")),
        ({"FAKE_AFFINITY_MASK": "1.0,1.1"}, "FAKE_AFFINITY_MASK", ("1.0", "1.1")),
        ({"NVIDIA_VISIBLE_DEVICES": "a,b"}, "FAKE_VISIBLE_DEVICES", ("0", "1")),
        (
            {"FAKE_VISIBLE_DEVICES": "2,3", "ANOTHER_VISIBLE_DEVICES": "0,1"},
            "FAKE_VISIBLE_DEVICES",
            ("2", "3"),
        ),
    ],
)
def test_devices_have_the_names_that_the_environment_gives_them(
    environ: dict[str, str], variable: str, names: tuple[str, ...]
) -> None:
    assert visible_devices("fake", 2, environ) == Visible(variable=variable, names=names)


def test_the_cpu_is_not_leased() -> None:
    assert leases_of("cpu") is None


def see(context: RankContext) -> list[object]:
    return [os.environ.get("FAKE_VISIBLE_DEVICES"), os.environ["LOCAL_RANK"], os.getpid()]


def test_ranks_of_a_job_see_the_devices_that_it_leased(tmp_path: Path) -> None:
    leases = fake_leases(tmp_path, "a,b,c,d")
    with RankPool(world=2) as pool:
        pool._leases = leases
        first, again = (pool.run(Job.of(see)).values for _ in range(2))
        with leases.hold(1):
            others = pool.run(Job.of(see)).values
        fresh = pool.run(Job.of(see), fresh=True).values
        kept = pool.run(Job.of(see)).values
        pool._leases = fake_leases(tmp_path, "a")
        assert pool.run(Job.of(see)).verdict is RankVerdict.OK
    assert [value[:2] for value in first] == [["a,b", "0"], ["a,b", "1"]]
    assert again == first
    assert [value[0] for value in others] == ["c,d"] * 2
    assert pool.replaced == "the job's devices are (2, 3), not (0, 1)"
    assert [value[0] for value in fresh] == ["c,d"] * 2
    assert kept == others


def test_a_job_waits_until_its_devices_are_free(tmp_path: Path) -> None:
    leases = fake_leases(tmp_path, "a,b")
    with RankPool(world=1) as pool:
        pool._leases = leases
        pool.run(Job.of(see))
        with leases.hold(2):
            thread = threading.Thread(target=pool.run, args=(Job.of(see),))
            thread.start()
            thread.join(0.5)
            assert thread.is_alive()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("environment", "present", "wanted"),
    [({"X": "4,5"}, 2, 1), ({"X": "4,5"}, 8, 5), ({}, 2, 1)],
    ids=["narrowed", "not narrowed", "all"],
)
def test_a_rank_takes_its_device_whether_or_not_the_variable_worked(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], present: int, wanted: int
) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: present)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    index = 5 if environment else 1
    setup = RankSetup(
        rank=1, world=2, device="meta", backend=None, store="", output="", stacks="", ring="",
        port=0, index=index, environment=environment,
    )  # fmt: skip
    assert _take_device(setup) == torch.device("meta", wanted)
    assert current == [wanted]


def none_here(context: RankContext) -> list[Any]:
    return [torch.accelerator.is_available(), torch.accelerator.device_count()]


def test_ranks_of_the_host_see_no_accelerator() -> None:
    """Not even where there is one: a wrapper that is given no device would take it."""
    with RankPool(world=1) as pool:
        assert pool.run(Job.of(none_here)).values == ([False, 0],)


def test_devices_are_hidden_from_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("META_VISIBLE_DEVICES", "0,1")
    there = torch.device("meta")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: there)
    _hide_devices()
    assert os.environ["META_VISIBLE_DEVICES"] == ""

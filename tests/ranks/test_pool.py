"""What a pool does with jobs that end well, fail, skip, die, wait and disagree."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from conformance.ranks import Job, RankPool, RankVerdict, shared_pool
from tests.ranks import jobs
from tests.ranks.bounds import count_bounds_from
from tests.ranks.test_controller import lines_of, wait_until_dead

soon_still = pytest.mark.usefixtures("_soon_still")
long_grace = pytest.mark.usefixtures("_long_grace")
from_rest = pytest.mark.usefixtures("_from_rest")

SOON = 30.0
"""Seconds: far below the bounds of the jobs that something else has to end."""
BOUND = 120.0


def assert_next_job_runs(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.sum_over_ranks))
    assert (outcome.verdict, outcome.values) == (RankVerdict.OK, ([3.0] * 3,) * 2), outcome


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
def test_every_rank_returns_its_value(pool: RankPool, *, fresh: bool) -> None:
    outcome = pool.run(Job.of(jobs.sum_over_ranks, size=2), fresh=fresh)
    assert outcome.verdict is RankVerdict.OK, outcome.sentence
    assert outcome.values == ([3.0, 3.0], [3.0, 3.0])
    assert [record.op for record in outcome.collectives if record] == ["all_reduce"] * 2
    assert outcome.exits == outcome.stacks == (None, None)


def test_a_rank_is_told_its_place(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.describe))
    for rank, seen in enumerate(outcome.values):
        assert seen["rank"] == rank
        assert (seen["world"], seen["device"], seen["backend"]) == (2, "cpu", "gloo")
        assert seen["env"] == [str(rank), "2", str(rank), "127.0.0.1"]
        assert seen["threads"] == 1
        assert seen["collects"]
        assert seen["cwd"] == os.getcwd()
        assert seen["exists"]
        assert not os.path.exists(seen["directory"]) or not os.listdir(seen["directory"])


def test_ranks_are_kept_between_jobs_and_fresh_ones_are_not(pool: RankPool) -> None:
    kept = [pool.run(Job.of(jobs.describe)).values for _ in range(2)]
    fresh = [pool.run(Job.of(jobs.describe), fresh=True).values for _ in range(2)]
    pids = [tuple(value["pid"] for value in values) for values in kept + fresh]
    assert pids[0] == pids[1]
    assert len({pid for pair in pids for pid in pair}) == 6


def test_static_methods_are_jobs(pool: RankPool) -> None:
    assert pool.run(Job.of(jobs.Holder.rank_twice)).values == (0, 2)


def test_every_job_starts_from_the_same_seed(pool: RankPool) -> None:
    first, second = pool.run(Job.of(jobs.draw)), pool.run(Job.of(jobs.draw))
    assert first.values == second.values
    assert first.values[0] == first.values[1]


def test_exception_on_one_rank_is_named_and_the_waiting_rank_is_bounded(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.fail_on_rank_1), timeout=BOUND)
    assert outcome.verdict is RankVerdict.ERROR
    assert outcome.sentence.startswith("rank 1: ValueError: rank 1 has its reasons")
    report = outcome.reports[1]
    assert report is not None
    assert report.error == "ValueError"
    assert "fail_on_rank_1" in report.traceback
    assert "conformance/ranks/worker.py" not in report.traceback
    assert outcome.seconds < SOON
    assert_next_job_runs(pool)


def test_exception_on_one_rank_while_the_other_is_done(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.fail_alone_at_the_end))
    assert outcome.verdict is RankVerdict.ERROR
    assert outcome.sentence == "rank 1: ValueError: only at the end"
    assert outcome.values == ("fine", None)


@long_grace
def test_equal_exceptions_are_told_once(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.fail_everywhere))
    assert outcome.verdict is RankVerdict.ERROR
    assert outcome.sentence == "all ranks: KeyError: 'the same everywhere'"
    assert_next_job_runs(pool)


@long_grace
def test_different_exceptions_are_told_in_the_order_of_time(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.fail_differently))
    assert outcome.sentence == (
        "rank 0: RuntimeError: failure of rank 0; rank 1: RuntimeError: failure of rank 1"
    )


@long_grace
def test_a_value_that_is_not_json_is_an_error_that_says_so(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.return_a_tensor))
    assert outcome.verdict is RankVerdict.ERROR
    assert "all ranks: TypeError: the job returned Tensor" in outcome.sentence


@pytest.mark.parametrize("kind", ["ours", "unittest", "pytest"])
def test_skip_on_all_ranks(pool: RankPool, kind: str) -> None:
    outcome = pool.run(Job.of(jobs.skip_everywhere, kind=kind))
    assert (outcome.verdict, outcome.sentence) == (RankVerdict.SKIP, "no such device")


@soon_still
@pytest.mark.parametrize("collective", [False, True], ids=["done", "waiting"])
def test_skip_on_one_rank_only_is_an_error(pool: RankPool, *, collective: bool) -> None:
    outcome = pool.run(Job.of(jobs.skip_on_rank_1, collective=collective), timeout=BOUND)
    assert outcome.verdict is RankVerdict.ERROR
    assert outcome.sentence.startswith("rank 1 skipped (not here), rank 0 did not")
    assert outcome.seconds < SOON


@pytest.mark.parametrize(
    ("how", "exit_"),
    [
        ("SIGKILL", "signal SIGKILL"),
        ("SIGSEGV", "signal SIGSEGV"),
        ("os._exit(0)", "exit 0"),
        ("sys.exit(0)", "exit 0"),
    ],
)
def test_a_rank_that_dies_is_a_crash(pool: RankPool, how: str, exit_: str) -> None:
    outcome = pool.run(Job.of(jobs.die, how=how), timeout=BOUND)
    assert outcome.verdict is RankVerdict.CRASH, outcome
    assert outcome.sentence.startswith(f"rank 1 died without a report ({exit_})")
    assert "its last collective was all_reduce 1 of group default" in outcome.sentence
    assert outcome.exits == (None, exit_)
    assert "last words" in outcome.outputs[1]
    assert outcome.seconds < SOON
    assert_next_job_runs(pool)


@soon_still
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("garbage", "sent a report that cannot be read"),
        ("closed", "died without a report (exit 1)"),
        ("shut down", "died without a report (signal SIGKILL)"),
    ],
)
def test_a_rank_without_a_readable_report_is_a_crash(pool: RankPool, how: str, words: str) -> None:
    outcome = pool.run(Job.of(jobs.die, how=how), timeout=BOUND)
    assert outcome.verdict is RankVerdict.CRASH, outcome
    assert outcome.sentence.startswith(f"rank 1 {words}")
    assert_next_job_runs(pool)


@from_rest
def test_a_missing_collective_is_a_hang_with_collective_group_module_and_stack(
    pool: RankPool,
) -> None:
    outcome = pool.run(Job.of(jobs.miss_a_collective_in_a_module), timeout=1)
    assert outcome.verdict is RankVerdict.HANG, outcome
    start = "rank 1 never entered all_reduce 2 of group default (second) in phase step 2; "
    assert outcome.sentence.startswith(start + "rank 0 waits there for ")
    assert "miss_a_collective_in_a_module (jobs.py:" in outcome.sentence
    assert "in miss_a_collective_in_a_module" in (outcome.stacks[1] or "")
    assert "in all_reduce" in (outcome.stacks[0] or "")
    assert 1 <= outcome.seconds < SOON
    assert_next_job_runs(pool)


@from_rest
def test_a_collective_is_on_record_before_it_is_issued(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.wait_inside_the_call), timeout=1)
    assert outcome.verdict is RankVerdict.HANG
    assert outcome.sentence.startswith("rank 1 never entered barrier 1 of group default; rank 0 wa")


@soon_still
def test_a_rank_that_ends_early_is_found_long_before_the_bound(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.end_without_the_last_collective), timeout=BOUND)
    assert outcome.verdict is RankVerdict.HANG
    assert outcome.sentence.startswith(
        "rank 1 ended and never entered all_reduce 2 of group default; rank 0 waits there for"
    )
    assert outcome.seconds < SOON


@from_rest
def test_an_endless_loop_is_a_hang(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.loop_forever), timeout=1)
    assert outcome.verdict is RankVerdict.HANG
    assert outcome.sentence.startswith("rank 1 did not end within 1 s, it is at loop_forever (jobs")
    assert_next_job_runs(pool)


@soon_still
def test_another_shape_is_a_desync(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.other_shape), timeout=BOUND)
    assert outcome.verdict is RankVerdict.DESYNC, outcome
    assert outcome.sentence == (
        "rank 0 entered all_reduce 2 of group default with 3 float32 [3], sum; "
        "there rank 1 entered all_reduce with 4 float32 [4], sum: different numel"
    )
    assert outcome.seconds < SOON
    assert_next_job_runs(pool)


@soon_still
def test_another_operation_is_a_desync(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.other_op), timeout=BOUND)
    assert outcome.verdict is RankVerdict.DESYNC, outcome
    assert outcome.sentence.endswith("different op")
    assert outcome.seconds < SOON


def test_another_reduction_is_a_desync_though_all_ranks_return(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.other_reduction))
    assert outcome.verdict is RankVerdict.DESYNC, outcome
    assert outcome.sentence.endswith("different reduce_op")


def test_a_disagreement_is_found_after_its_record_is_gone(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.other_reduction_long_ago))
    assert outcome.verdict is RankVerdict.DESYNC, outcome
    assert "entered 301 collectives each in default" in outcome.sentence


@soon_still
def test_a_send_that_nobody_receives_is_a_hang(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.send_without_receive))
    assert outcome.verdict is RankVerdict.HANG, outcome
    assert outcome.sentence.startswith(
        "rank 1 ended and never received send 1 of group default to rank 1 of rank 0; rank 0 waits"
    )


def test_a_collective_of_one_rank_only_is_a_desync_though_all_ranks_return(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.return_with_a_collective_in_flight))
    assert outcome.verdict is RankVerdict.DESYNC, outcome
    assert outcome.sentence == (
        "rank 0 entered all_reduce 1 of group default, rank 1 ended without it"
    )
    assert_next_job_runs(pool)


def test_receiving_from_any_source_is_no_desync(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.point_to_point))
    assert (outcome.verdict, outcome.values) == (RankVerdict.OK, ([11.0] * 3, [1.0] * 3)), outcome


def test_unbounded_output_is_capped_and_its_end_kept(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.ranks.evidence.OUTPUT_CAP", 2**20)
    outcome = pool.run(Job.of(jobs.print_without_end, megabytes=4))
    assert outcome.verdict is RankVerdict.OK
    assert all(text.endswith("the end\n") for text in outcome.outputs)
    assert all(size < 2**20 for size in outcome.values), outcome.values


def test_a_child_that_a_job_forks_does_not_speak_for_the_rank(pool: RankPool) -> None:
    outcome = pool.run(Job.of(jobs.fork_a_child_that_returns))
    assert outcome.values == ("from the rank", "from the rank"), outcome


def test_threads_of_the_controller_take_turns(pool: RankPool) -> None:
    outcomes = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(pool.run(Job.of(jobs.sum_over_ranks))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert [outcome.verdict for outcome in outcomes] == [RankVerdict.OK] * 3


def test_a_full_disk_is_an_error_of_the_caller_and_the_next_job_runs(
    pool: RankPool, monkeypatch
) -> None:
    def full(path: Path) -> None:
        if path.name == "rank1.ring":  # after the first rank is there
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("conformance.ranks.pool.reserve_ring", full)
    with pytest.raises(OSError, match="No space left") as raised:
        pool.run(Job.of(jobs.describe), fresh=True)
    monkeypatch.undo()
    assert not Path(raised.value.filename).parent.exists()
    assert_next_job_runs(pool)


def test_larger_worlds_and_single_ranks_share_the_forkserver(pool: RankPool) -> None:
    parent = pool.run(Job.of(jobs.describe)).values[0]["parent"]
    for world in (1, 3):
        with RankPool(world=world) as other:
            outcome = other.run(Job.of(jobs.sum_over_ranks, size=1))
            seen = other.run(Job.of(jobs.describe)).values
        total = float(world * (world + 1) // 2)
        assert outcome.values == ([total],) * world, outcome
        assert {value["parent"] for value in seen} == {parent}
    assert_next_job_runs(pool)


def test_shared_pools_are_shared_by_key() -> None:
    assert shared_pool(2) is shared_pool(2)
    assert shared_pool(2) is not shared_pool(3)


def test_a_closed_pool_refuses() -> None:
    pool = RankPool(world=1)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="this pool is closed"):
        pool.run(Job.of(jobs.describe))


def test_what_modules_do_at_the_end_of_their_process_keeps_no_one_who_closes_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lingering.py").write_text("import atexit, time\natexit.register(time.sleep, 600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RankPool(world=1, preload=["lingering"]) as pool:
        assert pool.run(Job.of(jobs.sum_over_ranks)).verdict is RankVerdict.OK
        server = pool._server
    assert server is not None
    assert server._process.returncode == 0  # else it was killed, seconds later


def test_a_preload_that_cannot_be_imported_is_named() -> None:
    broken = RankPool(world=1, preload=["no_such_module"])
    with broken, pytest.raises(RuntimeError, match="cannot preload no_such_module"):
        broken.run(Job.of(jobs.describe))


def test_arguments_that_cannot_be_sent_are_refused(pool: RankPool) -> None:
    with pytest.raises(TypeError, match="pass plain data"):
        pool.run(Job.of(jobs.sum_over_ranks, size=lambda: 3))


def test_a_bounded_job_leaves_no_process(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pids"
    count_bounds_from(monkeypatch, lambda _: len(lines_of(path)) == 2)
    outcome = pool.run(Job.of(jobs.write_pids_and_wait, path=str(path)), timeout=0.5)
    assert outcome.verdict is RankVerdict.HANG
    pids = [int(pid) for line in lines_of(path) for pid in line.split()[:4]]
    assert len(pids) == 8
    assert wait_until_dead(pids) == []


def test_the_children_of_a_rank_that_dies_die_too(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    outcome = pool.run(Job.of(jobs.die_with_children, path=str(path)))
    assert outcome.verdict is RankVerdict.CRASH
    assert wait_until_dead([int(pid) for pid in path.read_text().split()]) == []

"""Kept ranks are replaced if a job leaves global state changed, and only then."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from conformance.ranks import Job, RankPool, RankVerdict
from tests.ranks import jobs


@pytest.mark.parametrize("what", sorted(jobs._LEAKS))
def test_a_leak_is_named_and_its_ranks_are_replaced(pool: RankPool, what: str) -> None:
    before = [value["pid"] for value in pool.run(Job.of(jobs.describe)).values]
    assert pool.run(Job.of(jobs.leave_changed, what=what)).verdict is RankVerdict.OK
    assert pool.replaced.startswith("rank 1 left changed: ")
    assert what in pool.replaced
    outcome = pool.run(Job.of(jobs.describe))
    assert outcome.verdict is RankVerdict.OK
    assert not set(before) & {value["pid"] for value in outcome.values}


def test_training_is_no_leak(pool: RankPool) -> None:
    first = pool.run(Job.of(jobs.leave_nothing))
    second = pool.run(Job.of(jobs.leave_nothing))
    assert first.verdict is RankVerdict.OK, first.sentence
    assert first.values == second.values, pool.replaced


def test_a_fresh_job_leaves_the_kept_ranks_alone(pool: RankPool) -> None:
    before = [value["pid"] for value in pool.run(Job.of(jobs.describe)).values]
    pool.run(Job.of(jobs.leave_changed, what="default dtype"), fresh=True)
    assert [value["pid"] for value in pool.run(Job.of(jobs.describe)).values] == before


@pytest.mark.xfail(
    Version(torch.__version__).release < (2, 12),
    reason="torch 2.11 keeps what it found for an operator where nothing can clear it",
)
@pytest.mark.parametrize(
    "job",
    [
        Job.of(jobs.sum_on_a_mesh_of_two_dimensions),
        Job.of(jobs.sum_on_a_mesh_of_a_group, own=True),
    ],
    ids=["of_two_dimensions", "of_a_group"],
)
def test_an_equal_mesh_of_a_later_job_has_groups_of_its_own(warm: RankPool, job: Job) -> None:
    before = [value["pid"] for value in warm.run(Job.of(jobs.describe)).values]
    for _ in range(2):
        outcome = warm.run(job)
        assert outcome.verdict is RankVerdict.OK, outcome.sentence
        assert outcome.values == (6.0, 6.0)
    after = [value["pid"] for value in warm.run(Job.of(jobs.describe)).values]
    assert after == before, warm.replaced


def test_ranks_are_replaced_after_a_mesh_that_something_still_holds(warm: RankPool) -> None:
    outcome = warm.run(Job.of(jobs.leave_a_mesh))
    assert outcome.verdict is RankVerdict.OK, outcome.sentence
    assert "process groups of a mesh" in warm.replaced


def test_ranks_are_kept_after_meshes_that_cannot_mislead(warm: RankPool) -> None:
    jobs_of = [Job.of(jobs.sum_on_a_mesh_of_a_group, own=False), Job.of(jobs.mesh_without_tensors)]
    before = [value["pid"] for value in warm.run(Job.of(jobs.describe)).values]
    for job in jobs_of:
        assert warm.run(job).verdict is RankVerdict.OK
    assert [value["pid"] for value in warm.run(Job.of(jobs.describe)).values] == before

"""The same on accelerators, where there are two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import Job, RankContext, RankPool, RankVerdict
from tests.ranks import jobs

pytestmark = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two accelerators"
)
_TIMEOUT = 90.0


@pytest.fixture(scope="module")
def accelerators() -> Iterator[RankPool]:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    with RankPool(world=2, device=accelerator.type) as pool:
        yield pool


def sum_on_device(context: RankContext) -> list[Any]:
    values = torch.full((4,), float(context.rank + 1), device=context.device)
    dist.all_reduce(values)
    return [values.tolist(), context.device.index, torch.accelerator.current_device_index()]


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
def test_each_rank_owns_its_device(accelerators: RankPool, *, fresh: bool) -> None:
    outcome = accelerators.run(Job.of(sum_on_device), timeout=_TIMEOUT, fresh=fresh)
    assert outcome.values == ([[3.0] * 4, 0, 0], [[3.0] * 4, 1, 1]), outcome


def train(context: RankContext) -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(context.device)
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[context.device.index])
    context.recorder.name_modules(ddp)
    before = len(context.recorder.records)
    ddp(torch.ones(2, 4, device=context.device)).sum().backward()
    return [[r.op, r.numel, r.backward, r.module] for r in context.recorder.records[before:]]


def test_backward_on_the_threads_of_the_devices_is_recorded(accelerators: RankPool) -> None:
    outcome = accelerators.run(Job.of(train), timeout=_TIMEOUT)
    assert outcome.values[0] == [["all_reduce", 30, True, "0"]], outcome
    kept = accelerators.run(Job.of(jobs.describe), timeout=_TIMEOUT)
    assert kept.verdict is RankVerdict.OK, accelerators.replaced


def miss_a_collective(context: RankContext) -> None:
    values = torch.ones(4, device=context.device)
    dist.all_reduce(values)
    if context.rank == 0:
        dist.all_reduce(values)


def issue_another_collective(context: RankContext) -> None:
    values = torch.ones(4, device=context.device)
    if context.rank == 0:
        dist.all_reduce(values)
    else:
        dist.broadcast(values, src=0)


def fail_on_device(context: RankContext) -> None:
    values = torch.ones(4, device=context.device)
    if context.rank == 1:
        raise ValueError("no device work on rank 1")
    dist.all_reduce(values)


def die_on_device(context: RankContext) -> None:
    dist.all_reduce(torch.ones(2, device=context.device))
    jobs.die_now(context)
    dist.all_reduce(torch.ones(2, device=context.device))


@pytest.mark.parametrize(
    ("job", "verdict", "start"),
    [
        (
            miss_a_collective,
            RankVerdict.HANG,
            "rank 1 ended and never entered all_reduce 2 of group default; rank 0 waits there",
        ),
        (
            issue_another_collective,
            RankVerdict.DESYNC,
            "rank 0 entered all_reduce 1 of group default",
        ),
        (fail_on_device, RankVerdict.ERROR, "rank 1: ValueError: no device work on rank 1"),
        (die_on_device, RankVerdict.CRASH, "rank 1 died without a report (signal SIGKILL)"),
    ],
)
def test_faults_are_named_and_the_next_job_runs(
    accelerators: RankPool, job: Any, verdict: RankVerdict, start: str
) -> None:
    outcome = accelerators.run(Job.of(job), timeout=_TIMEOUT)
    assert outcome.verdict is verdict, outcome
    assert outcome.sentence.startswith(start)
    assert outcome.seconds < _TIMEOUT / 2
    after = accelerators.run(Job.of(jobs.sum_over_ranks), timeout=_TIMEOUT)
    assert after.verdict is RankVerdict.OK, after


def test_more_ranks_than_devices_is_an_error_that_says_so() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    world = torch.accelerator.device_count() + 1
    with RankPool(world=world, device=accelerator.type) as pool:
        outcome = pool.run(Job.of(jobs.describe), timeout=_TIMEOUT)
    assert outcome.verdict is RankVerdict.ERROR
    assert f"needs as many devices of type {accelerator.type}" in outcome.sentence

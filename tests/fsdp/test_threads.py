"""Threads of one process: each trains a model of its own, or steps for another one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from conformance.ranks import RankContext
from fsdp import fully_shard
from tests.fsdp.plain import Stack, batch, build, compare, loss_of, optimizer_of, train_plain
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_training import shard_blocks

STEPS = 12


def in_threads(*works: Callable[[], object]) -> None:
    """Run all at once; raise what one of them has raised."""
    raised: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def _two(context: RankContext) -> None:
    """The optimizers' steps of one thread come in the midst of the other's passes."""
    plain = build()
    train_plain(plain, context.world_size, steps=STEPS)
    models = [
        shard_blocks(build(), mesh=DeviceMesh.from_group(dist.new_group(), "cpu")) for _ in range(2)
    ]

    def train(model: nn.Module) -> None:
        optimizer = optimizer_of(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(step, context.rank)).backward()
            optimizer.step()

    in_threads(*(lambda model=model: train(model) for model in models))
    for model in models:
        compare(model, plain)


def test_two_models_train_in_two_threads() -> None:
    on_ranks(_two, 2)


class Halving(torch.optim.Optimizer):
    """Needs no gradients: where there are some, no unit stays whole after an evaluation."""

    def step(self) -> None:  # type: ignore[override]
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.mul_(0.5)


def _steps_elsewhere(context: RankContext) -> None:
    """The root has stayed whole since an evaluation on this thread."""
    model = fully_shard(build(Stack))
    optimizer = Halving(model.parameters(), {})
    with torch.no_grad():
        before = model(batch(0, 0))
        in_threads(optimizer.step)
        after = model(batch(0, 0))
        model.reshard()
        torch.testing.assert_close(model(batch(0, 0)), after, rtol=0, atol=0)
    assert not torch.equal(before, after)


def test_a_step_on_another_thread_is_seen_by_the_next_forward() -> None:
    on_ranks(_steps_elsewhere, 2)

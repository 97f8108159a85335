"""Threads of one process: each trains a model of its own, or steps for another one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Set

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from conformance.ranks import RankContext
from fsdp import fully_shard
from fsdp.engine.optimizer_guard import _Guard
from tests.fsdp.plain import (
    DIM,
    Stack,
    batch,
    build,
    compare,
    loss_of,
    optimizer_of,
    train_plain,
)
from tests.fsdp.ranks import agreed, count, on_ranks
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
        assert not isinstance(model.out.weight, DTensor), "the root was to stay whole"
        in_threads(optimizer.step)
        after = model(batch(0, 0))
        model.reshard()
        torch.testing.assert_close(model(batch(0, 0)), after, rtol=0, atol=0)
    assert not torch.equal(before, after)


def test_a_step_on_another_thread_is_seen_by_the_next_forward() -> None:
    on_ranks(_steps_elsewhere, 2)


class Again(nn.Module):
    """A layer that stays whole until backward, in which others run again."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(DIM, DIM)
        self.again = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.again, self.kept(x), use_reentrant=False)


def _steps_before_backward(context: RankContext) -> list[int]:
    """How often backward gathers, without a step elsewhere and after one of another model."""
    model = build(Again)
    for module in (model.kept, *model.again):
        fully_shard(module, reshard_after_forward=module is not model.kept)
    fully_shard(model)
    optimizer = Halving(model.parameters(), {})
    gathers = []
    for step in (lambda: None, optimizer.step):
        loss = loss_of(model, batch(0, context.rank))
        in_threads(step)
        before = count(context, "all_gather")
        loss.backward()
        gathers.append(count(context, "all_gather") - before)
    return gathers


def test_a_backward_keeps_its_parameters_whatever_other_threads_step() -> None:
    """Else ranks whose threads are not equally fast would gather unequally often."""
    without, after = agreed(_steps_before_backward, 2)
    assert without == after > 0


def _others_step(context: RankContext, other: str) -> list[int]:
    """How often forwards gather; on each rank the other model steps after another one of them."""
    model = fully_shard(build(Stack))
    others = fully_shard(build(Stack)) if other == "sharded" else build(Stack)
    optimizer = Halving(others.parameters(), {})
    gathers = []
    with torch.no_grad():
        others(batch(0, 0))
        for number in range(3):
            before = count(context, "all_gather")
            model(batch(0, 0))
            gathers.append(count(context, "all_gather") - before)
            if number == context.rank:
                in_threads(optimizer.step)
    return gathers


@pytest.mark.parametrize("other", ["sharded", "plain"])
def test_a_step_of_another_model_on_another_thread_changes_no_forward(other: str) -> None:
    """It comes at any time: ranks that heeded it would gather unequally often."""
    assert agreed(_others_step, 2, other=other) == [2, 0, 0]  # one to agree


def _keeps_the_teacher(context: RankContext) -> tuple[list[int], bool]:
    """How often a model that nobody trains gathers, while another one learns from it."""
    teacher, student = (fully_shard(build(Stack)) for _ in range(2))
    optimizer = optimizer_of(student.parameters())
    gathers = []
    for step in range(3):
        x = batch(step, context.rank)
        before = count(context, "all_gather")
        with torch.no_grad():
            wanted = teacher(x)
        gathers.append(count(context, "all_gather") - before)
        (student(x) - wanted + 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not isinstance(teacher.out.weight, DTensor), "the root was to stay whole"
    # As one does that keeps copies of parameters, and writes to these afterwards.
    torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1).step()
    return gathers, isinstance(teacher.out.weight, DTensor)


def test_a_step_is_heeded_by_whom_it_may_concern() -> None:
    gathers, given_up = agreed(_keeps_the_teacher, 2)
    assert gathers == [2, 0, 0], "the optimizer had parameters of the other model"
    assert given_up, "the optimizer had parameters of no model"


class Listener:
    def is_stepped_on(self, held: Set[int]) -> bool:
        return True

    def after_step(self, *, surely: bool) -> None:
        """Hear of a step."""


class Meanwhile(weakref.WeakSet[Listener]):
    """Goes to each listener with time for another thread in between."""

    def __init__(self, other: threading.Thread) -> None:
        super().__init__()
        self.other = other

    def __iter__(self) -> Iterator[Listener]:
        for each in super().__iter__():
            self.other.start()
            self.other.join(0.2)
            yield each


def test_a_model_may_start_while_another_one_steps() -> None:
    guard, first, second = _Guard(), Listener(), Listener()
    other = threading.Thread(target=lambda: guard.listen(second))
    guard._listeners = Meanwhile(other)
    guard.listen(first)
    guard._tell(torch.optim.SGD([torch.ones(1)], 0.1))
    other.join()

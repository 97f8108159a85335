"""Units run in the same order on all ranks and in every iteration, or somebody is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import RankContext
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import batch, build
from tests.fsdp.ranks import agreed, count, error_of, on_ranks


class Ways(nn.Module):
    """Two layers, in an order that the test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.order = [0, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


@contextmanager
def in_detail() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def ways(**options: object) -> FSDP:
    return FSDP(build(Ways), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


def step(model: FSDP) -> None:
    model(batch(0, 0)).sum().backward()


def _other_order_on_rank_1(context: RankContext) -> list[str]:
    with in_detail():
        model = ways()
        model.module.order = [0, 1] if context.rank == 0 else [1, 0]
        return error_of(lambda: step(model))


def test_ranks_that_differ_in_the_first_iteration_all_raise() -> None:
    kind, text = agreed(_other_order_on_rank_1, 2)
    assert kind == "RuntimeError"
    assert text.startswith(
        "Forward order differs across ranks: rank 0 is all-gathering parameters for "
        "['layers.0.weight', 'layers.0.bias'] while rank 1 is all-gathering parameters for "
        "['layers.1.weight', 'layers.1.bias']"
    )


def _warnings_of(model: FSDP, orders: list[list[int]]) -> list[list[str]]:
    found = []
    for order in orders:
        model.module.order = order
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model)
        texts = [str(w.message) for w in caught]
        found.append([text for text in texts if "Forward order differs" in text])
    return found


def _later(context: RankContext) -> list[list[str]]:
    with in_detail():
        model = ways()
        return _warnings_of(model, [[0, 1], [0, 1], [1, 0], [1, 0], [0, 1]])


def test_a_later_iteration_that_differs_warns_once_and_goes_on() -> None:
    for rank, found in enumerate(on_ranks(_later, 2)):
        assert [len(texts) for texts in found] == [0, 0, 1, 0, 0]
        assert f"that of the first iteration on rank {rank}" in found[2][0]


def _more(context: RankContext) -> list[list[str]]:
    with in_detail():
        return _warnings_of(ways(), [[0, 1], [0, 1, 0]])


def test_a_unit_more_than_at_first_is_reported() -> None:
    assert "expected to all-gather no more parameters" in agreed_text(_more)


def agreed_text(function: object) -> str:
    first, *_ = on_ranks(function, 2)
    return " ".join(text for texts in first for text in texts)


def _evaluations(context: RankContext) -> list[list[str]]:
    """In eval mode nothing is compared, between ranks or between iterations."""
    with in_detail():
        model = ways()
        model.eval()
        model.module.order = [0, 1]
        step(model)
        model.train()
        found = _warnings_of(model, [[0, 1]])
        model.eval()
        found += _warnings_of(model, [[1, 0]])
        model.train()
        return found + _warnings_of(model, [[0, 1]])


def test_evaluations_may_run_in_any_order() -> None:
    assert on_ranks(_evaluations, 2) == ([[], [], []],) * 2


def _without_detail(context: RankContext) -> list[list[str]]:
    return _warnings_of(ways(), [[0, 1], [1, 0]])


def test_without_the_debug_level_nothing_is_compared() -> None:
    assert on_ranks(_without_detail, 2) == ([[], []],) * 2


def _prefetch(context: RankContext, order: list[int]) -> bool:
    """The first forward alone decides what is gathered ahead, by the first run of each unit."""
    model = ways(forward_prefetch=True)
    model.module.order = order
    states = [unit._state for unit in FSDP.fsdp_modules(model)]
    step(model)
    ahead = [state.forward_prefetch for state in states]
    model.module.order = [1, 0]
    step(model)
    assert [state.forward_prefetch for state in states] == ahead
    # The root has no parameters of its own, so the order begins with the first layer.
    return ahead == [[], [states[2]], []]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 0]])
def test_the_forward_prefetch_follows_the_first_forward(order: list[int]) -> None:
    assert agreed(_prefetch, 2, order=order) is True


def _frozen_order(context: RankContext) -> int:
    """Checks stop with the first iteration: later ones exchange nothing."""
    with in_detail():
        model = ways()
        before = count(context, "all_gather")
        model(batch(0, 0))
        found = count(context, "all_gather") - before
        agreement, units = 1, 2
        assert found == agreement + units + units  # each unit is compared, and then gathered
        model.zero_grad()
        step(model)
        calls = []
        order = model._order
        original = order._compare_ranks
        order._compare_ranks = lambda unit: calls.append(unit) or original(unit)
        step(model)
        return len(calls)


def test_later_iterations_exchange_nothing() -> None:
    assert agreed(_frozen_order, 2) == 0

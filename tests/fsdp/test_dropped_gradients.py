"""Gradients that were dropped do not come back later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from tests.fsdp.plain import batch, build, loss_of, optimizer_of, whole
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_training import shard_blocks


def _equal_the_plain_models(context: RankContext, model: nn.Module) -> None:
    """One backward gives the gradients of the plain model, and nothing of earlier ones."""
    plain = build()
    for rank in range(context.world_size):
        (loss_of(plain, batch(1, rank)) / context.world_size).backward()
    loss_of(model, batch(1, context.rank)).backward()
    for unit in (model, *model.blocks):
        unit.reshard()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert got.grad is not None, name
        torch.testing.assert_close(
            whole(got.grad), want.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def _fails_in_backward(model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    """The second block is reduced by the time that the first one raises."""

    def fail(*_args: Any) -> None:
        raise RuntimeError("on purpose")

    hook = model.blocks[0].norm.register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss().backward()
    hook.remove()


def _after_a_failed_backward(context: RankContext, by: str) -> None:
    model = shard_blocks(build())
    optimizer = optimizer_of(model.parameters())
    _fails_in_backward(model, lambda: loss_of(model, batch(0, context.rank)))
    (optimizer if by == "optimizer" else model).zero_grad()
    _equal_the_plain_models(context, model)


@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_a_failed_backward_leaves_nothing_that_zero_grad_does_not_drop(by: str) -> None:
    on_ranks(_after_a_failed_backward, 2, by=by)


def _after_a_backward_that_was_not_the_last(context: RankContext) -> None:
    model = shard_blocks(build())
    optimizer = optimizer_of(model.parameters())
    model.set_is_last_backward(False)
    loss_of(model, batch(0, context.rank)).backward()
    optimizer.zero_grad()
    model.set_is_last_backward(True)
    _equal_the_plain_models(context, model)


def test_gradients_of_a_backward_that_was_not_the_last_can_be_dropped() -> None:
    on_ranks(_after_a_backward_that_was_not_the_last, 2)


def _zeroed_while_whole(context: RankContext, way: str, *, to_none: bool) -> None:
    model = shard_blocks(build())
    if way == "kept":
        model.set_reshard_after_backward(False)
    loss_of(model, batch(0, context.rank)).backward()
    if way == "by_hand":
        model.unshard()
        model.blocks[0].unshard()
    assert not hasattr(model.inp.weight, "full_tensor"), "parameters were to be whole"
    model.zero_grad(set_to_none=to_none)
    _equal_the_plain_models(context, model)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("way", ["kept", "by_hand"])
def test_zero_grad_drops_the_gradients_of_shards_while_parameters_are_whole(
    way: str, *, to_none: bool
) -> None:
    on_ranks(_zeroed_while_whole, 2, way=way, to_none=to_none)

"""What a backward leaves open when it is not the last of its iteration, as in a pipeline."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from conformance.ranks import RankContext
from fsdp import CPUOffloadPolicy
from fsdp.engine.reducer import Reducer
from tests.fsdp.plain import batch, build, loss_of, whole
from tests.fsdp.ranks import agreed, count
from tests.fsdp.test_training import shard_blocks

UNITS = 3  # the root, which has parameters of its own, and two blocks


def _backwards(context: RankContext, *, offload: bool, last: list[bool]) -> list[list[Any]]:
    """What is open after each of two backwards of which forward came before the first."""
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    model, plain = shard_blocks(build(), **options), build()
    losses = [loss_of(model, batch(0, context.rank, part)) for part in range(2)]
    groups = [group for unit in (model, *model.blocks) for group in unit._state().groups]
    found = []
    for is_last, loss in zip(last, losses, strict=True):
        model.set_is_last_backward(is_last)
        before = count(context, "reduce_scatter")
        with patch.object(Reducer, "wait_for_offload") as waits:
            loss.backward()
        found.append(
            [
                count(context, "reduce_scatter") - before,
                len(model._state().comm().post_forward_order),
                [len(group.post_forward_indices) for group in groups],
                [group.fsdp_params[0].registered().grad is not None for group in groups],
                waits.call_count,
            ]
        )
    for rank in range(context.world_size):
        for part in range(2):
            (loss_of(plain, batch(0, rank, part)) / context.world_size).backward()
    if last[-1]:
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("offload", [False, True])
def test_only_the_last_backward_closes_the_iteration(*, offload: bool) -> None:
    first, last = agreed(_backwards, 2, offload=offload, last=[False, True])
    assert first == [UNITS, 2 * UNITS, [1] * UNITS, [True] * UNITS, 0]
    assert last == [UNITS, 0, [0] * UNITS, [True] * UNITS, UNITS]


def test_each_backward_is_the_last_unless_it_is_said_not_to_be() -> None:
    first, _ = agreed(_backwards, 2, offload=False, last=[True, True])
    assert first == [UNITS, 0, [0] * UNITS, [True] * UNITS, UNITS]

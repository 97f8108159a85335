"""What it costs the host to start a sharded model: counted, not timed."""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import fully_shard
from fsdp.engine.unit import FSDPState
from tests.fsdp.ranks import agreed


def _comparisons(context: RankContext, *, units: int) -> int:
    model, compared = nn.Sequential(*(nn.Linear(4, 4) for _ in range(units))), 0
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def equal(one: FSDPState, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    with mock.patch.object(FSDPState, "__eq__", equal):
        model(torch.ones(1, 4)).sum().backward()
    return compared


def test_units_are_not_compared_with_each_other() -> None:
    """Or a start would take the square of their number."""
    assert agreed(_comparisons, 1, units=20) <= 20

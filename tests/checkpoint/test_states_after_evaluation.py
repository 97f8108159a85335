"""States are given and taken right after an evaluation, which leaves the root gathered."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import checkpoint, fully_shard
from fsdp.checkpoint import StateDictOptions
from tests.fsdp.plain import batch, build
from tests.fsdp.ranks import on_ranks

OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "of rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


def _trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(batch(step, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(batch(7, 0)).sum())


def _losses(context: RankContext, way: str) -> list[Any]:
    """Of what was saved, of what was loaded, and of both after one more step."""
    options = StateDictOptions(**OPTIONS[way])
    model, optimizer = _trained(2)
    other, fresh = _trained(1)
    found = [_loss(model), _loss(other)]  # both roots are gathered now
    state = checkpoint.get_optimizer_state_dict(model, optimizer, options=options)
    _loss(model)
    saved = checkpoint.get_model_state_dict(model, options=options)
    checkpoint.set_optimizer_state_dict(other, fresh, copy.deepcopy(state), options=options)
    _loss(other)
    checkpoint.set_model_state_dict(other, saved, options=options)
    found.append(_loss(other))
    for one, its in ((model, optimizer), (other, fresh)):
        one(batch(3, context.rank)).sum().backward()
        its.step()
        found.append(_loss(one))
    return found


@pytest.mark.parametrize("way", OPTIONS)
def test_a_state_is_loaded_right_after_an_evaluation(way: str) -> None:
    for saved, before, loaded, next_saved, next_loaded in on_ranks(_losses, 2, way=way):
        assert before != saved
        assert loaded == saved
        assert next_loaded == next_saved != saved

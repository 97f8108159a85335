"""Options that the saved groups have and a fresh optimizer lacks, as a scheduler's first rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, checkpoint, fully_shard
from fsdp.checkpoint import StateDictOptions
from tests.fsdp.plain import batch, build
from tests.fsdp.ranks import on_ranks

FACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully": fully_shard,
    "flat": FullyShardedDataParallel,
    "original": lambda module: FullyShardedDataParallel(module, use_orig_params=True),
    "plain": lambda module: module,
}
OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "of rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


def _pair(face: str, *, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = FACES[face](build())
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def _loaded(context: RankContext, face: str, way: str) -> list[Any]:
    options = StateDictOptions(**OPTIONS[way])
    model, optimizer = _pair(face, rate=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model(batch(0, context.rank)).sum().backward()
    optimizer.step()
    scheduler.step()
    saved = checkpoint.get_optimizer_state_dict(model, optimizer, options=options)
    other, fresh = _pair(face, rate=0.7)
    checkpoint.set_optimizer_state_dict(other, fresh, saved, options=options)
    group = fresh.param_groups[0]
    # What a scheduler that resumes asks for.
    torch.optim.lr_scheduler.StepLR(fresh, step_size=1, gamma=0.5, last_epoch=1)
    return [group["lr"], group["initial_lr"], len(fresh.state)]


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("face", FACES)
def test_a_scheduler_resumes_on_an_optimizer_that_had_none(face: str, way: str) -> None:
    for rate, first, states in on_ranks(_loaded, 2, face=face, way=way):
        assert (rate, first) == (0.025, 0.1)
        assert states > 0

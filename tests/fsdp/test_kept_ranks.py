"""Training leaves nothing behind in its process: ranks that have trained are used again."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from conformance.ranks import RankContext
from fsdp import fully_shard
from fsdp.engine.optimizer_guard import _Guard, _Mark
from tests.fsdp.plain import build, train_sharded
from tests.fsdp.ranks import on_ranks


def _train(context: RankContext) -> int:
    train_sharded(fully_shard(build()), context.rank)
    return os.getpid()


def test_ranks_that_have_trained_are_kept() -> None:
    assert on_ranks(_train, 2) == on_ranks(_train, 2)


def test_the_hook_on_optimizers_goes_with_the_last_parameter_that_needs_it() -> None:
    hooks = optimizers._global_optimizer_pre_hooks
    before, guard = len(hooks), _Guard()
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for param in params:
        param.mark = _Mark("weight", "were whole when it was made")
        guard.watch(param.mark)
    assert len(hooks) == before + 1
    params.pop()
    assert len(hooks) == before + 1, "one parameter is left"
    params.pop()
    del param
    assert len(hooks) == before

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


def test_the_hooks_on_optimizers_go_with_the_last_parameter_that_needs_it() -> None:
    def hooks() -> list[int]:
        both = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        return [len(each) for each in both]

    before, guard = hooks(), _Guard()
    installed = [number + 1 for number in before]
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for param in params:
        param.mark = _Mark("weight", "were whole when it was made")
        guard.watch(param.mark)
    assert hooks() == installed
    params.pop()
    assert hooks() == installed, "one parameter is left"
    params.pop()
    del param
    assert hooks() == before

"""Beside the compiler: hooks stay out of graphs, and units of one class share one graph."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from conformance.ranks import RankContext
from fsdp import fully_shard
from tests.fsdp.plain import build, compare, train_plain, train_sharded, whole
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_parallel import Pair


def _train(model: nn.Module, context: RankContext) -> None:
    plain = build(Pair)
    train_sharded(model, context.rank, steps=2)
    train_plain(plain, context.world_size, steps=2)
    compare(model, plain)


def _whole_model(context: RankContext) -> None:
    """The compiler meets the hooks of the inner units and leaves them out of its graphs."""
    model = build(Pair)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.compile(backend="eager")
    _train(model, context)


def test_a_compiled_root_trains_like_an_eager_one() -> None:
    on_ranks(_whole_model, 2, fresh=True)


def _graphs(context: RankContext) -> list[int]:
    """Blocks of one class are compiled, then sharded: the hooks stand around the graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = build(Pair), build(Pair)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=counter, fullgraph=True)
        fully_shard(model.blocks[index])
    fully_shard(model)
    counts = []
    for _ in range(3):
        train_sharded(model, context.rank, steps=1)
        train_plain(plain, context.world_size, steps=1)
        counts.append(counter.frame_count)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got), want, rtol=2e-6, atol=2e-6)
    return counts


def test_more_steps_need_no_more_graphs() -> None:
    first, *later = agreed(_graphs, 2, fresh=True)
    assert first > 0
    assert later == [first, first]

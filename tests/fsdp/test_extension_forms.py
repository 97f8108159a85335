"""Parameters that choose what travels: a number beside their rows, and streams of two towers."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import fully_shard
from tests.fsdp.plain import DIM, batch, build
from tests.fsdp.ranks import on_ranks
from tests.fsdp.streams import COMPUTE
from tests.fsdp.test_extension import doubled
from tests.fsdp.test_streams import watched
from tests.fsdp.test_training import shard_blocks


def _scaled(context: RankContext) -> None:
    """Rows that no world divides travel in another scale, which travels beside them."""
    model, plain = shard_blocks(build(hidden=13)), build(hidden=13)

    def before(self: torch.Tensor, mesh: Any) -> Any:
        return (self.detach() / 4, torch.tensor(4.0)), None

    def after(self: torch.Tensor, outs: Any, meta: Any, dtype: Any, *, out: Any = None) -> Any:
        rows, scale = outs
        assert rows.shape == (13, DIM)
        assert scale.tolist() == [4.0] * context.world_size
        whole = rows * scale[0]
        if out is None:
            return whole, (whole,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None

    local = model.blocks[0].up.weight._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(before, local)
    local.fsdp_post_all_gather = types.MethodType(after, local)
    x = batch(0, context.rank)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_a_number_may_travel_beside_uneven_rows() -> None:
    on_ranks(_scaled, 2)


class Towers(nn.Module):
    """Two towers, the second on a stream of its own that knows nothing of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.streams: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        streams = self.streams
        streams.wait_stream("side", COMPUTE)
        left = self.left(x)
        with streams.on("side"):
            right = self.right(x)
        streams.wait_stream(COMPUTE, "side")
        return left, right


def _towers(context: RankContext) -> list[str]:
    model = doubled(build(Towers))
    for tower in (model.left, model.right):
        fully_shard(tower, reshard_after_forward=False)
    fully_shard(model)
    model, races = watched(model)
    model.streams = races.streams
    model.left.set_modules_to_forward_prefetch([model.right])
    x = batch(0, context.rank)
    with races, torch.no_grad():
        model(x)
    return races.found


def test_a_gather_ahead_is_waited_for_on_the_stream_that_uses_it() -> None:
    for found in on_ranks(_towers, 2):
        assert found == []

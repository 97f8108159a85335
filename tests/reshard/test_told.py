"""How a tensor is dealt out, by hand; what ranks tell of it; ranks that hold none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from conformance.ranks import RankContext
from fsdp.reshard.boxes import Box, boxes_of
from fsdp.reshard.dealt import Dealt, Ranks, by_dim, whole
from fsdp.reshard.nested import Boxes
from fsdp.reshard.pieces import pieces_of
from fsdp.reshard.side import Told
from tests.fsdp.ranks import on_ranks


@pytest.mark.parametrize(
    ("rows", "how"),
    [(((0, 1),), "2 shards on ranks [0, 1]"), (((0,), (3,)), "whole on ranks [0, 3]")],
)
def test_a_tensor_is_told_by_how_it_is_dealt_out(rows: Any, how: str) -> None:
    cut: Any = None
    told = Told(names=("w",), shape=(2,), dtype=torch.float32, cut=cut, rows=rows, order=None)
    assert str(told) == f"'w' of shape (2,), torch.float32, {how}"


ALL = Ranks([[0, 1, 2, 3]])
HALVES = Boxes(
    shape=(4, 2), chunks=((0, 2),), inner_shards=2, inner=by_dim((2, 2), Ranks([[0, 1]])).cut
)


def test_what_is_cut_last_is_the_first_box_in_the_dims_of_the_tensor() -> None:
    two = Ranks([[0, 1]])
    cut = Boxes(shape=(3, 4), chunks=((0, 2),))
    assert Dealt(shape=(3, 4), cut=cut, ranks=two).part == (2, 4)
    assert Dealt(shape=(4, 3), cut=cut, ranks=two, order=(1, 0)).part == (4, 2)
    assert whole((3, 4), two).part == (3, 4)


@pytest.mark.parametrize("shard", range(4))
def test_a_box_that_is_cut_again_lies_where_its_rows_are(shard: int) -> None:
    (box,) = boxes_of(Dealt(shape=(4, 2), cut=HALVES, ranks=ALL), shard)
    assert box == Box(offsets=(shard, 0), sizes=(1, 2), start=0)


def _beside(context: RankContext) -> list[int]:
    mesh = DeviceMesh("cpu", [0])
    model = nn.Module()
    own = torch.ones(3) if context.rank == 0 else torch.empty(0)
    part = DTensor.from_local(own, mesh, [Shard(0)], shape=torch.Size([3]), stride=(1,))
    model.register_buffer("part", part)
    (piece,) = pieces_of(model, [0, 1])
    assert dist.get_world_size() == 2
    return [-1 if each is None else each for each in map(piece.dealt.ranks.shard_of, (0, 1))]


def test_a_rank_beside_the_mesh_of_a_tensor_has_no_part_of_it() -> None:
    assert on_ranks(_beside, 2) == ([0, -1], [0, -1])

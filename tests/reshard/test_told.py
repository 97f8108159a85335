"""How a tensor is dealt out, by hand; what ranks tell of it and of its state; where it goes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from conformance.ranks import RankContext
from fsdp.reshard.boxes import Box, boxes_of
from fsdp.reshard.dealt import Dealt, Ranks, by_dim, whole
from fsdp.reshard.live import _Ends, reshard
from fsdp.reshard.nested import Boxes
from fsdp.reshard.optimizer import Saved
from fsdp.reshard.pieces import pieces_of
from fsdp.reshard.side import Local, Told
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


def _trained(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_state_is_told_that_has_entries_of_one_sort_only() -> None:
    model, optimizer = _trained(torch.optim.SGD, momentum=0.9)
    states = Local(model, optimizer, [0]).told.states
    buffers = {"momentum_buffer": torch.float32}
    assert states == {each: Saved(elements=buffers, values={}) for each in ("weight", "bias")}
    for param in model.parameters():
        optimizer.state[param] = {"seen": 1}
    states = Local(model, optimizer, [0]).told.states
    assert states == {each: Saved(elements={}, values={"seen": 1}) for each in ("weight", "bias")}


def test_what_is_told_of_a_step_count_stays_while_training_goes_on() -> None:
    model, optimizer = _trained(torch.optim.Adam)
    told = Local(model, optimizer, [0]).told
    optimizer.step()
    assert told.states["weight"].values["step"] == 1


def test_a_target_is_filled_in_its_own_memory() -> None:
    (source, _), (target, _) = (_trained(torch.optim.SGD) for _ in range(2))
    opened: dict[str, int] = {}
    usual = _Ends.open

    def watched(ends: _Ends, number: int) -> Any:
        (found,) = usual(ends, number)
        opened[ends.names[number]] = found.data_ptr()
        return [found]

    with mock.patch.object(_Ends, "open", watched):
        reshard(source, target)
    assert opened == {name: param.data_ptr() for name, param in target.named_parameters()}

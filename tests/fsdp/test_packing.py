"""Gradients are packed where the layout says, whatever way they are copied; no process."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fsdp.engine.collectives as collectives
from fsdp.engine.buffer import Buffer
from fsdp.engine.collectives import Gathering, GatherPlan
from fsdp.engine.layout import Layout, end_to_end, side_by_side
from fsdp.engine.packing import Packed, ReducePlan
from fsdp.engine.param import FSDPParam, ParamModuleInfo

CPU = torch.device("cpu")
SHAPES: dict[str, list[tuple[tuple[int, ...], int]]] = {
    "even": [((8, 3), 0), ((4,), 0), ((8, 4, 2), 0)],
    "uneven": [((5, 3), 0), ((4,), 0), ((1, 7), 0)],
    "gap": [((4, 1), 0), ((8, 3), 0)],  # two elements for each of two ranks: the next is aligned
    "inner_dim": [((3, 8), 1), ((2, 4, 2), 1), ((4,), 0)],
    "no_rows": [((0, 3), 0), ((4, 2), 0)],
    "nothing_at_all": [((4, 0), 0), ((5, 2), 0)],
    "one": [((4, 4), 0)],
}


def _params(shapes: list[tuple[tuple[int, ...], int]], *, cut: bool) -> list[FSDPParam]:
    return [
        FSDPParam(
            info=ParamModuleInfo(nn.Module(), f"p{index}"),
            uid=index,
            shape=torch.Size(shape),
            dim=dim if cut else None,
            dtype=torch.float32,
        )
        for index, (shape, dim) in enumerate(shapes)
    ]


def _plans(name: str, world: int, *, cut: bool) -> list[ReducePlan]:
    params = _params(SHAPES[name], cut=cut)
    lay_out: Any = side_by_side if cut else end_to_end
    layout: Layout = lay_out([param.extent for param in params], world, align=4)
    return [ReducePlan(params, layout, rank) for rank in range(world)]


def _expected(plan: ReducePlan, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Each shard, element by element, from the layout's own answer to "where is it"."""
    layout = plan.layout
    packed = torch.zeros(layout.world, layout.shard_numel)
    for index, gradient in enumerate(gradients):
        for at, value in enumerate(gradient.reshape(-1).tolist()):
            rank, offset = layout.locate(index, at)
            packed[rank, offset] = value
    return packed


def _gradients(name: str, dtype: torch.dtype, *, transposed: bool) -> list[torch.Tensor]:
    found = []
    for index, (shape, _) in enumerate(SHAPES[name]):
        values = torch.arange(math.prod(shape), dtype=dtype).view(shape) + 100 * (index + 1)
        found.append(values.mT.contiguous().mT if transposed and values.dim() > 1 else values)
    return found


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("cut", [True, False], ids=["side_by_side", "end_to_end"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_lie_where_the_layout_says(
    name: str, world: int, dtype: torch.dtype, *, cut: bool, transposed: bool
) -> None:
    plan, *_ = _plans(name, world, cut=cut)
    want = _expected(plan, _gradients(name, torch.float32, transposed=False))
    for _ in range(2):  # the second time into memory whose views are there already
        packed = plan.borrow(torch.float32, CPU)
        packed.data.fill_(math.nan)
        plan.pack(_gradients(name, dtype, transposed=transposed), packed)
        torch.testing.assert_close(packed.by_rank, want, rtol=0, atol=0)
        plan.give_back(packed)


@pytest.mark.parametrize("cut", [True, False], ids=["side_by_side", "end_to_end"])
@pytest.mark.parametrize("name", SHAPES)
def test_each_rank_cuts_its_rows_out_of_its_shard(name: str, *, cut: bool) -> None:
    world, gradients = 2, _gradients(name, torch.float32, transposed=False)
    for rank, plan in enumerate(_plans(name, world, cut=cut)):
        # Not at the start of its memory, as a part of something larger.
        shard = torch.cat([torch.full((3,), math.nan), _expected(plan, gradients)[rank]])[3:]
        for index, got in enumerate(plan.pieces(shard)):
            piece, param = plan.layout.piece(index, rank), plan.params[index]
            rows = gradients[index] if cut else gradients[index].reshape(-1)
            want = rows.narrow(param.dim or 0, piece.start, piece.stop - piece.start)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            assert got.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()


def test_other_shapes_are_packed_into_memory_seen_before() -> None:
    """Faces may enumerate a gradient by another order of dims than the last time."""
    plan, *_ = _plans("even", 2, cut=False)
    for turn in range(2):
        gradients = _gradients("even", torch.float32, transposed=False)
        shown = [g if turn else g.reshape(-1) for g in gradients]
        packed = plan.borrow(torch.float32, CPU)
        plan.pack(shown, packed)
        want = _expected(plan, gradients)
        torch.testing.assert_close(packed.by_rank, want, rtol=0, atol=0)
        plan.give_back(packed)


def _bytes(packed: Packed) -> int:
    return packed.data.untyped_storage().nbytes()


def test_memory_is_lent_to_one_reduction_at_a_time_and_empty_in_between() -> None:
    plan, *_ = _plans("even", 2, cut=True)
    first = plan.borrow(torch.float32, CPU)
    second = plan.borrow(torch.float32, CPU)
    assert first.data.data_ptr() != second.data.data_ptr()
    plan.give_back(first)
    assert (_bytes(first), _bytes(second)) == (0, 4 * plan.layout.total_numel)
    again = plan.borrow(torch.float32, CPU)
    assert again is first
    assert _bytes(again) == 4 * plan.layout.total_numel
    other = plan.borrow(torch.float64, CPU)
    assert other.data.dtype is torch.float64


@pytest.mark.parametrize("name", ["uneven", "one"])
def test_a_rank_s_own_row_is_where_its_shard_is_packed(name: str) -> None:
    """Backends that reduce in place ask for the row of the rank itself; others do not notice."""
    for rank, plan in enumerate(_plans(name, 3, cut=True)):
        lent = plan.borrow(torch.float32, CPU)
        lent.by_rank.copy_(torch.arange(3).view(3, 1))
        assert lent.own.tolist() == [float(rank)] * plan.layout.shard_numel


def test_memory_of_somebody_else_is_left_alone() -> None:
    plan, *_ = _plans("even", 2, cut=True)
    theirs = plan.around(torch.zeros(plan.layout.total_numel))
    plan.give_back(theirs)
    assert _bytes(theirs)
    assert plan.borrow(torch.float32, CPU) is not theirs


@pytest.mark.parametrize("limit", ["none", "runs", "units"])
@pytest.mark.parametrize("name", ["even", "uneven", "gap", "inner_dim", "one"])
def test_whole_parameters_are_copied_out_of_the_gathered_shards(
    name: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit != "none":
        monkeypatch.setattr(collectives, "_MAX_RUNS" if limit == "runs" else "LIGHT", 1)
    world, params = 2, _params(SHAPES[name], cut=True)
    layout = side_by_side([param.extent for param in params], world, align=4)
    whole = Buffer(layout.total_numel, torch.float32, CPU)
    blocks = [(world * column.offset, column.width) for column in layout.columns]
    group: Any = SimpleNamespace()  # there is one, but nothing is sent
    plan = GatherPlan(layout, 0, group, whole, blocks=blocks, in_place=False)
    starts = layout.unsharded_offsets
    views = [
        whole.data[s : s + p.shape.numel()].view(p.shape)
        for p, s in zip(params, starts, strict=True)
    ]
    whole.free()
    gradients = _gradients(name, torch.float32, transposed=False)
    reduce_plan = ReducePlan(params, layout, 0)
    gathered, own, memory = plan._allocate(None)
    gathered.copy_(_expected(reduce_plan, gradients).view(-1))
    assert own.tolist() == gathered[: layout.shard_numel].tolist()
    gathering = Gathering(plan, gathered, None, sided=False, memory=memory)
    plan.finish(gathering)
    for view, want in zip(views, gradients, strict=True):
        torch.testing.assert_close(view, want, rtol=0, atol=0)
    gathering.release()
    assert gathered.untyped_storage().nbytes() == 0


def test_large_gradients_lie_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "LIGHT", 1)
    plan, *_ = _plans("even", 2, cut=True)
    assert not plan._even
    gradients = _gradients("even", torch.float32, transposed=False)
    packed = plan.borrow(torch.float32, CPU)
    plan.pack(list(gradients), packed)
    torch.testing.assert_close(packed.by_rank, _expected(plan, gradients), rtol=0, atol=0)


def test_the_cases_are_even_and_uneven() -> None:
    """There is another way for uneven cuts: the cases must be on both sides of that."""
    fast = {name: _plans(name, 2, cut=True)[0]._even for name in SHAPES}
    assert fast == {
        "even": True,
        "uneven": False,
        "gap": True,
        "inner_dim": True,
        "no_rows": True,
        "nothing_at_all": False,
        "one": True,
    }

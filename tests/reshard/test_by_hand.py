"""Small plans written out: runs and what they have in common, boxes, replicas, and defaults."""

from __future__ import annotations

import numpy as np
import pytest

from fsdp.engine.layout import Cut, Extent
from fsdp.reshard.boxes import Box, boxes_of
from fsdp.reshard.dealt import Dealt, Ranks, by_dim, common, flat, whole
from fsdp.reshard.moves import Moves
from fsdp.reshard.plan import Plan
from fsdp.reshard.runs import Runs, Stretches, whole_cut

ONE, TWO = Ranks([[0]]), Ranks([[0, 1]])


def columns(found: Stretches) -> list[tuple[int, ...]]:
    """(start, stop, shard, offset) of each run."""
    each = (found.start, found.stop, found.shard, found.offset)
    return list(zip(*(column.tolist() for column in each), strict=True))


def test_a_whole_tensor_is_one_window() -> None:
    assert whole_cut(5) == Cut(extent=Extent.flat(5), base=0, first=0, step=5)
    assert whole_cut(1).step == whole_cut(0).step == 1


def test_runs_of_a_middle_dim() -> None:
    runs = Runs(by_dim((2, 3, 2), TWO, 1).cut)
    assert columns(runs.at(runs.all())) == [
        *((0, 4, 0, 0), (4, 6, 1, 0)),
        *((6, 10, 0, 4), (10, 12, 1, 2)),
    ]
    assert runs.held(2).tolist() == [8, 4]
    assert runs.of_shard(1).tolist() == [1, 3]


def test_a_tensor_on_one_shard_is_one_run_whatever_dim_would_have_been_cut() -> None:
    runs = Runs(by_dim((2, 3), ONE, 1).cut)
    assert columns(runs.at(runs.all())) == [(0, 6, 0, 0)]


def test_the_one_shard_may_be_another_than_the_first() -> None:
    runs = Runs(Cut(extent=Extent(outer=2, dim=3, inner=1), base=0, first=-5, step=4))
    assert columns(runs.at(runs.all())) == [(0, 6, 1, 0)]
    assert runs.held(3).tolist() == [0, 6, 0]


def test_runs_end_with_the_last_shard_that_holds_any() -> None:
    second = Runs(flat({"a": (3,), "b": (4,)}, Ranks([[0, 1, 2, 3]]))["b"].cut)
    assert columns(second.at(second.all())) == [(0, 1, 1, 0), (1, 3, 2, 0), (3, 4, 3, 0)]
    assert second.held(4).tolist() == [0, 1, 2, 1]


def test_a_tensor_without_elements_has_no_runs() -> None:
    runs = Runs(by_dim((0, 3), TWO).cut)
    assert runs.count == 0
    assert runs.all().tolist() == runs.of_shard(0).tolist() == []


def test_what_two_sides_have_in_common_has_both_ends() -> None:
    found = common(flat({"t": (5,)}, ONE)["t"], flat({"t": (5,)}, TWO)["t"], np.array([0]))
    assert columns(found.mine) == [(0, 3, 0, 0), (3, 5, 0, 3)]
    assert columns(found.theirs) == [(0, 3, 0, 0), (3, 5, 1, 0)]


def test_other_orders_move_what_is_consecutive_in_both() -> None:
    source = {"t": Dealt(shape=(2, 2, 3), cut=whole_cut(12), ranks=ONE, order=(1, 0, 2))}
    target = {"t": whole((2, 2, 3), ONE)}
    moves = Plan(source, target).receives(0)
    assert moves.numel.tolist() == [3, 3, 3, 3]
    assert moves.source_offset.tolist() == [0, 6, 3, 9]


def test_tensors_lie_end_to_end_without_a_gap() -> None:
    assert flat({"a": (3,), "b": (2,)}, TWO)["b"].cut.first == -3


def test_the_first_dim_is_cut() -> None:
    assert by_dim((4, 6), TWO).cut.extent == Extent(outer=1, dim=4, inner=6)


def test_replicas_serve_in_turn() -> None:
    ranks = Ranks.whole([10, 11, 12])
    assert [ranks.nearest(rank, 1).tolist() for rank in range(4)] == [[10], [11], [12], [10]]


def test_every_rank_is_a_host_unless_it_is_told_otherwise() -> None:
    source, target = {"t": whole((2,), Ranks.whole([9, 3]))}, {"t": whole((2,), Ranks.whole([2]))}
    assert Plan(source, target).receives(2).source_rank.tolist() == [9]
    assert Plan(source, target, host_size=2).receives(2).source_rank.tolist() == [3]


def test_the_world_ends_with_the_highest_rank() -> None:
    source, target = {"t": whole((1,), Ranks.whole([0, 4]))}, {"t": whole((1,), ONE)}
    assert Plan(source, target).world == Plan(target, source).world == 5
    assert Plan({}, {}).world == 0
    assert len(Moves.together(list(Plan({}, {}).all_moves()))) == 0


def test_a_tensor_that_only_the_target_has_is_refused() -> None:
    with pytest.raises(ValueError, match="'z' is in the target and not in the source"):
        Plan({"a": whole((1,), ONE)}, {"a": whole((1,), ONE), "z": whole((1,), ONE)})


def test_a_tensor_without_elements_is_one_empty_box_of_the_first_shard() -> None:
    empty = Box(offsets=(0, 0), sizes=(0, 3), start=0)
    for dealt in (by_dim((0, 3), TWO), flat({"t": (0, 3)}, TWO)["t"]):
        assert boxes_of(dealt, 0) == [empty]
        assert boxes_of(dealt, 1) == boxes_of(dealt, None) == []


def test_a_tensor_of_one_element_may_lie_on_another_shard() -> None:
    one = flat({"a": (2,), "t": (1, 1)}, TWO)["t"]
    assert boxes_of(one, 0) == []
    assert boxes_of(flat({"a": (3,), "t": (1, 1)}, TWO)["t"], 1) == [
        Box(offsets=(0, 0), sizes=(1, 1), start=0)
    ]

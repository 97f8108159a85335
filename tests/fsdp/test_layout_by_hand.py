"""Small layouts written out: gaps, empty parameters, and what is left to the defaults."""

from __future__ import annotations

import pytest

from fsdp.engine.layout import Column, Extent, Fragment, end_to_end, side_by_side


def flat(*numels: int) -> list[Extent]:
    return [Extent.flat(numel) for numel in numels]


def test_a_negative_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="dim -1 does not exist"):
        Extent.of((3, 4), -1)


def test_bytes_widen_the_innermost_dim() -> None:
    assert Extent.of((2, 3, 5), 1).in_bytes(4) == Extent(outer=2, dim=3, inner=20)


def test_pieces_lie_side_by_side_without_a_gap() -> None:
    layout = side_by_side([Extent.of((3, 2), 0), Extent.of((2,), 0)], 2)
    assert layout.shard_numel == 5
    assert layout.columns == (
        Column(param=0, offset=0, width=4),
        Column(param=1, offset=4, width=1),
    )
    assert layout.packing_order == ((0, 8), (1, 2))
    assert layout.unsharded_offsets == (0, 8)


def test_gaps_are_columns_and_fragments_of_no_parameter() -> None:
    layout = side_by_side([Extent.of((3,), 0), Extent.of((2,), 0)], 2, align=4)
    assert layout.columns == (
        *(Column(param=0, offset=0, width=2), Column(param=None, offset=2, width=2)),
        *(Column(param=1, offset=4, width=1), Column(param=None, offset=5, width=3)),
    )
    assert layout.fragments(1) == (
        Fragment(param=0, start=2, stop=3, offset=0, numel=1),
        Fragment(param=None, start=0, stop=0, offset=1, numel=3),
        Fragment(param=1, start=1, stop=2, offset=4, numel=1),
        Fragment(param=None, start=0, stop=0, offset=5, numel=3),
    )


def test_parameters_that_fill_the_whole_leave_no_gap() -> None:
    layout = end_to_end(flat(3, 3), 2)
    assert layout.packing_order == ((0, 3), (1, 3))
    assert layout.unsharded_offsets == (0, 3)


def test_gaps_between_parameters_are_packed() -> None:
    layout = end_to_end(flat(3, 2), 2, align=4)
    assert layout.packing_order == ((0, 3), (None, 1), (1, 2))
    assert end_to_end(flat(3, 2), 4, align=4).packing_order[-1] == (None, 2)


def test_empty_parameters_take_no_place_and_have_no_runs() -> None:
    layout = end_to_end(flat(2, 0, 1), 3)
    assert layout.gathered_offset(1) == 0
    assert list(layout.runs(1)) == list(end_to_end(flat(2, 0, 1), 1).runs(1)) == []
    assert end_to_end(flat(0, 0), 2).packing_order == ((0, 0), (1, 0), (None, 2))
    wide = side_by_side([Extent.of((2, 0), 0)], 2)
    assert wide.one_run(0)
    assert list(wide.runs(0)) == []


def test_without_elements_there_is_a_gap_still() -> None:
    layout = side_by_side([Extent.of((0, 3), 0)], 2)
    assert (layout.cuts[0].slot, layout.cuts[0].rows(1)) == (0, (0, 0))
    assert layout.packing_order == ((0, 0), (None, 2))
    assert side_by_side(flat(0), 2, align=4).shard_numel == 4
    assert side_by_side([], 2, align=4).shard_numel == 0
    assert end_to_end(flat(0), 2).shard_numel == 1
    assert end_to_end([], 2).shard_numel == 1


def test_runs_name_the_ranks_that_hold_rows_and_no_other() -> None:
    rows = side_by_side([Extent.of((2, 3, 2), 1)], 2)
    assert list(rows.runs(0)) == [(0, 4, 0, 0), (4, 6, 1, 0), (6, 10, 0, 4), (10, 12, 1, 2)]
    second = end_to_end(flat(3, 2), 2)
    assert list(second.runs(1)) == [(0, 2, 1, 0)]

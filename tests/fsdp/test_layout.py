"""Laws of layouts, as integers: no processes, no model."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp.engine.layout import Extent, Layout, end_to_end, side_by_side
from tests.draws import draws

LAW = settings(max_examples=draws(100, integers=True), deadline=None)
SHAPES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=5)
WORLDS = st.integers(1, 6)
ALIGNS = st.sampled_from([1, 2, 4, 8])


def flat(numels):
    return [Extent.flat(numel) for numel in numels]


@st.composite
def layouts(draw, shapes=None):
    """Draw (shapes, layout) from both builders; dim 0 may be uneven, other dims too."""
    shapes = draw(SHAPES) if shapes is None else shapes
    world, align = draw(WORLDS), draw(ALIGNS)
    if draw(st.booleans()):
        return shapes, end_to_end(flat(math.prod(s) for s in shapes), world, align=align)
    dims = [draw(st.integers(0, len(s) - 1)) for s in shapes]
    extents = [Extent.of(s, d) for s, d in zip(shapes, dims, strict=True)]
    return shapes, side_by_side(extents, world, align=align)


def values(shapes):
    """Give every element of every parameter a number of its own, from 1."""
    counter, found = 1, []
    for shape in shapes:
        numel = math.prod(shape)
        found.append(torch.arange(counter, counter + numel).view(shape))
        counter += numel
    return found


def shards_of(layout: Layout, params):
    """Pack by the fragments alone; 0 marks a unit of no parameter."""
    packed = torch.zeros(layout.world, layout.shard_numel, dtype=torch.long)
    for rank in range(layout.world):
        for piece in layout.fragments(rank):
            if piece.param is None:
                continue
            extent = layout.cuts[piece.param].extent
            whole = params[piece.param].reshape(extent.outer, extent.dim, extent.inner)
            rows = whole[:, piece.start : piece.stop].reshape(-1)
            packed[rank, piece.offset : piece.offset + piece.numel] = rows
    return packed


@pytest.mark.property
@LAW
@given(layouts())
def test_every_element_lies_in_exactly_one_place(drawn):
    shapes, layout = drawn
    packed = shards_of(layout, values(shapes)).flatten()
    total = sum(math.prod(s) for s in shapes)
    assert packed[packed > 0].sort().values.tolist() == list(range(1, total + 1))


@pytest.mark.property
@LAW
@given(layouts())
def test_fragments_cover_every_shard_without_overlap_and_shards_are_equal(drawn):
    _, layout = drawn
    for rank in range(layout.world):
        end = 0
        for piece in layout.fragments(rank):
            assert piece.offset == end
            assert piece.numel > 0
            end += piece.numel
        assert end == layout.shard_numel


@pytest.mark.property
@LAW
@given(layouts())
def test_locate_agrees_with_packing(drawn):
    shapes, layout = drawn
    params = values(shapes)
    packed = shards_of(layout, params)
    for index, param in enumerate(params):
        for unit, value in enumerate(param.flatten().tolist()):
            rank, offset = layout.locate(index, unit)
            assert packed[rank, offset] == value


@pytest.mark.property
@LAW
@given(layouts())
def test_runs_give_the_parameter_back(drawn):
    shapes, layout = drawn
    params = values(shapes)
    packed = shards_of(layout, params)
    for index, param in enumerate(params):
        found = torch.zeros(param.numel(), dtype=torch.long)
        for start, stop, rank, offset in layout.runs(index):
            found[start:stop] = packed[rank, offset : offset + stop - start]
        assert found.tolist() == param.flatten().tolist()


@pytest.mark.property
@LAW
@given(layouts())
def test_one_run_means_a_view_of_the_gathered_shards(drawn):
    shapes, layout = drawn
    params = values(shapes)
    gathered = shards_of(layout, params).flatten()
    for index, param in enumerate(params):
        if not layout.one_run(index):
            continue
        start = layout.gathered_offset(index)
        assert gathered[start : start + param.numel()].tolist() == param.flatten().tolist()


@pytest.mark.property
@LAW
@given(SHAPES, WORLDS, ALIGNS)
def test_not_one_run_means_that_no_view_exists(shapes, world, align):
    layout = side_by_side([Extent.of(s, 0) for s in shapes], world, align=align)
    params = values(shapes)
    gathered = shards_of(layout, params).flatten().tolist()
    for index, param in enumerate(params):
        if not layout.one_run(index):
            wanted = param.flatten().tolist()
            starts = [i for i, value in enumerate(gathered) if value == wanted[0]]
            assert all(gathered[i : i + len(wanted)] != wanted for i in starts)


@pytest.mark.property
@LAW
@given(SHAPES, WORLDS, ALIGNS, st.data())
def test_columns_cut_the_gathered_shards_into_whole_parameters(shapes, world, align, data):
    dims = [data.draw(st.integers(0, len(s) - 1)) for s in shapes]
    extents = [Extent.of(s, d) for s, d in zip(shapes, dims, strict=True)]
    layout = side_by_side(extents, world, align=align)
    params = values(shapes)
    gathered = shards_of(layout, params)
    assert sum(column.width for column in layout.columns) == layout.shard_numel
    end = 0
    for column in layout.columns:
        assert column.offset == end
        end += column.width
        if column.param is None or extents[column.param].outer != 1:
            continue
        block = gathered[:, column.offset : column.offset + column.width].reshape(-1)
        numel = params[column.param].numel()
        assert block[:numel].tolist() == params[column.param].flatten().tolist()


@pytest.mark.property
@LAW
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), WORLDS, st.data())
def test_side_by_side_pieces_are_the_chunks_of_torch(shape, world, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    param = torch.arange(math.prod(shape)).view(shape)
    layout = side_by_side([Extent.of(shape, dim)], world)
    chunks = list(torch.chunk(param, world, dim=dim))
    for rank in range(world):
        piece = layout.piece(0, rank)
        got = param.narrow(dim, piece.start, piece.stop - piece.start)
        wanted = chunks[rank] if rank < len(chunks) else param.narrow(dim, 0, 0)
        assert got.flatten().tolist() == wanted.flatten().tolist()


@pytest.mark.property
@LAW
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), WORLDS)
def test_end_to_end_shards_are_the_chunks_of_the_concatenation(numels, world):
    whole = torch.arange(1, sum(numels) + 1)
    layout = end_to_end(flat(numels), world)
    packed = shards_of(layout, list(whole.split(numels)))
    assert layout.shard_numel == math.ceil(len(whole) / world)
    assert packed.flatten()[: len(whole)].tolist() == whole.tolist()
    assert packed.flatten()[len(whole) :].count_nonzero() == 0


@pytest.mark.parametrize(
    ("numels", "align", "total"),
    [((21, 35, 25), 4, 85), ((10, 25, 15), 8, 63)],
    ids=["float32", "float16"],
)
def test_alignment_gaps_are_those_of_the_specification(numels, align, total):
    layout = end_to_end(flat(numels), 1, align=align)
    assert layout.total_numel == total
    assert all(layout.gathered_offset(i) % align == 0 for i in range(len(numels)))


@pytest.mark.property
@LAW
@given(layouts())
def test_every_unit_has_a_place_in_the_unsharded_buffer(drawn):
    shapes, layout = drawn
    spans = sorted(
        (start, start + math.prod(shape))
        for start, shape in zip(layout.unsharded_offsets, shapes, strict=True)
        if math.prod(shape)
    )
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    assert all(stop <= layout.total_numel for _, stop in spans)


@pytest.mark.property
@LAW
@given(SHAPES, WORLDS, ALIGNS)
def test_aligned_windows_start_at_multiples_and_keep_ranks_aligned(shapes, world, align):
    layout = side_by_side([Extent.of(s, 0) for s in shapes], world, align=align)
    assert all(cut.base % align == 0 for cut in layout.cuts)
    assert layout.shard_numel % align == 0


def test_a_layout_of_overlapping_windows_has_no_columns():
    with pytest.raises(ValueError, match="overlap"):
        _ = end_to_end(flat([3, 3]), 2).columns
    # Windows that begin together overlap although no parameter is cut before its start.
    assert not end_to_end(flat([0, 4]), 2).has_columns


def test_a_dim_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="dim 2 does not exist"):
        Extent.of((3, 4), 2)


@pytest.mark.property
@LAW
@given(layouts())
def test_the_packing_order_covers_all_shards(drawn):
    shapes, layout = drawn
    assert sum(units for _, units in layout.packing_order) == layout.total_numel
    params = sorted(param for param, _ in layout.packing_order if param is not None)
    assert params == list(range(len(shapes)))


@pytest.mark.property
@LAW
@given(SHAPES, WORLDS, ALIGNS)
def test_side_by_side_has_columns(shapes, world, align):
    assert side_by_side([Extent.of(s, 0) for s in shapes], world, align=align).has_columns

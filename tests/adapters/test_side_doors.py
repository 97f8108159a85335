"""Pieces are put together by position, and nothing that does not fit passes. No ranks."""

from __future__ import annotations

import pytest
import torch

from conformance.adapters.side_doors import Piece, joined, merged, shaped


def piece(first: int, count: int) -> Piece:
    return Piece(first, torch.arange(first, first + count, dtype=torch.float32))


def test_pieces_are_joined_by_position_whatever_their_order() -> None:
    parts = [piece(4, 3), piece(0, 4), piece(0, 0), piece(7, 0)]
    assert torch.equal(joined(parts, 7, "w"), torch.arange(7.0))


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([piece(0, 3), piece(4, 3)], "starts at element 4, wanted 3"),
        ([piece(0, 4), piece(3, 4)], "starts at element 3, wanted 4"),
        ([piece(0, 4)], "hold 4 elements of 7"),
        ([piece(0, 8)], "hold 8 elements of 7"),
        ([], "hold 0 elements of 7"),
    ],
    ids=["gap", "overlap", "short", "long", "nothing"],
)
def test_pieces_that_do_not_make_up_the_tensor_are_refused(parts: list[Piece], fault: str) -> None:
    with pytest.raises(RuntimeError, match=f"^w: .*{fault}"):
        joined(parts, 7, "w")


def test_storage_order_is_turned_into_index_order() -> None:
    image = torch.arange(24.0).reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    flat = image.as_strided((24,), (1,))
    restored = shaped(flat, image.shape, image.stride())
    assert torch.equal(restored, image)
    assert restored.is_contiguous()
    assert torch.equal(shaped(torch.arange(6.0), (2, 3), None), torch.arange(6.0).reshape(2, 3))


def test_the_lowest_rank_has_the_word_where_ranks_clash() -> None:
    assert merged([{"a": 1}, {"a": 2, "b": 3}]) == {"a": 1, "b": 3}

"""Rows that ranks hold in wrong places, as laws of small tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.causes import Cause
from conformance.checks.rows import by_parts, misplaced_rows

ROWS, SHARDS = st.integers(0, 9), st.integers(1, 5)


@given(ROWS, SHARDS)
def test_what_is_misplaced_keeps_its_shape_and_is_not_the_truth(rows: int, shards: int) -> None:
    whole = torch.arange(rows * 2.0).view(rows, 2)
    for _, wrong in misplaced_rows(whole, shards):
        assert wrong.shape == whole.shape
        assert not torch.equal(wrong, whole)
        assert {tuple(row) for row in wrong.tolist()} <= {tuple(row) for row in whole.tolist()}


def test_what_is_not_cut_has_no_misplaced_rows() -> None:
    assert misplaced_rows(torch.arange(8.0), 1) == []
    assert misplaced_rows(torch.tensor(3.0), 2) == []
    assert misplaced_rows(torch.arange(1.0), 2) == []


def test_short_last_shards_are_shifted_and_not_dealt() -> None:
    found = misplaced_rows(torch.arange(3.0), 2)  # two rows and one
    assert [(cause, wrong.tolist()) for cause, wrong in found] == [
        (Cause.OFF_BY_ONE_SHARD, [1.0, 0.0, 2.0]),
        (Cause.OFF_BY_ONE_SHARD, [1.0, 0.0, 2.0]),
    ]


def test_shards_of_one_row_are_no_other_ranks() -> None:
    assert misplaced_rows(torch.arange(2.0), 2) == []


@given(ROWS, SHARDS)
def test_equal_factors_scale_the_whole(rows: int, shards: int) -> None:
    whole = torch.arange(rows * 2.0).view(rows, 2)
    assert torch.equal(by_parts(whole, [3.0] * shards), 3 * whole)


def test_each_rank_has_its_factor() -> None:
    assert by_parts(torch.ones(3), [2.0, 5.0]).tolist() == [2.0, 2.0, 5.0]

"""Known defects are recognised on any tensor, and nothing is invented."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conformance.causes import Cause
from conformance.explain import explain, wrong_rows

BOUND = 1e-5


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random normal tensors of at least 3 rows and 2 columns: no accidental pattern."""
    seed = draw(st.integers(0, 10_000))
    rows, columns = draw(st.integers(3, 8)), draw(st.integers(2, 5))
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(tensors(), st.sampled_from([2, 3, 4, 8]))
def test_suspects_come_before_patterns(expected: Tensor, world: int) -> None:
    suspects = [
        (Cause.SUMMED_NOT_AVERAGED, expected * world),
        (Cause.DIVIDED_TWICE, expected / world),
        (Cause.STALE, expected + 1),
    ]
    for cause, got in suspects:
        assert explain(got, expected, BOUND, suspects) is cause
    assert explain(expected * world, expected, BOUND) is Cause.SCALED


@given(tensors())
def test_patterns_need_no_suspects(expected: Tensor) -> None:
    assert explain(torch.zeros_like(expected), expected, BOUND) is Cause.ZERO
    assert explain(-expected, expected, BOUND) is Cause.SIGN
    assert explain(expected.roll(1, 0), expected, BOUND) is Cause.OFF_BY_ONE_SHARD
    assert explain(expected.bfloat16().float(), expected, 1e-7) is Cause.DTYPE_ROUND_TRIP
    flipped = expected.flatten().flip(0).view_as(expected)
    assert explain(flipped, expected, BOUND) is Cause.PERMUTED
    assert explain(expected * torch.nan, expected, BOUND) is Cause.NON_FINITE


@given(tensors(), tensors())
def test_noise_is_not_explained(expected: Tensor, noise: Tensor) -> None:
    other = noise.flatten()[:1].item() + torch.arange(expected.numel()).view_as(expected) ** 2
    assert explain(expected + 1 + other, expected, BOUND) is Cause.UNEXPLAINED


@given(tensors())
def test_a_suspect_that_is_the_truth_explains_nothing(expected: Tensor) -> None:
    got = expected.clone()
    got[0, 0] += 10
    assert explain(got, expected, 20.0, [(Cause.STALE, expected.clone())]) is not Cause.STALE


@given(tensors(), st.data())
def test_rows_that_alone_are_wrong_are_found(expected: Tensor, data: st.DataObject) -> None:
    rows = len(expected)
    first = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(first + 1, rows if first else rows - 1))
    got = expected.clone()
    got[first:end, -1] += 3  # one element of a row is enough
    assert wrong_rows(got, expected, BOUND) == range(first, end)
    last = end == rows and 2 * (end - first) < rows
    assert (explain(got, expected, BOUND) is Cause.LAST_ROWS) is last


@given(tensors())
def test_last_rows_are_named_whether_zero_or_not(expected: Tensor) -> None:
    for value in (0.0, 7.0):
        got = expected.clone()
        got[-1] = value
        assert explain(got, expected, BOUND) is Cause.LAST_ROWS


def test_of_rows_nothing_is_said_where_it_tells_nothing() -> None:
    whole = torch.arange(1.0, 6.0)
    assert wrong_rows(whole, whole, BOUND) is None
    assert wrong_rows(whole + 1, whole, BOUND) is None  # all of them
    assert wrong_rows(torch.tensor(1.0), torch.tensor(2.0), BOUND) is None  # no rows
    assert wrong_rows(torch.ones(0, 2), torch.ones(0, 2), BOUND) is None
    apart = whole + torch.tensor([1.0, 0, 0, 0, 1])
    assert wrong_rows(apart, whole, BOUND) is None
    alone = torch.tensor([0.0, 0, 0, 5])  # the others are right because there are none
    assert wrong_rows(alone / 2, alone, BOUND) is None


def test_an_infinite_row_is_right_where_it_is_due() -> None:
    whole = torch.tensor([1.0, torch.inf, 3.0, 4.0, 5.0])
    got = torch.tensor([1.0, torch.inf, 3.0, 4.0, torch.nan])
    assert wrong_rows(got, whole, BOUND) == range(4, 5)

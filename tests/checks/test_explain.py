"""Known defects are recognised on any tensor, and nothing is invented."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conformance.causes import Cause
from conformance.explain import explain

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

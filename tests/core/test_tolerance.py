"""Bounds come from the oracle's noise, and causes from what defects would have produced."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.causes import Cause
from conformance.explain import explain
from conformance.history import History, Observation, RankHistory
from conformance.tolerance import FACTOR, ULPS, Oracle, distance


def one(value: torch.Tensor) -> History:
    seen = Observation(what="loss", where={"step": 0}, value=value, moment=(0, 0))
    return History(ranks=(RankHistory(rank=0, observations=(seen,)),), virtual=True)


def oracle(reference: float, double: float, other_order: float) -> Oracle:
    return Oracle(
        reference=one(torch.tensor(reference)),
        double=one(torch.tensor(double, dtype=torch.float64)),
        reversed=one(torch.tensor(other_order)),
    )


def test_the_bound_is_the_noise_times_a_fixed_factor() -> None:
    noisy = oracle(1.0, 1.0 + 2**-10, 1.0 - 2**-8)
    floor = ULPS * torch.finfo(torch.float32).eps
    assert noisy.bound(0, "loss", {"step": 0}) == pytest.approx(FACTOR * 2**-8 + floor, rel=1e-6)


def test_without_noise_the_bound_is_a_few_units_in_the_last_place() -> None:
    bound = oracle(3.0, 3.0, 3.0).bound(0, "loss", {"step": 0})
    assert bound == pytest.approx(ULPS * torch.finfo(torch.float32).eps * 3.0, rel=1e-6)


def of_ranks(*steps: list[float]) -> History:
    """Per rank, what it observed at step 0, 1, …; a rank without values shares rank 0's."""
    return History(
        ranks=tuple(
            RankHistory(
                rank=rank,
                observations=tuple(
                    Observation(
                        what="loss", where={"step": i}, value=torch.tensor(value), moment=(0, i)
                    )
                    for i, value in enumerate(values)
                ),
            )
            for rank, values in enumerate(steps)
        ),
        virtual=True,
    )


def test_every_value_has_a_bound_of_its_own_and_ranks_share_that_of_a_shared_one() -> None:
    still, moved = [1.0, 4.0], [3.0]
    noisy = Oracle(
        reference=of_ranks(still, moved),
        double=of_ranks(still, [3.5]),
        reversed=of_ranks([1.0, 6.0], moved),
    )
    bounds = [[noisy.bound(rank, "loss", {"step": step}) for step in (0, 1)] for rank in (0, 1)]
    tiny = 1e-4
    assert bounds[0] == pytest.approx([0.0, FACTOR * 2.0], abs=tiny)
    assert bounds[1] == pytest.approx([FACTOR * 0.5, FACTOR * 2.0], abs=tiny)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.nan], [math.nan], 0.0),
        ([math.nan], [1.0], math.inf),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 3.0], 2.0),
        ([math.inf, math.nan, 1.0], [math.inf, 0.0, 3.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_distance_is_the_largest_difference(
    left: list[float], right: list[float], expected: float
) -> None:
    assert distance(torch.tensor(left), torch.tensor(right)) == expected


SEEDS = st.integers(0, 2**31)


@given(SEEDS, st.sampled_from([0.0, -1.0, 3.0]))
def test_multiples_are_named(seed: int, factor: float) -> None:
    expected = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    cause = {0.0: Cause.ZERO, -1.0: Cause.SIGN, 3.0: Cause.SCALED}[factor]
    assert explain(expected * factor, expected, 1e-6) == cause


@given(SEEDS)
def test_shifted_permuted_and_rounded_values_are_named(seed: int) -> None:
    expected = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))
    assert explain(expected.roll(1, 0), expected, 1e-6) == Cause.OFF_BY_ONE_SHARD
    assert explain(expected.flip(0), expected, 1e-6) == Cause.PERMUTED
    assert explain(expected.bfloat16().float(), expected, 1e-6) == Cause.DTYPE_ROUND_TRIP
    assert explain(expected.half().float(), expected, 1e-6) == Cause.DTYPE_ROUND_TRIP


def test_a_suspect_is_named_before_a_pattern() -> None:
    expected = torch.tensor([1.0, 2.0])
    suspects = [(Cause.STALE, torch.tensor([0.0, 0.0]))]
    assert explain(torch.zeros(2), expected, 1e-6, suspects) == Cause.STALE


def test_noise_without_a_pattern_stays_unexplained() -> None:
    expected = torch.tensor([1.0, 2.0, -3.0])
    got = expected + torch.tensor([0.5, -0.1, 0.3])
    assert explain(got, expected, 1e-6) == Cause.UNEXPLAINED


def test_a_nan_is_named() -> None:
    assert explain(torch.tensor([math.nan]), torch.tensor([1.0]), 1e-6) == Cause.NON_FINITE

"""Bounds come from the oracle's noise, and causes from what defects would have produced."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.adapter import Conventions
from conformance.causes import Cause
from conformance.execute import (
    ORACLE_RUNS,
    OracleRequest,
    VirtualWriter,
    oracle_runs,
    run_truth,
    virtual_batches,
)
from conformance.explain import explain
from conformance.history import History, Observation, RankHistory, as_tensor
from conformance.oracle import VirtualRanks
from conformance.scenarios.carriers import Held
from conformance.tolerance import FACTOR, FEW, ULPS, Oracle, distance


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


def test_of_a_model_in_float64_noise_is_seen_in_float32_and_counts_as_much_less() -> None:
    reference = one(torch.tensor(1.0, dtype=torch.float64))
    single = one(torch.tensor(1.0 - 2**-10))
    noisy = Oracle(reference=reference, single=single, reversed=reference)
    floor = ULPS * 2**-52
    assert noisy.bound(0, "loss", {"step": 0}) == pytest.approx(
        FACTOR * 2**-10 * 2**-29 + floor, rel=1e-6
    )


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


def gradients(*steps: list[float] | None) -> History:
    """Gradients of ``w`` at step 0, 1, …, none where it was not used."""
    made = tuple(
        Observation(
            what="gradients",
            where={"step": step},
            value={"w": None if value is None else torch.tensor(value)},
            moment=(0, step),
        )
        for step, value in enumerate(steps)
    )
    return History(ranks=(RankHistory(rank=0, observations=made),), virtual=True)


@pytest.mark.parametrize(("elements", "expected"), [(1, 0.5), (FEW, 0.5), (FEW + 1, 0.0)])
@pytest.mark.parametrize("low", [False, True])
def test_of_few_elements_the_noise_is_that_of_the_noisiest_step(
    elements: int, expected: float, *, low: bool
) -> None:
    made = gradients([0.0] * elements, None, [0.0] * elements)
    other = gradients([0.5] * elements, None, [0.0] * elements)
    oracle = Oracle(reference=made, double=other, reversed=made, nudged=made if low else None)
    first, last = (oracle.bound(0, "gradients", {"step": step}, "w") for step in (0, 2))
    assert first == FACTOR * 0.5
    assert last == (0.0 if low else FACTOR * expected)


def test_of_few_elements_the_noise_is_not_that_of_another_place() -> None:
    def seen(*values: float) -> History:
        made = tuple(
            Observation(
                what="parameters", where=at, value={"w": torch.tensor([value])}, moment=(0, place)
            )
            for place, (at, value) in enumerate(zip(places, values, strict=True))
        )
        return History(ranks=(RankHistory(rank=0, observations=made),), virtual=True)

    places = [{"index": 0}, {"index": 1}, {"step": 0, "micro": 0}, {"step": 1, "micro": 1}]
    made = seen(0.0, 0.0, 0.0, 0.0)
    oracle = Oracle(reference=made, double=seen(0.5, 0.0, 0.25, 0.0), reversed=made)
    bounds = [oracle.bound(0, "parameters", dict(at), "w") / FACTOR for at in places]
    assert bounds == [0.5, 0.0, 0.25, 0.0]


def test_of_few_elements_the_noise_is_not_that_of_another_tensor() -> None:
    def seen(*values: float) -> History:
        trees = ({"a": torch.tensor([a]), "b": torch.tensor([0.0])} for a in values)
        made = tuple(
            Observation(what=what, where={"step": 0}, value=tree, moment=(0, place))
            for place, (what, tree) in enumerate(zip(("gradients", "clipped"), trees, strict=True))
        )
        return History(ranks=(RankHistory(rank=0, observations=made),), virtual=True)

    made = seen(0.0, 0.0)
    oracle = Oracle(reference=made, double=seen(0.5, 0.25), reversed=made)
    bounds = [
        oracle.bound(0, what, {"step": 0}, key) / FACTOR
        for what in ("gradients", "clipped")
        for key in ("a", "b")
    ]
    assert bounds == [0.5, 0.0, 0.25, 0.0]


GROUP = {"betas": [0.9, 0.99], "momentum": 0.5}


def averaged(
    state: str, *steps: tuple[float, float], what: str = "gradients", noise: float = 0.0
) -> Oracle:
    """Per step (gradient, state), each of one element; `noise` is in the gradients alone."""

    def history(off: float) -> History:
        seen: list[tuple[str, int, object]] = []
        for step, (gradient, value) in enumerate(steps):
            if what == "clipped":
                seen.append(("gradients", step, {"w": torch.tensor([1e3])}))
            seen.append((what, step, {"w": torch.tensor([gradient + off])}))
            seen.append(("optimizer_state", step, {f"w/{state}": torch.tensor([value])}))
            seen.append(("hyperparameters", step, [GROUP]))
        made = tuple(
            Observation(what=name, where={"step": step}, value=value, moment=(0, index))
            for index, (name, step, value) in enumerate(seen)
        )
        return History(ranks=(RankHistory(rank=0, observations=made),), virtual=True)

    return Oracle(reference=history(0.0), double=history(noise), reversed=history(0.0))


ULP = ULPS * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("what", ["gradients", "clipped"])
@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("exp_avg", 0.9 * 0.1 * 8 + 0.1 * 4),
        ("exp_avg_sq", 0.99 * 0.01 * 2 * 8 * 8 + 0.01 * 2 * 4 * 4),
        ("momentum_buffer", 0.5 * 8 + 4),
        ("sum", 1e-9),  # no known average: as far off as its own size says
    ],
)
def test_a_small_average_may_be_as_far_off_as_its_large_parts(
    what: str, state: str, expected: float
) -> None:
    told = averaged(state, (8.0, 1e-9), (4.0, 1e-9), what=what)
    bound = told.bound(0, "optimizer_state", {"step": 1}, f"w/{state}")
    assert bound == pytest.approx(ULP * expected, rel=1e-5)


def test_a_state_as_large_as_its_parts_keeps_its_own_bound() -> None:
    told = averaged("exp_avg", (1e-9, 3.0), (1e-9, 2.0))
    bound = told.bound(0, "optimizer_state", {"step": 1}, "w/exp_avg")
    assert bound == pytest.approx(ULP * max(2.0, 0.9 * 3.0), rel=1e-5)


def test_what_is_within_the_bounds_of_its_parts_is_within_that_of_the_state() -> None:
    """A gain of one element after two clipped steps of a drawn case: 2.9e-10 off, 2.1e-10 allowed.

    The runs of the oracle happened to agree in the state and did not in the gradient.
    """
    steps = ((-2.14944e-4, -2.14944e-5), (-1.222913e-3, -1.416362e-4))
    told = averaged("exp_avg", *steps, what="clipped", noise=4e-10)
    bound = told.bound(0, "optimizer_state", {"step": 1}, "w/exp_avg")
    assert ULP * 1.416362e-4 < 2.9e-10 < bound
    parts = [told.bound(0, "clipped", {"step": step}, "w") for step in (0, 1)]
    assert bound == pytest.approx(0.9 * 0.1 * parts[0] + 0.1 * parts[1], rel=1e-5)


LOW_CASE = "mlp/train/accumulation=3,optimizer=adamw"


def low_run(directory: Path, dtype: str, name: str, *, seed: int | None = None) -> History:
    """One of the oracle's runs with two ranks; with `seed`, one that rounds in other places."""
    conventions = Conventions(
        computes_as=dtype,
        gathered_as=dtype,
        accumulates_as=dtype,
        casts_inputs="units",
        returns_as="parameter",
    )
    request = OracleRequest(
        world=2,
        conventions=conventions,
        capabilities=(),
        case=LOW_CASE,
        seed=0,
        directory=str(directory),
    )
    flavour, cpu = ORACLE_RUNS[name], torch.device("cpu")
    truth = VirtualRanks(
        2, conventions, frozenset(), seed=0, reverse=flavour.reverse, nudge=flavour.nudge
    )
    if seed is not None:
        truth._nudge = torch.Generator().manual_seed(seed)
    folder = directory / f"{name}{seed}"
    with VirtualWriter(folder, 2) as writer:
        batch = virtual_batches(request, cpu, flavour.dtype)
        run_truth(request, name, cpu, truth, writer, batch, Held(world=2, states=None))
    return History.read(folder, 2)


def ratios(oracle: Oracle, other: History, what: str = "loss") -> list[float]:
    """Error over bound of every loss that `other` has as `what`."""
    return [
        distance(as_tensor(other.get(rank, what, **seen.where)), as_tensor(seen.value))
        / oracle.bound(rank, "loss", seen.where)
        for rank in range(2)
        for seen in oracle.reference.every("loss", rank)
        if other.find(rank, what, seen.where) is not None
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_losses_of_other_roundings_are_within_their_bounds_and_those_of_defects_are_not(
    dtype: str, tmp_path: Path
) -> None:
    """Measured: at most 0.34 of the bound; old weights 57 times the bound, float32 8 times.

    With a bound from each loss alone the correct ones come to 1.4 and 5.5 times theirs.
    """
    runs = oracle_runs(Conventions(computes_as=dtype), 3)
    oracle = Oracle(**{name: low_run(tmp_path, dtype, name) for name in runs})
    for seed in range(11, 17):
        found = ratios(oracle, low_run(tmp_path, dtype, "nudged", seed=seed))
        assert 0.0 < max(found) < 0.5
    for defect in ("stale_loss", "loss_in_full"):
        found = ratios(oracle, oracle.reference, defect)
        assert found
        assert min(found) > 5.0


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

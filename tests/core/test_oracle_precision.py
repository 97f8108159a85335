"""The oracle of low precision against arithmetic done by hand, and the noise that it measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.adapter import BuildConfig, Conventions, OptimizerFactory, Wrapped
from conformance.execute import oracle_runs
from conformance.models import case
from conformance.oracle import VirtualRanks
from conformance.oracle_precision import nudged, rounded_otherwise
from conformance.per_rank import PerRank
from conformance.session import relevant

SGD = OptimizerFactory(name="sgd", optimizer_class=torch.optim.SGD, defaults={"lr": 0.1})
CONFIG = BuildConfig(device=torch.device("cpu"), world_size=2)
SHORT = torch.bfloat16
SHORT_STEP = torch.finfo(SHORT).eps  # between neighbours from one to two


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = module(batch)
    return output.float().square().mean()


def linear() -> nn.Linear:
    module = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.001, -2.003], [0.507, 3.011]]))
    return module


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 2, generator=generator) for _ in range(count)]


def by_hand(batch: Tensor, divided: int = 1) -> Tensor:
    """The gradient of the weight in the dtype of the computation."""
    weight = linear().weight.detach().to(SHORT).requires_grad_()
    output = nn.functional.linear(batch.to(SHORT), weight)
    (output.float().square().mean() / divided).backward()
    assert weight.grad is not None
    assert weight.grad.dtype == SHORT
    return weight.grad


def trained(micro: int = 1, **conventions: Any) -> tuple[Wrapped, Tensor]:
    """A wrapped model after a step of two ranks, and the gradient that the optimizer took."""
    declared = Conventions(computes_as="bfloat16", casts_inputs="root", **conventions)
    oracle = VirtualRanks(2, declared, frozenset(), seed=0)
    w = oracle.build(linear(), SGD, CONFIG)
    seen: list[Tensor] = []
    w.observe = lambda moment, index=0: (
        seen.append(w.module.weight.grad.clone()) if moment == "gradients" else None
    )
    data = batches(2 * micro)
    oracle.step(w, [PerRank((data[i], data[micro + i])) for i in range(micro)], loss)
    return w, seen[0]


def test_gradients_come_in_the_low_dtype_and_are_reduced_in_the_declared_one() -> None:
    first, second = (by_hand(batch) for batch in batches(2))
    in_float32 = (first.float() + second.float()) / 2
    in_bfloat16 = ((first + second) / 2).float()
    assert not torch.equal(in_float32, in_bfloat16)
    for declared, expected in (("float32", in_float32), ("bfloat16", in_bfloat16)):
        _, gradient = trained(reduced_as=declared)
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected)


def test_micro_batches_wait_in_the_declared_dtype() -> None:
    parts = [by_hand(batch, 3) for batch in batches(6)]
    sums = []
    for dtype in (torch.float32, SHORT):
        ranks = [[part.to(dtype) for part in parts[r * 3 : r * 3 + 3]] for r in (0, 1)]
        own = [(a + b + c).float() for a, b, c in ranks]
        sums.append((own[0] + own[1]) / 2)
    assert not torch.equal(*sums)
    for declared, expected in zip(("float32", "bfloat16"), sums, strict=True):
        assert torch.equal(trained(3, accumulates_as=declared)[1], expected)


def waited(parts: tuple[float, ...], *, nudge: bool = False) -> float:
    """What waits in bfloat16 after micro-batches whose gradients in float32 are `parts`."""
    declared = Conventions(accumulates_as="bfloat16", reduced_as="bfloat16")
    oracle = VirtualRanks(1, declared, frozenset(), seed=0, nudge=nudge)
    module = nn.Linear(1, 1, bias=False)
    w = oracle.build(module, SGD, BuildConfig(device=torch.device("cpu"), world_size=1))
    with oracle.no_sync(w):
        for part in parts:
            oracle.backward(w, PerRank(((module.weight * part).sum(),)))
    [[waiting]] = w.native.waiting
    assert waiting is not None
    assert waiting.dtype == SHORT
    return float(waiting)


WIDE = ((1.0,), (1.0, 0.6 * SHORT_STEP), (1.0, -(1.0 + 0.2 * SHORT_STEP)))


@pytest.mark.parametrize("parts", WIDE)
def test_a_wide_gradient_is_rounded_once_with_the_sum_that_waits(parts: tuple[float, ...]) -> None:
    """Its own rounding would be lost in the sum, or be all that is left of one that cancels."""
    assert waited(parts) == pytest.approx(float(torch.tensor(sum(parts)).to(SHORT)), rel=1e-6)


def test_who_rounds_each_micro_batch_first_is_within_the_noise() -> None:
    """A gradient of zero, or of a rounding, is a whole step of Adam's or none."""
    parts = (1.0, -(1.0 + 0.2 * SHORT_STEP))
    rounded_first = sum(float(torch.tensor(part).to(SHORT)) for part in parts)
    assert waited(parts) != rounded_first
    assert waited(parts, nudge=True) == rounded_first


def test_master_weights_keep_what_a_low_dtype_would_lose() -> None:
    small = OptimizerFactory(name="sgd", optimizer_class=torch.optim.SGD, defaults={"lr": 1e-6})
    declared = Conventions(computes_as="bfloat16", casts_inputs="root")
    oracle = VirtualRanks(2, declared, frozenset(), seed=0)
    w = oracle.build(linear(), small, CONFIG)
    oracle.step(w, [PerRank(tuple(batches(2)))], loss)
    before, after = linear().weight.detach(), w.module.weight.detach()
    assert after.dtype == torch.float32
    assert not torch.equal(after, before)
    assert torch.equal(after.to(SHORT), before.to(SHORT))


def test_results_are_cast_as_declared() -> None:
    for declared, dtype in (("parameter", SHORT), ("float32", torch.float32)):
        conventions = Conventions(
            computes_as="bfloat16",
            casts_inputs="root",
            returns_as=declared,  # type: ignore[arg-type]
        )
        oracle = VirtualRanks(1, conventions, frozenset(), seed=0)
        w = oracle.build(linear(), SGD, CONFIG)
        seen = oracle.forward(w, PerRank((batches(1)[0],)), lambda module, batch: module(batch))
        assert seen.values[0].dtype == dtype


def test_only_what_lies_next_to_a_boundary_of_rounding_goes_to_the_other_side() -> None:
    step = SHORT_STEP
    eps = torch.finfo(torch.float32).eps
    middle = 1 + step / 2
    weight = torch.tensor([1.0, middle - 4 * eps, middle + 4 * eps, middle - 64 * eps])
    parameter = nn.Parameter(weight)
    other = rounded_otherwise(parameter, SHORT)
    nearest = weight.to(SHORT)
    assert nearest.tolist() == [1.0, 1.0, 1 + step, 1.0]
    assert other.tolist() == [1.0, 1 + step, 1.0, 1.0]
    other.float().sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_nudged_gradient_has_neighbours_in_half_of_its_places(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(4000, generator=generator).to(dtype)
    gradient[:100] = 0.0
    got = nudged(gradient, generator)
    assert got.dtype == dtype
    assert torch.equal(got[:100], gradient[:100])
    steps = got.view(torch.int16).int() - gradient.view(torch.int16).int()
    assert sorted(set(steps.tolist())) == [-1, 0, 1]
    assert 0.45 < float((steps[100:] != 0).float().mean()) < 0.55


def test_the_first_step_is_as_exact_as_in_float32() -> None:
    declared = Conventions(computes_as="bfloat16", casts_inputs="root")
    losses = []
    for nudge in (False, True):
        oracle = VirtualRanks(2, declared, frozenset(), seed=0, nudge=nudge)
        w = oracle.build(linear(), SGD, CONFIG)
        steps = [oracle.step(w, [PerRank(tuple(batches(2)))], loss) for _ in range(2)]
        losses.append([step.losses[0].values for step in steps])  # type: ignore[attr-defined]
    assert losses[0][0] == losses[1][0]


def test_the_fourth_run_is_that_of_low_dtypes_alone() -> None:
    assert "nudged" not in oracle_runs(Conventions(gathered_as="float64", reduced_as="float64"), 3)
    assert "nudged" in oracle_runs(Conventions(reduced_as="bfloat16"), 3)
    assert "nudged" in oracle_runs(Conventions(computes_as="float16"), 2)


def test_only_low_dtypes_make_another_truth() -> None:
    wide = Conventions(gathered_as="float64", reduced_as="float64", casts_inputs="units")
    low = Conventions(computes_as="bfloat16", reduced_as="float32", casts_inputs="units")
    assert relevant(wide, case("mlp")) == Conventions()
    assert relevant(low, case("mlp")) == low

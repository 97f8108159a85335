"""What each case makes visible: data, gradients and losses that a defect cannot leave unchanged."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.models import ModelCase, cases, concatenate, map_tensors, move

from . import facts

every_case = pytest.mark.parametrize("case", cases().values(), ids=lambda case: case.name)

# Floors below what was measured on all cases with torch 2.13 on a CPU; a case that falls
# under one of them would hide defects.
LOSS_MOVES_BY = 0.15  # of the first loss; measured: 0.17 (transformer, SGD) and more
ROWS_DIFFER_BY = 1e-5  # of the largest element; measured: 1.9e-5 (a bias of the wide case)
SMALLEST_GRADIENT = 0.005  # largest element of a parameter's gradient; measured: 0.0075 (wide)
PLACES_DIFFER_BY = 0.01  # of the largest element; measured: 0.016 (a bias of the strided case)


class ResultDtypes(TorchDispatchMode):
    """Notes the dtype of every tensor with elements that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (list, tuple)) else [out]
        # a recomputation makes an empty tensor of the default dtype, and nothing with it
        self.seen |= {r.dtype for r in results if isinstance(r, Tensor) and r.numel()}
        return out


def relative_change(left: Tensor, right: Tensor) -> float:
    scale = torch.maximum(left.abs().max(), right.abs().max())
    return ((left - right).abs().max() / scale).item()


def closest_rows(gradient: Tensor) -> float:
    """Largest difference between the two rows that resemble each other most, relative."""
    rows = gradient.reshape(gradient.shape[0], -1)
    gaps = [(rows[i + 1 :] - rows[i]).abs().amax(1).min() for i in range(len(rows) - 1)]
    return (torch.stack(gaps).min() / gradient.abs().max()).item()


@every_case
def test_batches_differ_between_ranks_steps_and_micro_batches(case: ModelCase) -> None:
    places = list(itertools.product(range(3), range(3), range(3)))
    seen = {
        tuple(t.numpy().tobytes() for t in facts.tensors(case.batch(*place))) for place in places
    }
    assert len(seen) == len(places)


@every_case
def test_a_batch_is_the_same_at_every_call_and_not_shared(case: ModelCase) -> None:
    first, second = (facts.tensors(case.batch(1, 2, 3)) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)
        assert left.stride() == right.stride()
        assert left.data_ptr() != right.data_ptr()


@every_case
def test_all_micro_batches_have_the_same_size(case: ModelCase) -> None:
    shapes = {
        tuple(t.shape for t in facts.tensors(case.batch(*place)))
        for place in itertools.product(range(2), range(2), range(3))
    }
    assert len(shapes) == 1


@pytest.mark.parametrize("optimizer", facts.OPTIMIZERS)
@every_case
def test_the_loss_falls_clearly_within_six_steps(case: ModelCase, optimizer: str) -> None:
    losses, module = facts.train(case, optimizer)
    assert all(torch.tensor(losses).isfinite())
    assert losses[0] - losses[-1] >= LOSS_MOVES_BY * losses[0]
    with torch.no_grad():
        again = torch.stack([case.loss(module, case.batch(r, 0, 0)) for r in facts.RANKS]).mean()
    assert losses[0] - again.item() >= LOSS_MOVES_BY * losses[0]


@every_case
def test_every_used_trainable_parameter_has_a_gradient_that_is_not_zero(case: ModelCase) -> None:
    found = facts.used_gradients(case, case.batch(0, 0, 0))
    weak = {name: g.abs().max().item() for name, g in found.items()}
    assert {name: size for name, size in weak.items() if size < SMALLEST_GRADIENT} == {}
    wanted = {name for name, p in case.build().named_parameters() if p.requires_grad}
    assert wanted == set(found) or case.leaves_out


@every_case
def test_no_two_rows_of_a_gradient_are_equal(case: ModelCase) -> None:
    found = facts.used_gradients(case, case.batch(0, 0, 0))
    closest = {name: closest_rows(g) for name, g in found.items() if g.dim() and g.shape[0] > 1}
    assert {name: gap for name, gap in closest.items() if gap < ROWS_DIFFER_BY} == {}


@pytest.mark.parametrize("place", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["rank", "step", "micro"])
@every_case
def test_every_gradient_differs_from_place_to_place(
    case: ModelCase, place: tuple[int, int, int]
) -> None:
    here = facts.used_gradients(case, case.batch(0, 0, 0))
    there = facts.used_gradients(case, case.batch(*place))
    both = here.keys() & there.keys()
    assert both == set(here) or "varying" in case.traits
    changes = {name: relative_change(here[name], there[name]) for name in both}
    assert {name: change for name, change in changes.items() if change < PLACES_DIFFER_BY} == {}


@every_case
def test_one_large_batch_gives_the_mean_gradient_where_the_case_says_so(case: ModelCase) -> None:
    batches = [case.batch(0, 0, micro) for micro in range(3)]
    apart = facts.used_gradients(case, *batches)
    joined = facts.used_gradients(case, concatenate(batches))
    both = apart.keys() & joined.keys()
    assert both == set(apart) or "varying" in case.traits
    worst = max(relative_change(apart[name], joined[name]) for name in both)
    # Sums in another order move a float32 gradient by some 1e-6 of its largest element.
    assert (worst < 1e-5) == case.concatenate


@every_case
def test_training_repeats_bit_for_bit(case: ModelCase) -> None:
    first, module = facts.train(case, "adamw")
    second, other = facts.train(case, "adamw")
    assert first == second
    ours, theirs = module.state_dict(), other.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@every_case
def test_a_case_runs_in_float64_throughout_and_agrees(case: ModelCase) -> None:
    single = facts.used_gradients(case, case.batch(0, 0, 0))
    module = case.build().double()
    batch = map_tensors(lambda t: t.double() if t.is_floating_point() else t, case.batch(0, 0, 0))
    with ResultDtypes() as results:
        case.loss(module, batch).backward()
    assert {dtype for dtype in results.seen if dtype.is_floating_point} == {torch.float64}
    double = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert set(double) == set(single)
    assert max(relative_change(single[n].double(), double[n]) for n in single) < 1e-5


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@every_case
def test_a_case_runs_on_the_accelerator_and_agrees(case: ModelCase) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert all(
        t.device.type == device.type for t in facts.tensors(move(case.batch(0, 0, 0), device))
    )
    here = facts.used_gradients(case, case.batch(0, 0, 0))
    there = facts.gradients(case, [case.batch(0, 0, 0)], device)
    for name, gradient in here.items():
        other = there[name]
        assert other is not None
        # Reduced-precision matrix products of some devices keep ten bits of the mantissa.
        assert relative_change(gradient, other.cpu()) < 1e-2

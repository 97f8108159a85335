"""The engine's own work is neither recorded by autograd nor part of a transform."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp.engine.grad_mode import without_gradients
from fsdp.engine.torch_private import transform_level, without_transforms


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_recorded_and_afterwards_it_is_as_before(*, before: bool, fails: bool) -> None:
    weight = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(before):
        try:
            with without_gradients():
                made = weight * 2
                assert not fails, "on purpose"
        except AssertionError:
            assert fails
        assert torch.is_grad_enabled() == before
    assert not made.requires_grad


def test_one_body_may_stand_in_another() -> None:
    with without_gradients():
        with without_gradients():
            pass
        assert not torch.is_grad_enabled(), "the inner one ends nothing that it did not begin"
    assert torch.is_grad_enabled()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(torch.ones(3)),
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(3, 2)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)),
    "twice": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.ones(3, 2)),
}


@pytest.mark.parametrize("how", list(TRANSFORMS))
@pytest.mark.parametrize("context", [without_gradients, without_transforms])
def test_what_is_made_in_a_transform_is_a_plain_tensor_that_outlives_it(
    context: Callable[[], object], how: str
) -> None:
    made, levels = [], []

    def function(x: Tensor) -> Tensor:
        before = transform_level()
        with context():  # type: ignore[attr-defined]
            made.append(torch.ones(2).mul_(3))
            recorded = torch.is_grad_enabled()
        levels.append((before, transform_level()))
        assert torch.is_grad_enabled()
        assert recorded == (context is without_transforms)
        return x * x

    TRANSFORMS[how](function)
    ((before, after),) = levels
    assert after == before is not None
    (plain,) = made
    assert plain.untyped_storage().nbytes() == 8, "wrappers of a transform have no storage"
    assert plain.tolist() == [3, 3]

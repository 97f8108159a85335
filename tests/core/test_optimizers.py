"""The optimizers that cases train with: what they have in common, whatever the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.optimizers import OPTIMIZERS, with_other_hyperparameters


class _Writes(TorchDispatchMode):
    """Names of the operators that write into a tensor, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _writes_of_a_step(name: str, params: int) -> list[str]:
    """Those of the second step, which has all of its state already."""
    factory = OPTIMIZERS[name]
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(params)]
    optimizer = factory.optimizer_class(weights, **factory.defaults)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    with _Writes() as seen:
        optimizer.step()
    return seen.names


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_all_parameters_are_updated_together_on_cpu_too(name: str) -> None:
    written = _writes_of_a_step(name, 5)
    assert written, "a step changes weights"
    assert written == _writes_of_a_step(name, 1)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_hyperparameter_is_another_and_how_to_compute_is_not(name: str) -> None:
    own = OPTIMIZERS[name].defaults
    other = with_other_hyperparameters(OPTIMIZERS[name]).defaults
    assert other.keys() == own.keys()
    assert {key for key, value in other.items() if value == own[key]} == {"foreach"}

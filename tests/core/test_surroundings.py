"""What a save or a load may not change besides the states, as it is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from conformance.adapter import Wrapped
from conformance.ranks.fingerprint import changes
from conformance.scenarios.run import Run
from conformance.scenarios.surroundings import surroundings


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight


def untie(module: Any) -> None:
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())


def changed(body: Callable[[Any], object]) -> list[str]:
    """What `body` changes around a tied model."""
    module = Tied()
    wrapped = Wrapped(module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    run = cast(Run, SimpleNamespace(device=torch.device("cpu")))
    before = surroundings(run, wrapped)
    body(module)
    return list(changes(before, surroundings(run, wrapped)))


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (lambda module: None, []),
        (lambda module: module.head.eval(), ["training mode of head"]),
        (lambda module: torch.rand(1), ["random numbers of torch"]),
        (lambda module: random.random(), ["random numbers of Python"]),
        (lambda module: np.random.rand(), ["random numbers of numpy"]),
        (
            lambda module: module.embed.weight.requires_grad_(False),
            ["requires_grad of embed.weight", "requires_grad of head.weight"],
        ),
        # another check says so, by its cause
        (untie, []),
    ],
    ids=["nothing", "mode", "torch", "python", "numpy", "frozen", "untied"],
)
def test_what_changes_is_told_by_its_name(body: Callable[[Any], object], names: list[str]) -> None:
    state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            assert changed(body) == names
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])

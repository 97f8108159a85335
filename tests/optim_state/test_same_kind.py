"""What an optimizer keeps is found out by a trial, which is the truth and leaves nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.optim_state.probe import kept_entries
from tests.optim_state.running import OPTIMIZERS

CPU = torch.device("cpu")


@pytest.mark.parametrize("dims", [0, 1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trial_keeps_what_a_step_keeps(name: str, dims: int) -> None:
    kind, options = OPTIMIZERS[name]
    param = nn.Parameter(torch.ones([2] * dims))
    optimizer = getattr(torch.optim, kind)([param], **options)
    before, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    found = kept_entries(optimizer, optimizer.param_groups[0], dims, CPU)
    assert str(optimizer.state_dict()) == str(before)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(param, torch.ones([2] * dims))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert found == set(optimizer.state[param])


def test_a_trial_has_the_options_that_it_is_given() -> None:
    adam = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    group = {**adam.param_groups[0], "amsgrad": True}
    assert kept_entries(adam, group, 1, CPU) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


class ByDims(torch.optim.SGD):
    """Keeps something else for matrices, as optimizers with factors do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["rows" if param.dim() > 1 and len(param) > 1 else "one"] = 1


def test_a_trial_has_the_dims_that_it_is_given() -> None:
    optimizer = ByDims([nn.Parameter(torch.ones(3))])
    found = [kept_entries(optimizer, optimizer.param_groups[0], d, CPU) for d in range(4)]
    assert found == [{"one"}, {"one"}, {"rows"}, {"rows"}]


def test_what_cannot_be_tried_is_unknown() -> None:
    """It needs a closure."""
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(3))])
    assert kept_entries(optimizer, optimizer.param_groups[0], 1, CPU) is None

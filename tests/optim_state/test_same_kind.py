"""What an optimizer keeps is found out by a trial, which is the truth and leaves nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.optim_state.probe import kept_entries
from fsdp.optim_state.same_kind import check_same_kind
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


def made(name: str) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(
        [nn.Parameter(torch.ones(3))], **options
    )
    return optimizer


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = optimizer.state_dict()["param_groups"][0]
    return {name: value for name, value in group.items() if name != "params"}


@pytest.mark.parametrize("loading", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam])
@pytest.mark.parametrize("saved", [torch.optim.Adamax, torch.optim.RAdam, torch.optim.SGD])
def test_options_alone_tell_the_state_of_an_optimizer_that_never_stepped(
    saved: Any, loading: Any
) -> None:
    """Those of Adamax are some of AdamW's; RAdam, which has the same, keeps what AdamW keeps."""
    source, target = (kind([nn.Parameter(torch.ones(3))]) for kind in (saved, loading))
    with pytest.raises(ValueError, match=r"of another optimizer: it has no entries, with the opt"):
        check_same_kind([target], [options_of(source)], {})
    with pytest.raises(ValueError, match=r"of another optimizer: it has no entries, with the opt"):
        check_same_kind([source], [options_of(target)], {})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_of_its_own_are_taken_whatever_a_scheduler_or_a_user_has_added(name: str) -> None:
    options = options_of(made(name))
    check_same_kind([made(name)], [options], {})
    check_same_kind([made(name)], [{**options, "initial_lr": 0.1}], {})
    check_same_kind([made(name)], [{**options, "label": "decayed"}], {})


def test_what_no_optimizer_of_torch_has_may_be_an_earlier_version() -> None:
    options = options_of(torch.optim.SGD([nn.Parameter(torch.ones(3))]))
    del options["nesterov"]
    check_same_kind([torch.optim.SGD([nn.Parameter(torch.ones(3))])], [options], {})

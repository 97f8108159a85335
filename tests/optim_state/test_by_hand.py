"""Who looks at an optimizer and for how long, and models with one unit."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.optim_state.refusal import expect_elementwise
from tests.fsdp.ranks import on_ranks
from tests.optim_state.test_refusal import Factored, TrustRatio


def part(name: str) -> nn.Parameter:
    """A parameter that is a part of a tensor, with a gradient."""
    param = nn.Parameter(torch.ones(2, 1))
    param.grad = torch.ones(2, 1)
    expect_elementwise(param, name, is_part=True)
    return param


def test_a_model_is_looked_after_while_another_goes() -> None:
    kept, gone = part("kept"), part("gone")
    del gone
    gc.collect()
    with pytest.raises(NotImplementedError, match="kept"):
        TrustRatio([kept]).step()


def test_states_are_told_by_their_shapes_behind_a_parameter_that_is_whole() -> None:
    whole = nn.Parameter(torch.ones(2, 1))
    whole.grad = torch.ones(2, 1)
    with pytest.raises(NotImplementedError, match=r"'rows' with the shape \(1, 1\)"):
        Factored([whole, part("cut")]).step()


def _one_unit(context: RankContext) -> None:
    torch.manual_seed(0)
    model = FSDP(nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=True)
    dealt: Any = FSDP.scatter_full_optim_state_dict(state if context.rank == 0 else None, model)
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(dealt)
    for param, entry in again.state.items():
        assert torch.equal(entry["exp_avg"], optimizer.state[param]["exp_avg"])


def test_a_model_of_one_unit_deals_a_full_state_out() -> None:
    on_ranks(_one_unit, 2)


def _stranger(context: RankContext) -> str:
    model = FSDP(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"]["mine"] = torch.ones(2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        FSDP.optim_state_dict(model, optimizer, state)
    (found,) = [each for each in told if "cannot process" in str(each.message)]
    return found.filename


def test_the_warning_of_a_state_of_no_parameter_names_the_callers_file() -> None:
    assert set(on_ranks(_stranger, 1)) == {__file__}

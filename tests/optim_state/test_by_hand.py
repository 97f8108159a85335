"""Who looks at an optimizer and for how long, what it is told by, and models with one unit."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.optim_state.plan import plan_unit
from fsdp.optim_state.refusal import expect_elementwise
from fsdp.optim_state.same_kind import Given, check_same_kind
from fsdp.optim_state.sources import route_of
from fsdp.optim_state.vocabulary import StateInfo, _OptimStateKey
from tests.fsdp.ranks import agreed, on_ranks
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


def _adam_and_radam() -> tuple[torch.optim.Optimizer, dict[str, Any], dict[Any, Given]]:
    """Adam over two parameters, and the options and entries of RAdam, which are some of Adam's."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    saved = torch.optim.RAdam(params)
    options = {name: value for name, value in saved.param_groups[0].items() if name != "params"}
    entries = ("step", "exp_avg", "exp_avg_sq")
    given = {p: Given(name=f"p{i}", entries=entries) for i, p in enumerate(params)}
    return torch.optim.Adam(params), options, given


def test_entries_that_fit_may_come_with_the_options_of_another_optimizer() -> None:
    optimizer, options, given = _adam_and_radam()
    check_same_kind([optimizer], [options], given)


def test_the_parameter_that_lacks_an_entry_is_named() -> None:
    optimizer, options, given = _adam_and_radam()
    second = optimizer.param_groups[0]["params"][1]
    given[second] = Given(name="p1", entries=("step", "exp_avg"))
    with pytest.raises(ValueError, match="it has for 'p1' exp_avg, step, with"):
        check_same_kind([optimizer], [options], given)


def test_ranks_that_differ_are_told_of_the_first_name_in_a_flat_parameter() -> None:
    key = _OptimStateKey(("first", "second"), is_fsdp_managed=True)
    member: Any = SimpleNamespace(key=key)
    info: Any = SimpleNamespace(
        is_sharded=True, owners=lambda _: [0, 1], ranks=[4, 5], members=[member]
    )
    reports = [{key: StateInfo(non_tensors={"step": step})} for step in (1, 2)]
    with pytest.raises(AssertionError, match="Rank 5 has different values for step of 'first'"):
        plan_unit(info, [key], reports)


def _route(context: RankContext) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = FSDP(nn.Linear(2, 2), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    names: Any = SimpleNamespace(units=[model], model_groups=())
    return [(group.size(), first) for group, first in route_of(names, None) if group is not None]


def test_nothing_is_sent_over_a_group_of_one_rank() -> None:
    assert agreed(_route, 2) == [[2, 0]]

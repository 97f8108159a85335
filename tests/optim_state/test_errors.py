"""Errors of optimizer states: all ranks raise the same, and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import OptimStateKeyType
from fsdp.optim_state.profiler import SimpleProfiler
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import build
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.optim_state.running import (
    FULL,
    SHARDED,
    Named,
    assert_equal,
    optimizer_for,
    quiet,
    step,
    wrapped,
)

WEIGHT, BIAS = "blocks.0.up.weight", "blocks.0.norm.bias"


def _trained(context: RankContext, *, original: bool) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    return model, optimizer


def _entry(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The entry of a parameter that other ranks hold a part of too."""
    whole = {name: param.numel() for name, param in build().named_parameters()}
    shared = [
        param
        for name, param in model.named_parameters()
        if 0 < param.numel() < whole.get(name.replace("_fsdp_wrapped_module.", ""), 10**9)
    ]
    found: dict[str, Any] = optimizer.state[shared[0]]
    return found


Spoil = Callable[[FSDP, torch.optim.Optimizer], Any]


def _no_state(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _no_moment(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    del _entry(model, optimizer)["exp_avg"]


def _other_step(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    _entry(model, optimizer)["step"] += 1


def _other_dtype(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"].double()


def _odd_shape(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    _entry(model, optimizer)["rows"] = torch.ones(3, 2)


def _inner_tensors(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    _entry(model, optimizer)["history"] = [torch.ones(4)]


def _foreign(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def _other_form(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with quiet():
        FSDP.set_state_dict_type(model, SHARDED)


SAVES: dict[str, tuple[Spoil, bool, type[Exception], str]] = {
    "no_state": (_no_state, False, RuntimeError, "some ranks are missing some of those states"),
    "no_moment": (_no_moment, True, AssertionError, "has different values for exp_avg of"),
    "no_moment_flat": (_no_moment, False, AssertionError, "has different values for exp_avg of"),
    "other_step": (_other_step, True, AssertionError, "has different values for step"),
    "other_step_flat": (_other_step, False, AssertionError, "has different values for step"),
    "other_dtype": (
        _other_dtype,
        True,
        AssertionError,
        "it is elements of torch.float64, and elements",
    ),
    "odd_shape": (_odd_shape, True, NotImplementedError, "computes with whole tensors"),
    "odd_shape_flat": (_odd_shape, False, NotImplementedError, "computes with whole tensors"),
    "inner_tensors": (_inner_tensors, True, NotImplementedError, "tensors inside a list"),
    "foreign": (_foreign, True, KeyError, "is not in FullyShardedDataParallel"),
    "other_form": (_other_form, False, ValueError, "Set the same state_dict_type"),
}


def _spoiled_save(context: RankContext, case: str) -> list[str]:
    spoil, original, _, _ = SAVES[case]
    model, optimizer = _trained(context, original=original)
    if context.rank == 1:
        spoil(model, optimizer)
    return error_of(lambda: FSDP.optim_state_dict(model, optimizer))


@pytest.mark.parametrize("case", SAVES)
def test_what_one_rank_cannot_save_no_rank_saves(case: str) -> None:
    _, _, kind, fragment = SAVES[case]
    named_on_every_rank(on_ranks(_spoiled_save, 2, case=case), kind, fragment)


def _in_part_named(context: RankContext, keys: str, *, original: bool) -> list[str]:
    """A state is passed whose entries and groups call parameters differently."""
    model, optimizer = _trained(context, original=original)
    numbered = optimizer.state_dict()
    names = list(dict(model.named_parameters()))
    if keys == "groups":
        for group in numbered["param_groups"]:
            group["params"] = [names[number] for number in group["params"]]
    else:
        if keys == "plain":
            names = [name.replace("_fsdp_wrapped_module.", "") for name in names]
        numbered["state"] = {names[number]: e for number, e in numbered["state"].items()}
    return error_of(lambda: FSDP.optim_state_dict(model, optimizer, numbered))


@pytest.mark.parametrize(
    ("keys", "original"),
    [("current", True), ("current", False), ("plain", True), ("groups", True), ("groups", False)],
)
def test_entries_and_groups_name_parameters_alike_or_are_refused(
    keys: str, *, original: bool
) -> None:
    errors = on_ranks(_in_part_named, 2, keys=keys, original=original)
    named_on_every_rank(errors, ValueError, "numbers on one side, names on the other")


def _excess(context: RankContext) -> list[str]:
    """Of flat parameters, the first rank says which states there are."""
    model, optimizer = _trained(context, original=False)
    if context.rank == 0:
        del optimizer.state[next(iter(optimizer.state))]
    return sorted(FSDP.optim_state_dict(model, optimizer)["state"])


def test_what_other_ranks_have_beyond_the_first_is_ignored() -> None:
    found = on_ranks(_excess, 2)
    assert found[0] == found[1]
    assert found[0] == sorted(n for n, _ in build().named_parameters() if n.startswith("blocks"))


def _untold(context: RankContext) -> list[str]:
    """On every rank, the optimizer has no state of one trained parameter of a unit."""
    model, optimizer = _trained(context, original=True)
    optimizer.state.pop(dict(model.named_parameters())["_fsdp_wrapped_module.inp.bias"], None)
    return error_of(lambda: FSDP.optim_state_dict(model, optimizer))


def test_a_trained_parameter_without_state_beside_others_is_an_error() -> None:
    named_on_every_rank(on_ranks(_untold, 2), RuntimeError, "inp.bias is not in the optimizer")


def _unsendable(context: RankContext) -> list[str]:
    model, optimizer = _trained(context, original=True)
    for entry in optimizer.state.values():
        entry["made"] = lambda: 0
    return error_of(lambda: FSDP.optim_state_dict(model, optimizer))


def test_a_value_that_another_rank_needs_must_be_picklable() -> None:
    named_on_every_rank(on_ranks(_unsendable, 3), TypeError, "cannot be pickled")


def _mixed_dtypes(context: RankContext) -> list[str]:
    model, optimizer = _trained(context, original=True)
    param = dict(model.named_parameters())["_fsdp_wrapped_module.inp.bias"]
    if param in optimizer.state:
        optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].double()
    return error_of(lambda: FSDP.optim_state_dict(model, optimizer))


def test_a_state_has_one_dtype_within_a_unit() -> None:
    named_on_every_rank(on_ranks(_mixed_dtypes, 2), AssertionError, "needs one dtype")


def _nothing_wrapped(context: RankContext) -> list[list[str]]:
    plain = build()
    optimizer = optimizer_for(plain, "adam")
    halves = nn.ModuleList([wrapped(use_orig_params=True), wrapped(use_orig_params=False)])
    both = optimizer_for(halves, "adam")
    model, own = _trained(context, original=False)
    return [
        error_of(lambda: FSDP.optim_state_dict(plain, optimizer)),
        error_of(lambda: FSDP.optim_state_dict_to_load(plain, optimizer, {"state": {}})),
        error_of(lambda: FSDP.optim_state_dict(halves, both)),
        error_of(lambda: FSDP.optim_state_dict(model, own, {"param_groups": []})),
    ]


def test_a_model_without_units_or_with_units_of_two_kinds_is_refused() -> None:
    for plain, load, halves, state in on_ranks(_nothing_wrapped, 2):
        assert plain[0] == load[0] == "ValueError"
        assert "no FullyShardedDataParallel in it" in plain[1]
        assert halves[0] == "AssertionError"
        assert "Not all FSDP modules have the same _use_orig_params value" in halves[1]
        assert state[0] == "ValueError"
        assert 'must have "state"' in state[1]


State = dict[str, Any]


def _drop_name(found: State) -> None:
    del found["state"][WEIGHT]["exp_avg"]


def _scalar_for_tensor(found: State) -> None:
    found["state"][WEIGHT]["exp_avg"] = 1.0


def _double(found: State) -> None:
    found["state"][WEIGHT]["exp_avg"] = found["state"][WEIGHT]["exp_avg"].double()


def _transposed(found: State) -> None:
    found["state"][WEIGHT]["exp_avg"] = found["state"][WEIGHT]["exp_avg"].t()


def _step_further(found: State) -> None:
    found["state"][WEIGHT]["step"] = found["state"][WEIGHT]["step"] + 1


def _dropped(found: State) -> None:
    del found["state"][WEIGHT]


def _emptied(found: State) -> None:
    for name in found["state"]:
        found["state"][name] = {}


def _no_states(found: State) -> None:
    del found["state"]


def _renamed(found: State) -> None:
    found["param_groups"][0]["params"][0] = "nobody"


def _other_values(found: State) -> None:
    found["state"].pop("inp.weight")
    found["state"].pop("inp.bias")
    found["state"].pop("out.weight")
    found["state"].pop("out.bias")


def _split(found: State) -> None:
    """As many groups of as many parameters, of other ones."""
    (group,) = found["param_groups"]
    found["param_groups"] = [
        {**group, "params": [n for n in group["params"] if not n.startswith("blocks.1")]},
        {**group, "params": [n for n in group["params"] if n.startswith("blocks.1")]},
    ]


SCALARS = "must have scalar state with the same value and dtype"
LOADS: dict[str, tuple[Callable[[State], None], bool, type[Exception], str]] = {
    "names": (_drop_name, False, ValueError, "Differing optimizer state names for the unflattened"),
    "types": (_scalar_for_tensor, False, ValueError, "Differing optimizer state types"),
    "dtypes": (_double, False, ValueError, "positive-dimension tensor state with the same dtype"),
    "shapes": (_transposed, False, ValueError, "does not have same shape as its parameter"),
    "shapes_original": (_transposed, True, ValueError, "does not have same shape as its parameter"),
    "scalars": (_step_further, False, ValueError, SCALARS),
    "dropped": (_dropped, False, ValueError, SCALARS),
    "emptied": (_emptied, False, RuntimeError, "is empty"),
    "no_state": (_no_states, False, ValueError, '`optim_state_dict` must have the keys "state"'),
    "no_state_original": (_no_states, True, ValueError, "must have the keys"),
    "renamed": (_renamed, True, KeyError, "Can't find nobody"),
    "other": (_other_values, False, ValueError, "optimizer state to load of rank 0 differs from"),
    "other_original": (_other_values, True, ValueError, "to load of rank 0 differs from"),
}


def _spoiled_load(context: RankContext, case: str) -> list[str]:
    spoil, original, _, _ = LOADS[case]
    model, optimizer = _trained(context, original=original)
    found = FSDP.optim_state_dict(model, optimizer)
    if context.rank == 1:
        spoil(found)
    before = copy.deepcopy(optimizer.state_dict())
    with FSDP.state_dict_type(model, FULL):
        error = error_of(
            lambda: FSDP.optim_state_dict_to_load(model, optimizer, found, load_directly=True)
        )
    assert_equal(optimizer.state_dict()["state"], before["state"])
    return error


@pytest.mark.parametrize("case", LOADS)
def test_what_one_rank_cannot_load_no_rank_loads(case: str) -> None:
    _, _, kind, fragment = LOADS[case]
    named_on_every_rank(on_ranks(_spoiled_load, 2, case=case), kind, fragment)


def _skips(context: RankContext) -> None:
    """With original parameters a missing entry is no state."""
    model, optimizer = _trained(context, original=True)
    found = FSDP.optim_state_dict(model, optimizer)
    del found["state"][WEIGHT]
    other = optimizer_for(model, "adam")
    FSDP.optim_state_dict_to_load(model, other, found, load_directly=True)
    params = dict(model.named_parameters())
    (name,) = [n for n in params if n.replace("_fsdp_wrapped_module.", "") == WEIGHT]
    assert params[name] not in other.state
    assert len(other.state) >= len(optimizer.state) - 1


def test_an_original_parameter_without_entry_has_no_state() -> None:
    on_ranks(_skips, 2)


def _first_is_missing(context: RankContext) -> None:
    """Of a flat parameter the first may be missing as any other: its part is zero."""
    model = wrapped()
    optimizer = optimizer_for(model, "sgd")
    step(model, optimizer, 0, context.rank)
    found = FSDP.optim_state_dict(model, optimizer)
    first = "blocks.0.up.weight"
    del found["state"][first]
    FSDP.optim_state_dict_to_load(model, optimizer, found, load_directly=True)
    again = FSDP.optim_state_dict(model, optimizer)
    assert not again["state"].pop(first)["momentum_buffer"].any()
    assert_equal(again["state"], found["state"])


def test_missing_moments_of_any_flat_mate_are_zero() -> None:
    on_ranks(_first_is_missing, 2)


def _mixed_up(context: RankContext) -> list[str]:
    """Groups of the same sizes and other parameters would be loaded without a word."""
    model = wrapped()
    _, block, other = model.parameters()
    rest = [p for p in model.parameters() if p is not block]
    mine = torch.optim.Adam([{"params": rest}, {"params": [block]}])
    step(model, mine, 0, context.rank)
    found = FSDP.optim_state_dict(model, mine)
    keep = [p for p in model.parameters() if p is not other]
    target = torch.optim.Adam([{"params": keep}, {"params": [other]}])
    return error_of(lambda: FSDP.optim_state_dict_to_load(model, target, found))


def test_groups_that_would_be_mixed_up_are_refused() -> None:
    named_on_every_rank(on_ranks(_mixed_up, 2), ValueError, "goes by positions, and would mix")


def _lost_name(context: RankContext) -> list[list[str]]:
    model = wrapped(use_orig_params=True)
    optimizer = Named(model)
    optimizer.start()
    found = FSDP.optim_state_dict(model, optimizer, optimizer.state_dict())
    if context.rank == 1:
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    state = optimizer.state_dict() if context.rank == 0 else {**found, "state": {"inp.bias": {}}}
    return [
        error_of(
            lambda: FSDP.optim_state_dict_to_load(model, optimizer, found, is_named_optimizer=True)
        ),
        error_of(lambda: FSDP.optim_state_dict(model, optimizer, state)),
    ]


def test_a_parameter_without_a_name_is_an_error() -> None:
    for errors in on_ranks(_lost_name, 2):
        named_on_every_rank(tuple(errors), KeyError, "Can't find")


INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "number": (3, TypeError, "Optimizer input should be an iterable of Tensors or dicts, but got"),
    "empty": ([], ValueError, "Optimizer input should not be empty"),
    "mixed": ([torch.ones(1), {}], TypeError, "should be an iterable of Tensors or dicts"),
    "no_params": ([{"lr": 1}], AssertionError, 'A parameter group should map "params"'),
}


def _bad_input(context: RankContext, case: str) -> list[list[str]]:
    given = INPUTS[case][0]
    model, optimizer = _trained(context, original=False)
    with quiet():
        found = FSDP.optim_state_dict(model, optimizer)
        return [
            error_of(lambda: FSDP.full_optim_state_dict(model, optimizer, optim_input=given)),
            error_of(lambda: FSDP.shard_full_optim_state_dict(found, model, optim_input=given)),
            error_of(lambda: FSDP.scatter_full_optim_state_dict(found, model, optim_input=given)),
        ]


@pytest.mark.parametrize("case", INPUTS)
def test_an_input_that_no_optimizer_takes_is_refused(case: str) -> None:
    _, kind, fragment = INPUTS[case]
    for errors in on_ranks(_bad_input, 2, case=case):
        named_on_every_rank(tuple(errors), kind, fragment)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.two = nn.Linear(2, 2)
        self.two.weight = self.one.weight


def test_keys_are_translated_only_if_they_are_clear() -> None:
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(plain.parameters())
    names = OptimStateKeyType.PARAM_NAME
    mixed = {"state": {0: {}, "weight": {}}, "param_groups": []}
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        FSDP.rekey_optim_state_dict(mixed, names, plain, optim=optimizer)
    with pytest.raises(AssertionError, match="Expected optim_state_key_type to be"):
        FSDP.rekey_optim_state_dict(mixed, "names", plain, optim=optimizer)  # type: ignore[arg-type]
    tied = Tied()
    state = {"state": {0: {}}, "param_groups": [{"params": [0, 1, 2]}]}
    with pytest.raises(RuntimeError, match="Each parameter should only map to one parameter name"):
        FSDP.rekey_optim_state_dict(state, names, tied)
    empty: State = {"state": {}, "param_groups": [{"params": [0]}]}
    assert FSDP.rekey_optim_state_dict(empty, names, plain) is empty
    named = {"state": {"weight": {}}, "param_groups": [{"params": ["weight"]}]}
    assert FSDP.rekey_optim_state_dict(named, names, plain) is named


def test_one_kind_of_time_is_not_counted_twice() -> None:
    with (
        SimpleProfiler.profile(SimpleProfiler.Type.D2H),
        SimpleProfiler.profile(SimpleProfiler.Type.ALLGATHER),
        pytest.raises(AssertionError, match="D2H is already being profiled"),
        SimpleProfiler.profile(SimpleProfiler.Type.D2H),
    ):
        pass
    assert set(SimpleProfiler.results) == {"D2H", "all_gather"}
    SimpleProfiler.reset()
    assert not SimpleProfiler.results

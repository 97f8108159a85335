"""What is no ordinary parameter: ignored, frozen, unused, outside of any unit, or no parameter."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from conformance.ranks import RankContext
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from tests.fsdp.plain import Residual, Stack, batch, build, loss_of
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.fsdp.test_wrapper_edits import Strided
from tests.optim_state.running import (
    Named,
    assert_equal,
    by_name,
    optimizer_for,
    params_of,
    plain_step,
    quiet,
    step,
    two_groups,
    wrapped,
)


def _all_reduced(model: nn.Module, params: Any, world: int) -> None:
    """What nobody reduces: the mean of the gradients of unmanaged parameters."""
    for param in params:
        dist.all_reduce(param.grad)
        param.grad /= world


def _unmanaged(context: RankContext, where: str, *, original: bool) -> None:
    """Ignored parameters, or those of a parent, keep their own entries."""
    inner, plain = build(), build()
    outside = [inner.out.weight, inner.out.bias]
    if where == "ignored":
        model: nn.Module = FSDP(
            inner,
            auto_wrap_policy=ModuleWrapPolicy({Residual}),
            ignored_states=outside,
            use_orig_params=original,
        )
    else:
        inner.inp = FSDP(inner.inp, use_orig_params=original)
        for index, block in enumerate(inner.blocks):
            inner.blocks[index] = FSDP(block, use_orig_params=original)
        model = inner
    mine, theirs = optimizer_for(model, "adam"), optimizer_for(plain, "adam")
    for number in range(2):
        loss_of(model, batch(number, context.rank)).backward()
        _all_reduced(model, outside, context.world_size)
        mine.step()
        mine.zero_grad()
        plain_step(plain, theirs, number, context.world_size)
    found, want = FSDP.optim_state_dict(model, mine), by_name(plain, theirs)
    assert_equal(found["state"], want["state"], tolerance=2e-5)
    kept = copy.deepcopy(found)
    again = optimizer_for(model, "adam")
    FSDP.optim_state_dict_to_load(model, again, found, load_directly=True)
    assert_equal(FSDP.optim_state_dict(model, again)["state"], kept["state"])
    with quiet():
        mine_only = found if context.rank == 0 else None
        loaded = FSDP.scatter_full_optim_state_dict(mine_only, model, optim=again)
    again.load_state_dict(loaded)
    assert_equal(FSDP.optim_state_dict(model, again)["state"], kept["state"])
    assert_equal(found["state"], kept["state"])


def _unmanaged_apart(context: RankContext, *, original: bool, source: str) -> None:
    """What was loaded, and what was saved where it was, does not change with the optimizer."""
    inner = build()
    model = FSDP(inner, ignored_states=[inner.out.weight, inner.out.bias], use_orig_params=original)
    first, second = (optimizer_for(model, "adam") for _ in range(2))
    step(model, first, 0, context.rank)
    offload = FullOptimStateDictConfig(rank0_only=source == "first rank")
    stay = FullOptimStateDictConfig(offload_to_cpu=False)
    with _full(model, stay):
        given = FSDP.optim_state_dict(model, first)
    kept = copy.deepcopy(given)
    assert "out.weight" in kept["state"]
    with _full(model, offload):
        FSDP.optim_state_dict_to_load(model, second, given, load_directly=True)
    for optimizer in (first, second):
        step(model, optimizer, 1, context.rank)
    assert_equal(given["state"], kept["state"])


def _full(model: nn.Module, how: FullOptimStateDictConfig) -> Any:
    return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), how)


@ORIGINAL
@pytest.mark.parametrize("source", ["every rank", "first rank"])
def test_states_of_unmanaged_parameters_are_copies(source: str, *, original: bool) -> None:
    on_ranks(_unmanaged_apart, 2, original=original, source=source)


@ORIGINAL
@pytest.mark.parametrize("where", ["ignored", "parent"])
def test_unmanaged_parameters_keep_their_entries(where: str, *, original: bool) -> None:
    on_ranks(_unmanaged, 2, where=where, original=original)


def _added_later(context: RankContext, *, original: bool) -> None:
    """A parameter given to a unit after it was made is nobody's, and has a name all the same."""
    model = wrapped(use_orig_params=original)
    model.register_parameter("extra", nn.Parameter(torch.full((3, 2), 2.0)))
    optimizer = optimizer_for(model, "adam")
    loss_of(model, batch(0, context.rank)).backward()
    model.extra.grad = torch.ones(3, 2)
    optimizer.step()
    found = FSDP.optim_state_dict(model, optimizer)
    assert found["state"]["extra"]["exp_avg"].shape == (3, 2)
    assert "extra" in found["param_groups"][0]["params"]
    again = optimizer_for(model, "adam")
    FSDP.optim_state_dict_to_load(model, again, found, load_directly=True)
    assert_equal(FSDP.optim_state_dict(model, again)["state"], found["state"])


@ORIGINAL
def test_a_parameter_added_after_wrapping_keeps_its_entry(*, original: bool) -> None:
    on_ranks(_added_later, 2, original=original)


class Branches(Stack):
    """Uses its input layer or not; its unit is left alone if it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(10, 4)


def _unused(context: RankContext, *, original: bool) -> None:
    policy = CustomPolicy(lambda m: isinstance(m, (Residual, nn.Linear)))
    model = FSDP(build(Branches), auto_wrap_policy=policy, use_orig_params=original)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    found = FSDP.optim_state_dict(model, optimizer)
    names = [name for name, _ in build(Branches).named_parameters()]
    assert sorted(found["state"]) == sorted(n for n in names if not n.startswith("unused"))
    assert sorted(found["param_groups"][0]["params"]) == sorted(names)
    again = optimizer_for(model, "adam")
    FSDP.optim_state_dict_to_load(model, again, found, load_directly=True)
    assert_equal(FSDP.optim_state_dict(model, again)["state"], found["state"])


@ORIGINAL
def test_a_unit_that_never_had_a_gradient_has_no_entry(*, original: bool) -> None:
    on_ranks(_unused, 2, original=original)


def _frozen(context: RankContext) -> None:
    """Freeze, train, save, load; thaw, train, save, load: no trace of the other phase."""
    model, plain = wrapped(use_orig_params=True), build()
    mine, theirs = optimizer_for(model, "adam"), optimizer_for(plain, "adam")
    for trained in (False, True):
        for each in (model, plain):
            for name, param in each.named_parameters():
                if name.endswith("up.weight"):
                    param.requires_grad_(trained)
        for number in range(2):
            step(model, mine, number, context.rank)
            plain_step(plain, theirs, number, context.world_size)
        found, want = FSDP.optim_state_dict(model, mine), by_name(plain, theirs)
        assert_equal(found["state"], want["state"], tolerance=2e-5)
        fresh = optimizer_for(model, "adam")
        FSDP.optim_state_dict_to_load(model, fresh, found, load_directly=True)
        assert_equal(FSDP.optim_state_dict(model, fresh)["state"], found["state"])
        mine = fresh
    # Frozen again, with a state from before: it is saved with the others.
    for name, param in model.named_parameters():
        if name.endswith("up.weight"):
            param.requires_grad_(False)
    step(model, mine, 5, context.rank)
    assert_equal(
        {k: v for k, v in FSDP.optim_state_dict(model, mine)["state"].items() if "up.weight" in k},
        {k: v for k, v in found["state"].items() if "up.weight" in k},
    )


def test_frozen_parameters_have_the_state_that_they_have() -> None:
    on_ranks(_frozen, 2)


def _empty(context: RankContext, *, original: bool) -> None:
    """Without a step there are no entries, and the groups are there."""
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "adam")
    found = FSDP.optim_state_dict(model, optimizer)
    assert found["state"] == {}
    assert sorted(found["param_groups"][0]["params"]) == sorted(
        name for name, _ in build().named_parameters()
    )
    again = optimizer_for(model, "adam", lr=0.7)
    FSDP.optim_state_dict_to_load(model, again, found, load_directly=True)
    assert again.param_groups[0]["lr"] == 0.02
    assert not again.state


@ORIGINAL
def test_an_optimizer_without_state_has_groups(*, original: bool) -> None:
    on_ranks(_empty, 2, original=original)


def _without_groups(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    state = optimizer.state_dict()
    del state["param_groups"]
    found = FSDP.optim_state_dict(model, optimizer, state)
    assert list(found) == ["state"]
    again = optimizer_for(model, "adam", lr=0.7)
    loaded = FSDP.optim_state_dict_to_load(model, again, found, load_directly=True)
    assert list(loaded) == ["state"]
    assert again.param_groups[0]["lr"] == 0.7
    assert_equal(FSDP.optim_state_dict(model, again)["state"], found["state"])


@ORIGINAL
def test_without_groups_the_optimizer_keeps_its_own(*, original: bool) -> None:
    on_ranks(_without_groups, 2, original=original)


def _odd_values(context: RankContext, *, original: bool) -> None:
    """None, numbers, text, and what belongs to no parameter."""
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "sgd")
    step(model, optimizer, 0, context.rank)
    for entry in optimizer.state.values():
        entry.update(nothing=None, count=3, text="a", pair=(1, 2.5))
        if not original:
            entry["made"] = lambda: 0  # cannot be sent: each rank keeps its own
    state = optimizer.state_dict()
    state["state"]["mine"] = torch.ones(2)
    with pytest.warns(UserWarning, match="Found a optim state, mine, that FSDP cannot process"):
        found = FSDP.optim_state_dict(model, optimizer, state)
    assert torch.equal(found["state"]["mine"], torch.ones(2))
    for name, entry in found["state"].items():
        if name != "mine":
            assert (entry["nothing"], entry["count"], entry["text"]) == (None, 3, "a")
            assert entry["pair"] == (1, 2.5)
            assert original or entry.pop("made")() == 0
            assert list(entry) == ["momentum_buffer", "count", "nothing", "pair", "text"]
    again = optimizer_for(model, "sgd")
    loaded = FSDP.optim_state_dict_to_load(model, again, found)
    assert torch.equal(loaded["state"].pop("mine"), torch.ones(2))
    for entry in loaded["state"].values():
        assert (entry["nothing"], entry["count"], entry["text"]) == (None, 3, "a")
        assert entry["pair"] == (1, 2.5)
    again.load_state_dict(loaded)
    for param, entry in again.state.items():
        assert torch.equal(entry["momentum_buffer"], optimizer.state[param]["momentum_buffer"])


@ORIGINAL
def test_values_that_are_no_tensors_stay_what_they_are(*, original: bool) -> None:
    on_ranks(_odd_values, 2, original=original)


def _user_key(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "sgd")
    step(model, optimizer, 0, context.rank)
    found = FSDP.optim_state_dict(model, optimizer)
    found["state"]["mine"] = {"seen": torch.arange(3), "n": 1}
    with quiet():
        first = found if context.rank == 0 else None
        loaded = FSDP.scatter_full_optim_state_dict(first, model, optim=optimizer)
    assert torch.equal(loaded["state"]["mine"]["seen"], torch.arange(3))
    assert loaded["state"]["mine"]["n"] == 1


@ORIGINAL
def test_a_users_own_entry_reaches_every_rank(*, original: bool) -> None:
    on_ranks(_user_key, 2, original=original)


def _user_key_alone(context: RankContext, options: dict[str, Any], *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "sgd", two_groups, **options)
    step(model, optimizer, 0, context.rank)
    given = optimizer.state_dict()
    given["state"] = {"mine": {"n": 1}} | given["state"]
    bare = {"state": given["state"]}
    wanted = FSDP.optim_state_dict(model, optimizer)
    for state, groups in ((given, {"param_groups": wanted["param_groups"]}), (bare, {})):
        with pytest.warns(UserWarning, match="Found a optim state, mine, that FSDP cannot process"):
            found = FSDP.optim_state_dict(model, optimizer, state)
        assert_equal(found.pop("state"), wanted["state"] | {"mine": {"n": 1}})
        assert found == groups
    loaded = FSDP.optim_state_dict_to_load(
        model, optimizer, {"state": {"mine": {"n": 3}}}, load_directly=True
    )
    assert loaded == {"state": {"mine": {"n": 3}}}
    assert optimizer.state_dict()["state"] == {"mine": {"n": 3}}
    with pytest.warns(UserWarning, match="mine"):
        again = FSDP.optim_state_dict(model, optimizer)
    assert again["state"] == {"mine": {"n": 3}}


@ORIGINAL
@pytest.mark.parametrize("options", [{"momentum": 0.0}, {}], ids=["stateless", "momentum"])
def test_a_users_own_entry_may_be_the_first_or_the_only_one(
    options: dict[str, Any], *, original: bool
) -> None:
    on_ranks(_user_key_alone, 2, options=options, original=original)


def _prefixes(context: RankContext, *, original: bool) -> None:
    """Checkpoint wrappers, inside and around, are not in the names."""
    inner = build()
    inner.blocks[0] = checkpoint_wrapper(inner.blocks[0])
    inner.blocks[1] = checkpoint_wrapper(FSDP(inner.blocks[1], use_orig_params=original))
    model = FSDP(inner, auto_wrap_policy=None, use_orig_params=original)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    found = FSDP.optim_state_dict(model, optimizer)
    names = [name for name, _ in build().named_parameters()]
    assert sorted(found["state"]) == sorted(names)
    assert set(found["state"]) <= set(model.state_dict())
    other = wrapped(use_orig_params=original)
    again = optimizer_for(other, "adam")
    FSDP.optim_state_dict_to_load(other, again, found, load_directly=True)
    assert_equal(FSDP.optim_state_dict(other, again)["state"], found["state"])


@ORIGINAL
def test_names_are_those_of_the_model_state(*, original: bool) -> None:
    on_ranks(_prefixes, 2, original=original)


def _strided(context: RankContext, strategy: str, *, original: bool) -> None:
    """A parameter that lies in memory in another order than its indices."""
    given = {"sharding_strategy": ShardingStrategy[strategy]}
    with quiet():
        model = FSDP(build(Strided), use_orig_params=original, **given)
    plain = build(Strided)
    mine, theirs = optimizer_for(model, "adam"), optimizer_for(plain, "adam")
    step(model, mine, 0, context.rank)
    plain_step(plain, theirs, 0, context.world_size)
    found = FSDP.optim_state_dict(model, mine)
    assert_equal(found["state"], by_name(plain, theirs)["state"], tolerance=2e-5)
    contiguous = {
        name: {state: value.contiguous() for state, value in entry.items()}
        for name, entry in found["state"].items()
    }
    again = optimizer_for(model, "adam")
    FSDP.optim_state_dict_to_load(model, again, {"state": contiguous}, load_directly=True)
    assert_equal(FSDP.optim_state_dict(model, again)["state"], found["state"])
    for param, entry in again.state.items():
        assert entry["exp_avg"].stride() == param.stride()


@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_follow_the_order_of_the_indices(strategy: str, *, original: bool) -> None:
    on_ranks(_strided, 2, strategy=strategy, original=original)


class Mixed(nn.Module):
    """Shared dense layers, and a table of its own on each rank."""

    def __init__(self, rank: int, *, original: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Of two rows on three ranks and more, a rank holds nothing of some parameters.
        dense = nn.Sequential(nn.Linear(10, 2), nn.ReLU(), nn.Linear(2, 10))
        self.dense = FSDP(dense, use_orig_params=original)
        self.table = f"sparse{rank}"
        self.add_module(self.table, nn.Linear(10, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.get_submodule(self.table)(x))


def _by_names(context: RankContext) -> None:
    """Keys are names, wrappers included; a rank's own table has entries on that rank alone."""
    model = Mixed(context.rank, original=True)
    first = Named(model)
    plain = torch.optim.Adam(Mixed(context.rank, original=True).parameters(), lr=0.01)
    first.start()
    step(model, first, 0, context.rank)
    state = first.state_dict()
    assert all("_fsdp_wrapped_module" in k for k in state["state"] if k.startswith("dense"))
    found = FSDP.optim_state_dict(model, first, state)
    want = [*(f"dense.{i}.{n}" for i in (0, 2) for n in ("weight", "bias"))]
    want += [f"sparse{context.rank}.weight", f"sparse{context.rank}.bias"]
    assert sorted(found["state"]) == sorted(want)
    assert found["state"]["dense.0.weight"]["exp_avg"].shape == (2, 10)
    assert sorted(found["param_groups"][0]["params"]) == sorted(want)
    second = Named(model)
    second.start()
    loaded = FSDP.optim_state_dict_to_load(model, second, found, is_named_optimizer=True)
    assert set(loaded["state"]) == set(state["state"])  # also those without an element here
    second.load_state_dict(loaded)
    assert_equal(FSDP.optim_state_dict(model, second, second.state_dict())["state"], found["state"])
    assert plain.state_dict()["state"] == {}


def test_an_optimizer_with_names_for_keys_saves_and_loads() -> None:
    on_ranks(_by_names, 3)


def _names_before_a_step(context: RankContext) -> None:
    model = Mixed(context.rank, original=True)
    first = Named(model)
    found = FSDP.optim_state_dict(model, first, {**first.state_dict(), "state": {}})
    assert found["state"] == {}
    names = [f"dense.{i}.{n}" for i in (0, 2) for n in ("weight", "bias")]
    names += [f"sparse{context.rank}.weight", f"sparse{context.rank}.bias"]
    assert sorted(found["param_groups"][0]["params"]) == sorted(names)


def test_names_for_keys_are_seen_before_there_is_a_state() -> None:
    on_ranks(_names_before_a_step, 2)


def _names_of_flat(context: RankContext) -> None:
    model = wrapped()
    first = Named(model)
    first.start()
    step(model, first, 0, context.rank)
    found = FSDP.optim_state_dict(model, first, first.state_dict())
    assert sorted(found["state"]) == sorted(name for name, _ in build().named_parameters())
    second = Named(model)
    second.start()
    loaded = FSDP.optim_state_dict_to_load(model, second, found, is_named_optimizer=True)
    assert sorted(loaded["state"]) == sorted(name for name, _ in model.named_parameters())
    second.load_state_dict(loaded)
    assert_equal(FSDP.optim_state_dict(model, second, second.state_dict())["state"], found["state"])


def test_flat_parameters_have_names_for_keys_too() -> None:
    on_ranks(_names_of_flat, 2)


def _missing_here(context: RankContext) -> None:
    """A parameter of which this rank has nothing, and no state either, is told of."""
    model = Mixed(context.rank, original=True)
    first = Named(model)
    first.start()
    found = FSDP.optim_state_dict(model, first, first.state_dict())
    bare = Named(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = FSDP.optim_state_dict_to_load(model, bare, found, is_named_optimizer=True)
    without = [p for p in model.dense.parameters() if not p.numel()]
    told = [w for w in caught if f"is not on rank{context.rank}" in str(w.message)]
    assert len(told) == len(without)
    assert len(loaded["state"]) == len(list(model.parameters())) - len(without)


def test_a_missing_entry_of_a_named_optimizer_is_told_of() -> None:
    on_ranks(_missing_here, 3)


def _other_order(context: RankContext, *, original: bool) -> None:
    """Groups are matched by what they hold: an optimizer itself goes by positions."""
    model = wrapped(use_orig_params=original)

    def make(*order: int) -> torch.optim.Optimizer:
        first = list(model.blocks[0].parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in first)]
        groups = [{"params": first, "lr": 0.01}, {"params": rest, "lr": 0.03}]
        return torch.optim.Adam([groups[i] for i in order])

    mine, other = make(0, 1), make(1, 0)
    step(model, mine, 0, context.rank)
    found = FSDP.optim_state_dict(model, mine)
    FSDP.optim_state_dict_to_load(model, other, found, load_directly=True)
    assert [group["lr"] for group in other.param_groups] == [0.03, 0.01]
    for param, entry in mine.state.items():
        assert torch.equal(entry["exp_avg"], other.state[param]["exp_avg"])
    assert params_of(model)


@ORIGINAL
def test_groups_in_another_order_find_their_parameters(*, original: bool) -> None:
    on_ranks(_other_order, 2, original=original)


def _with_names(context: RankContext, *, original: bool) -> None:
    """An optimizer that was given names keeps its own, and saves those of the plain model."""
    model = wrapped(use_orig_params=original)
    mine = torch.optim.Adam(model.named_parameters())
    step(model, mine, 0, context.rank)
    found = FSDP.optim_state_dict(model, mine)
    assert found["param_groups"][0]["param_names"] == found["param_groups"][0]["params"]
    own = list(mine.param_groups[0]["param_names"])
    FSDP.optim_state_dict_to_load(model, mine, found, load_directly=True)
    assert mine.param_groups[0]["param_names"] == own


@ORIGINAL
def test_an_optimizer_that_knows_names_keeps_its_own(*, original: bool) -> None:
    on_ranks(_with_names, 2, original=original)


def _not_held(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    mine = optimizer_for(model, "adam")
    step(model, mine, 0, context.rank)
    found = FSDP.optim_state_dict(model, mine)
    half = torch.optim.Adam(model.blocks[0].parameters())
    loaded = FSDP.optim_state_dict_to_load(model, half, {"state": found["state"]})
    half.load_state_dict({**loaded, "param_groups": half.state_dict()["param_groups"]})
    assert set(half.state) == {p for p in model.blocks[0].parameters() if p in mine.state}


@ORIGINAL
def test_entries_of_parameters_that_an_optimizer_does_not_hold_are_left_out(
    *, original: bool
) -> None:
    on_ranks(_not_held, 2, original=original)

"""Ranks that ask for different things hear who asked for what, before anything is exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from conformance.ranks import RankContext
from fsdp import FullOptimStateDictConfig, checkpoint
from fsdp import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import build
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.optim_state.running import (
    FULL,
    LOCAL,
    SHARDED,
    assert_equal,
    form,
    optimizer_for,
    quiet,
    step,
    wrapped,
)

State = dict[str, Any]
WEIGHT = "blocks.0.up.weight"


def _sharded(model: FSDP) -> None:
    FSDP.set_state_dict_type(model, SHARDED)


def _mixed(model: FSDP) -> None:
    FSDP.set_state_dict_type(model.module.blocks, SHARDED)


def _local(model: FSDP) -> None:
    FSDP.set_state_dict_type(model, LOCAL)


def _rank0_only(model: FSDP) -> None:
    config = FullOptimStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(model, FULL, optim_state_dict_config=config)


SETTINGS: dict[str, tuple[Callable[[FSDP], None], bool, bool, type[Exception], str]] = {
    "save_sharded": (_sharded, False, False, ValueError, "rank 1 has large tensors in chunks"),
    "save_mixed": (_mixed, False, False, AssertionError, "must have the same settings"),
    "load_mixed": (_mixed, True, False, AssertionError, "must have the same settings"),
    "save_local": (_local, False, True, RuntimeError, "not compatible with LOCAL_STATE_DICT"),
    "load_local": (_local, True, True, RuntimeError, "not compatible with LOCAL_STATE_DICT"),
    "load_rank0": (
        _rank0_only,
        True,
        False,
        ValueError,
        "rank 1 has a state on the first rank alone (rank0_only=True), sent over all ranks",
    ),
}


def _asks(context: RankContext, case: str, spoiled: int) -> list[str]:
    change, loads, mesh, _, _ = SETTINGS[case]
    given = {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2,))} if mesh else {}
    model = wrapped(**given)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    with form(model, FULL):
        found = FSDP.optim_state_dict(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    if context.rank == spoiled:
        change(model)
    calls: dict[bool, Callable[[], Any]] = {
        False: lambda: FSDP.optim_state_dict(model, optimizer),
        True: lambda: FSDP.optim_state_dict_to_load(model, optimizer, found, load_directly=True),
    }
    error = error_of(calls[loads])
    assert_equal(optimizer.state_dict()["state"], before["state"])
    return error


@pytest.mark.parametrize("case", SETTINGS)
def test_other_settings_on_one_rank_are_refused_on_all(case: str) -> None:
    *_, kind, fragment = SETTINGS[case]
    named_on_every_rank(on_ranks(_asks, 2, case=case, spoiled=1), kind, fragment)


def _scatters(context: RankContext) -> list[str]:
    """One rank has the state, the other believes that both have."""
    model = wrapped()
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    found = FSDP.optim_state_dict(model, optimizer)
    with quiet():
        if context.rank == 0:
            return error_of(lambda: FSDP.scatter_full_optim_state_dict(found, model))
        return error_of(lambda: FSDP.shard_full_optim_state_dict(found, model))


def test_older_verbs_that_take_a_state_from_elsewhere_do_not_wait() -> None:
    found = on_ranks(_scatters, 2)
    named_on_every_rank(found, ValueError, "rank 0 has a state on the first rank alone")
    named_on_every_rank(found, ValueError, "rank 1 has a state on every rank (rank0_only=False)")


def _broadcasts(context: RankContext) -> list[str]:
    """One rank sends the state of a model, and the other believes that both have it."""
    model = wrapped()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=context.rank == 0)
    state = build().state_dict()
    return error_of(lambda: checkpoint.set_model_state_dict(model, state, options=options))


def test_a_model_state_is_sent_to_all_or_to_none() -> None:
    found = on_ranks(_broadcasts, 2)
    named_on_every_rank(found, ValueError, "rank 0 has broadcast_from_rank0=True, rank 1 has")


def _loads_forms(context: RankContext, *, other: str, mesh: bool) -> list[str]:
    """Rank 1 has one entry in another form than the chunks that rank 0 has."""
    given = {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2,))} if mesh else {}
    model = wrapped(use_orig_params=True, **given)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    with form(model, FULL):
        whole = FSDP.optim_state_dict(model, optimizer)["state"][WEIGHT]["exp_avg"]
    with form(model, SHARDED):
        found = FSDP.optim_state_dict(model, optimizer)
        if context.rank == 1:
            found["state"][WEIGHT]["exp_avg"] = whole.to("meta") if other == "meta" else whole
        elif other == "meta":
            found["state"][WEIGHT]["exp_avg"] = whole
        return error_of(lambda: FSDP.optim_state_dict_to_load(model, optimizer, found))


@pytest.mark.parametrize(
    ("other", "mesh", "text"),
    [
        ("whole", False, "ShardedTensor of 2 shards, rank 1 has exp_avg of"),
        ("whole", True, "DTensor [Shard(dim=0)] on a mesh of (2,), rank 1 has exp_avg of"),
        ("meta", False, "whole tensor, rank 1 has exp_avg of"),
    ],
    ids=["sharded", "dtensor", "meta"],
)
def test_a_value_in_another_form_on_one_rank_is_named(other: str, text: str, *, mesh: bool) -> None:
    found = on_ranks(_loads_forms, 2, other=other, mesh=mesh)
    named_on_every_rank(found, ValueError, f"torch.float32 {text} '{WEIGHT}' (13, 10)")


def _from_the_first(context: RankContext) -> None:
    """Where the first rank alone has the state, what it has and what is told of it agree."""
    model = wrapped(use_orig_params=True)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    with form(model, FULL, rank0_only=True):
        found = FSDP.optim_state_dict(model, optimizer)
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, found)
    assert_equal(loaded["state"], optimizer.state_dict()["state"])
    assert torch.is_tensor(next(iter(loaded["state"].values()))["exp_avg"])


def test_what_the_first_rank_sends_needs_no_form() -> None:
    on_ranks(_from_the_first, 2)

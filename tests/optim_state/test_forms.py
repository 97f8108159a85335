"""In which form optimizer states come: whole, in chunks, on which device, on which ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from conformance.ranks import RankContext
from fsdp import ShardingStrategy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.ranks import count, error_of, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import (
    FULL,
    LOCAL,
    SHARDED,
    assert_equal,
    form,
    optimizer_for,
    params_of,
    step,
    two_groups,
    wrapped,
)


def _trained(context: RankContext, *, original: bool, **given: Any) -> Any:
    model = wrapped(use_orig_params=original, **given)
    optimizer = optimizer_for(model, "adam", two_groups)
    for number in range(2):
        step(model, optimizer, number, context.rank)
    return model, optimizer


def chunk_of(value: torch.Tensor) -> torch.Tensor:
    """This rank's chunk, whatever the form."""
    if isinstance(value, DTensor):
        return value.to_local()
    shards = value.local_shards()  # type: ignore[attr-defined]
    return shards[0].tensor if shards else torch.empty(0, *value.size()[1:])


def _chunks(context: RankContext, kind: str, *, original: bool, offload: bool) -> None:
    """Chunks are the rows of the whole; they load into a model of the same world."""
    mesh = init_device_mesh("cpu", (context.world_size,))
    given = {"device_mesh": mesh} if kind == "mesh" else {}
    form_kind = LOCAL if kind == "local" else SHARDED
    model, optimizer = _trained(context, original=original, **given)
    full = FSDP.optim_state_dict(model, optimizer)
    with form(model, form_kind, offload_to_cpu=offload):
        found = FSDP.optim_state_dict(model, optimizer)
    assert list(found["state"]) == list(full["state"])
    assert found["param_groups"] == full["param_groups"]
    for name, entry in found["state"].items():
        assert list(entry) == list(full["state"][name])
        for state, value in entry.items():
            whole = full["state"][name][state]
            if state == "step":
                assert type(value) is torch.Tensor
                assert torch.equal(value, whole)
                continue
            assert isinstance(value, DTensor) == (kind == "mesh")
            assert value.size() == whole.size()
            rows = -(-whole.shape[0] // context.world_size)
            start = rows * context.rank
            assert torch.equal(chunk_of(value), whole[start : start + rows])
            if isinstance(value, DTensor):
                assert value.placements == (Shard(0),)
                assert value.device_mesh == mesh
    other = wrapped(use_orig_params=not original, **given)
    other.load_state_dict(model.state_dict())
    fresh = optimizer_for(other, "adam", two_groups, lr=0.9)
    with form(other, form_kind):
        FSDP.optim_state_dict_to_load(other, fresh, found, load_directly=True)
    again = FSDP.optim_state_dict(other, fresh)
    assert_equal(again["state"], full["state"])
    step(model, optimizer, 5, context.rank)
    step(other, fresh, 5, context.rank)
    mine, theirs = params_of(model), params_of(other)
    for key, value in mine.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-6, atol=1e-6)


@ORIGINAL
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "stay"])
@pytest.mark.parametrize("kind", ["groups", "mesh", "local"])
def test_chunks_are_the_rows_of_the_whole_and_load(
    kind: str, *, original: bool, offload: bool
) -> None:
    on_ranks(_chunks, 3, kind=kind, original=original, offload=offload)


def _hybrid(context: RankContext, *, original: bool, pair: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    given: dict[str, Any] = {"process_group": groups} if pair else {"device_mesh": mesh}
    given["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    model, optimizer = _trained(context, original=original, **given)
    full = FSDP.optim_state_dict(model, optimizer)
    with form(model, SHARDED):
        found = FSDP.optim_state_dict(model, optimizer)
    value = found["state"]["inp.weight"]["exp_avg"]
    rows = value.size()[0] // 2
    whole = full["state"]["inp.weight"]["exp_avg"]
    start = rows * (context.rank % 2)
    assert torch.equal(chunk_of(value), whole[start : start + rows])
    if not pair:
        assert value.placements == (Replicate(), Shard(0))
    with form(model, FULL, rank0_only=True):
        only = FSDP.optim_state_dict(model, optimizer)
    assert bool(only) == (context.rank == 0)
    other = wrapped(use_orig_params=original, **given)
    fresh = optimizer_for(other, "adam", two_groups)
    with form(other, SHARDED):
        FSDP.optim_state_dict_to_load(other, fresh, found, load_directly=True)
    assert_equal(FSDP.optim_state_dict(other, fresh)["state"], full["state"])
    third = optimizer_for(other, "adam", two_groups)
    with form(other, FULL, rank0_only=True):
        FSDP.optim_state_dict_to_load(other, third, only, load_directly=True)
    assert_equal(FSDP.optim_state_dict(other, third)["state"], full["state"])


@ORIGINAL
@pytest.mark.parametrize("pair", [False, True], ids=["mesh", "pair"])
def test_replicas_save_and_load_the_same(*, original: bool, pair: bool) -> None:
    on_ranks(_hybrid, 4, original=original, pair=pair)


def _stays(context: RankContext, *, original: bool) -> int:
    """What stays on the device is what is moved to the host, whichever way it was put together."""
    model, optimizer = _trained(context, original=original)
    full = FSDP.optim_state_dict(model, optimizer)
    before = count(context, "broadcast")
    with form(model, FULL, offload_to_cpu=False):
        found = FSDP.optim_state_dict(model, optimizer)
    assert found["param_groups"] == full["param_groups"]
    assert list(found["state"]) == list(full["state"])
    assert_equal(found["state"], full["state"])
    return count(context, "broadcast") - before


@ORIGINAL
@pytest.mark.parametrize("world", [2, 3])
def test_what_stays_on_the_device_is_what_is_moved(*, world: int, original: bool) -> None:
    # The last states of the last units are sent to their place, and not all of them are.
    sent = on_ranks(_stays, world, original=original)
    assert min(sent) > 0


def _apart(context: RankContext, *, original: bool, offload: bool, no_shard: bool) -> None:
    """The result has memory of its own: training on does not change it."""
    given = {"sharding_strategy": ShardingStrategy.NO_SHARD} if no_shard else {}
    model, optimizer = _trained(context, original=original, **given)
    with form(model, FULL, offload_to_cpu=offload):
        first = FSDP.optim_state_dict(model, optimizer)
        kept = {
            name: {state: value.clone() for state, value in entry.items()}
            for name, entry in first["state"].items()
        }
        step(model, optimizer, 7, context.rank)
    assert_equal(first["state"], kept)
    values = [value for entry in first["state"].values() for value in entry.values()]
    for value in values:
        assert value.device.type == "cpu"
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert len({value.data_ptr() for value in values}) == len(values), "each has its own"


@ORIGINAL
@pytest.mark.parametrize("no_shard", [False, True], ids=["sharded", "no_shard"])
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "stay"])
def test_a_saved_state_does_not_change_with_the_optimizer(
    *, original: bool, offload: bool, no_shard: bool
) -> None:
    on_ranks(_apart, 2, original=original, offload=offload, no_shard=no_shard)


@ORIGINAL
def test_a_state_that_one_rank_saves_does_not_change_with_the_optimizer(*, original: bool) -> None:
    on_ranks(_apart, 1, original=original, offload=False, no_shard=False)


def _given_stays(context: RankContext, *, original: bool, no_shard: bool) -> None:
    """An optimizer steps on what it has loaded, not on what it was given."""
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD} if no_shard else {}
    model, optimizer = _trained(context, original=original, **options)
    given = FSDP.optim_state_dict(model, optimizer)
    kept = copy.deepcopy(given["state"])
    fresh = optimizer_for(model, "adam", two_groups)
    FSDP.optim_state_dict_to_load(model, fresh, given, load_directly=True)
    step(model, fresh, 7, context.rank)
    assert_equal(given["state"], kept)


@ORIGINAL
@pytest.mark.parametrize("no_shard", [False, True], ids=["sharded", "no_shard"])
def test_a_state_that_was_loaded_does_not_change_with_the_optimizer(
    *, original: bool, no_shard: bool
) -> None:
    on_ranks(_given_stays, 2, original=original, no_shard=no_shard)


def _nothing_cut(context: RankContext, *, original: bool, no_shard: bool) -> None:
    given = {"sharding_strategy": ShardingStrategy.NO_SHARD} if no_shard else {}
    model, optimizer = _trained(context, original=original, **given)
    full = FSDP.optim_state_dict(model, optimizer)
    with form(model, SHARDED):
        found = FSDP.optim_state_dict(model, optimizer)
        assert all(type(v) is torch.Tensor for e in found["state"].values() for v in e.values())
        assert_equal(found["state"], full["state"])
        other = optimizer_for(model, "adam", two_groups)
        FSDP.optim_state_dict_to_load(model, other, found, load_directly=True)
    assert_equal(FSDP.optim_state_dict(model, other)["state"], full["state"])


@ORIGINAL
@pytest.mark.parametrize(("world", "no_shard"), [(1, False), (2, True)], ids=["alone", "replicas"])
def test_without_shards_nothing_is_cut(world: int, *, original: bool, no_shard: bool) -> None:
    on_ranks(_nothing_cut, world, original=original, no_shard=no_shard)


def _first_only(context: RankContext, *, original: bool) -> None:
    """The first rank alone saves, and alone has what is loaded; its dict stays what it was."""
    model, optimizer = _trained(context, original=original)
    full = FSDP.optim_state_dict(model, optimizer)
    other = optimizer_for(model, "adam", two_groups)
    with form(model, FULL, rank0_only=True):
        found = FSDP.optim_state_dict(model, optimizer)
        assert bool(found) == (context.rank == 0)
        FSDP.optim_state_dict_to_load(model, other, found, load_directly=True)
    if context.rank == 0:
        assert_equal(found["state"], full["state"])
    again = FSDP.optim_state_dict(model, other)
    assert_equal(again["state"], full["state"])
    assert again["param_groups"] == full["param_groups"]
    for param, entry in other.state.items():
        assert {value.device for value in entry.values()} == {param.device}


@ORIGINAL
def test_the_first_rank_alone_can_save_and_load(*, original: bool) -> None:
    on_ranks(_first_only, 2, original=original)


def _mesh_and_local(context: RankContext) -> tuple[list[str], list[str]]:
    mesh = init_device_mesh("cpu", (context.world_size,))
    model, optimizer = _trained(context, original=False, device_mesh=mesh)
    with form(model, LOCAL):
        return (
            error_of(lambda: FSDP.optim_state_dict(model, optimizer)),
            error_of(lambda: FSDP.optim_state_dict_to_load(model, optimizer, {})),
        )


def test_local_states_and_a_mesh_are_refused() -> None:
    for errors in on_ranks(_mesh_and_local, 2):
        for name, text in errors:
            assert name == "RuntimeError"
            assert "DeviceMesh is not compatible with LOCAL_STATE_DICT" in text


GATHERS = "all_gather"


def _counted(context: RankContext, name: str, *, original: bool) -> list[int]:
    """All-gathers of a save, beyond those of one without any state."""
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, name)
    counts = []
    for number in range(2):
        before = _gathers(context)
        FSDP.optim_state_dict(model, optimizer)
        counts.append(_gathers(context) - before)
        step(model, optimizer, number, context.rank)
    return [counts[1] - counts[0], len(FSDP.fsdp_modules(model))]


def _gathers(context: RankContext) -> int:
    return sum(
        count(context, op)
        for op in {r.op for r in context.recorder.records if "all_gather" in r.op}
    )


@ORIGINAL
@pytest.mark.parametrize(("name", "states"), [("sgd", 1), ("adamw", 2), ("adam", 3)])
def test_a_save_gathers_once_per_unit_and_state(name: str, states: int, *, original: bool) -> None:
    for more, units in on_ranks(_counted, 2, name=name, original=original):
        assert more == states * units

"""States of a model that is cut by tensor parallelism, and cut again by the wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from conformance.ranks import RankContext
from fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    get_state_dict,
    set_state_dict,
)
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import load, save
from tests.fsdp.parallel import (
    PLAN,
    Block,
    Net,
    assert_equal,
    data_rank,
    square,
    train,
    train_plain,
    whole_parameters,
    wrapped,
)
from tests.fsdp.plain import build, optimizer_of
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks

LONG = pytest.mark.long
KINDS = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(got: Mapping[str, Any], want: Mapping[str, Any], tolerance: float = 2e-6) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(
            whole(got[name]).detach(),
            value.detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def plain_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    names = [name for name, _ in model.named_parameters()]
    return {names[number]: entry for number, entry in optimizer.state_dict()["state"].items()}


def same_entries(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert sorted(got) == sorted(want)
    for name, entry in want.items():
        assert sorted(got[name]) == sorted(entry), name
        same({key: got[name][key] for key in entry}, entry, 5e-6)


def _model_states(context: RankContext, *, original: bool, replicas: bool) -> list[str]:
    """Whole states are the plain model's, bit for bit; sharded ones are parts of them."""
    mesh = square()
    given = {"sharding_strategy": ShardingStrategy.NO_SHARD} if replicas else {}
    model, plain = wrapped(mesh, use_orig_params=original, **given), build(Net)
    want = plain.state_dict()
    with FSDP.state_dict_type(model, FULL):
        found = model.state_dict()
    assert {type(value) for value in found.values()} == {torch.Tensor}
    same(found, want, 0)
    for value in found.values():
        value.fill_(7)  # and changes nothing
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(True, True)):
        found = model.state_dict()
    assert bool(found) is (context.rank < 2)
    if found:
        same(found, want, 0)
    forms: dict[str, str] = {}
    for offload in (False, True):
        with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=offload)):
            found = model.state_dict()
        same(found, want, 0)
        forms |= {key: str(getattr(value, "placements", "plain")) for key, value in found.items()}
    with FSDP.summon_full_params(model), FSDP.state_dict_type(model, FULL):
        same(model.state_dict(), want, 0)
    return [f"{key} {form}" for key, form in forms.items() if "blocks.1" not in key]


@pytest.mark.parametrize("replicas", [False, pytest.param(True, marks=LONG)])
@pytest.mark.parametrize("original", [pytest.param(False, marks=LONG), True])
def test_model_states_are_those_of_the_plain_model(*, original: bool, replicas: bool) -> None:
    found = agreed(_model_states, 4, original=original, replicas=replicas)
    if not replicas:
        assert found == [
            "blocks.0.up.weight (_StridedShard(dim=0, sf=2), Shard(dim=0))",
            "blocks.0.up.bias (_StridedShard(dim=0, sf=2), Shard(dim=0))",
            "blocks.0.down.weight (Shard(dim=0), Shard(dim=1))",
            "blocks.0.down.bias (Shard(dim=0), Replicate())",
            "blocks.0.norm.weight (Shard(dim=0), Replicate())",
            "blocks.0.norm.bias (Shard(dim=0), Replicate())",
            "out.weight (Shard(dim=0),)",
            "out.bias (Shard(dim=0),)",
        ]
    assert len(found) == 8


def _other_form(value: torch.Tensor, form: str, mesh: Any) -> torch.Tensor:
    """A whole tensor in one of the forms in which others save it."""
    if form == "whole":
        return value
    if form == "tensor_parallel":  # as a plain model of tensor parallelism, on torch's wrapper too
        return distribute_tensor(value, mesh["tp"], [Shard(0)], src_data_rank=None)
    if form == "two_dims":  # as torch's wrapper
        return distribute_tensor(value, mesh, [Shard(0), Shard(0)], src_data_rank=None)
    return distribute_tensor(value, mesh, [Replicate(), Replicate()], src_data_rank=None)


def _loaded(context: RankContext, *, original: bool, kind: str, form: str) -> list[str]:
    mesh = square()
    model, other = wrapped(mesh, use_orig_params=original), build(Net)
    train_plain(other, 1, 0, steps=1)
    state = {
        # A plain parameter that is whole takes what any plain parameter does.
        key: _other_form(
            value, "whole" if kind == "FULL_STATE_DICT" and "out" in key else form, mesh
        )
        for key, value in other.state_dict().items()
    }
    with FSDP.state_dict_type(model, StateDictType[kind]):
        result = model.load_state_dict(state)
    assert_equal(model, other, 0)
    state.pop("blocks.0.up.weight")
    state["blocks.0.up.bias"] = torch.ones(4)
    with FSDP.state_dict_type(model, StateDictType[kind]):
        missing = error_of(lambda: model.load_state_dict(state))
    assert missing[0] == "RuntimeError"
    assert "size mismatch for" in missing[1]
    assert_equal(model, other, 0)
    return [str(result)]


@LONG
@KINDS
@pytest.mark.parametrize("kind", [FULL.name, SHARDED.name])
@pytest.mark.parametrize("form", ["whole", "tensor_parallel", "two_dims", "replicas"])
def test_a_load_takes_any_form(*, original: bool, kind: str, form: str) -> None:
    found = agreed(_loaded, 4, original=original, kind=kind, form=form)
    assert found == ["<All keys matched successfully>"]


def _own_form(context: RankContext) -> list[int]:
    """What was saved is loaded again; nobody gathers."""
    mesh = square()
    model = wrapped(mesh)
    train(model, data_rank(context, mesh), steps=1)
    other = wrapped(mesh)
    with FSDP.state_dict_type(model, SHARDED), FSDP.state_dict_type(other, SHARDED):
        state = model.state_dict()
        other.load_state_dict(state)
        start = len(context.recorder.records)
        other.load_state_dict(state)
        records = context.recorder.records[start:]
        again = other.state_dict()
    for key, value in state.items():
        assert torch.equal(whole(again[key]), whole(value)), key
    largest = max(record.bytes for record in records if record.op == "all_gather")
    return [largest, sum(record.op == "all_to_all" for record in records)]


@LONG
def test_what_was_saved_in_parts_is_loaded_in_parts() -> None:
    # Sixteen bytes of each rank of a pair, to agree; and one exchange per unit.
    assert agreed(_own_form, 4) == [32, 3]


class Counted(Block):
    """Modules that change what they save, and expect whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_twice)
        self.register_load_state_dict_pre_hook(_half)


def _twice(module: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
    found[f"{prefix}up.weight"] = found[f"{prefix}up.weight"] * 2
    found[f"{prefix}renamed"] = found.pop(f"{prefix}down.weight")


def _half(module: nn.Module, found: dict[str, Any], prefix: str, *_: Any) -> None:
    found[f"{prefix}up.weight"] = found[f"{prefix}up.weight"] / 2
    found[f"{prefix}down.weight"] = found.pop(f"{prefix}renamed")


def _hooked(context: RankContext, *, kind: str) -> str:
    mesh = square()
    plain = build(Counted)

    def make() -> FSDP:
        model = nn.Sequential(build(Counted))
        parallelize_module(model[0], mesh["tp"], PLAN)
        return wrapped(mesh, model)

    model = make()
    with FSDP.state_dict_type(model, StateDictType[kind]):
        found = model.state_dict()
    same(
        {key.removeprefix("0."): whole(value) for key, value in sorted(found.items())},
        dict(sorted(plain.state_dict().items())),
        0,
    )
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with FSDP.state_dict_type(model, StateDictType[kind]):
        model.load_state_dict(found)
        again = model.state_dict()
    same(dict(again), {key: whole(value) for key, value in found.items()}, 0)
    return str(getattr(found["0.renamed"], "placements", "plain"))


@LONG
@pytest.mark.parametrize(
    ("kind", "form"),
    [(FULL.name, "plain"), (SHARDED.name, "(Shard(dim=0), Shard(dim=1))")],
    ids=["full", "sharded"],
)
def test_modules_may_change_what_they_save(*, kind: str, form: str) -> None:
    assert agreed(_hooked, 4, kind=kind) == form


def _local(context: RankContext) -> list[str]:
    mesh = square()
    model = wrapped(mesh)
    optimizer = optimizer_of(model.parameters())
    with FSDP.state_dict_type(model, LOCAL):
        model_error = error_of(model.state_dict)
        optim_error = error_of(lambda: FSDP.optim_state_dict(model, optimizer))
    assert model_error == optim_error
    return model_error


@LONG
def test_there_is_no_local_form_on_a_mesh() -> None:
    errors = on_ranks(_local, 4)
    named_on_every_rank(errors, RuntimeError, "DeviceMesh is not compatible with LOCAL_STATE_DICT.")


# Optimizers


def _optimizer_states(context: RankContext, *, original: bool, replicas: bool) -> list[str]:
    mesh = square()
    given = {"sharding_strategy": ShardingStrategy.NO_SHARD} if replicas else {}
    model, plain = wrapped(mesh, use_orig_params=original, **given), build(Net)
    rank = data_rank(context, mesh)
    _, optimizer = train(model, rank, kind="adamw")
    _, other = train_plain(plain, 2, rank, kind="adamw")
    want = plain_state(other, plain)
    forms: dict[str, str] = {}
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            found = FSDP.optim_state_dict(model, optimizer)
            again = FSDP.optim_state_dict_to_load(model, optimizer, found)
        same_entries(found["state"], want)
        mine = optimizer.state_dict()["state"]
        assert sorted(again["state"]) == sorted(n for n, entry in mine.items() if entry)
        for number, entry in again["state"].items():
            for key, value in entry.items():
                assert torch.equal(value, mine[number][key]), (kind, number, key)
        forms |= {
            f"{name} {kind.name}": str(getattr(entry["exp_avg"], "placements", "whole"))
            for name, entry in found["state"].items()
        }
    # A plain model's state, of which one rank alone has to know.
    names = [name for name, _ in plain.named_parameters()]
    groups = [{**other.state_dict()["param_groups"][0], "params": names}]
    full = {"state": want, "param_groups": groups} if context.rank == 0 else {}
    alone = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(), alone):
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, full)
        optimizer.load_state_dict(loaded)
        everyone = torch.distributed.group.WORLD
        found = FSDP.optim_state_dict(model, optimizer, group=everyone)
        pairs = FSDP.optim_state_dict(model, optimizer)
    assert bool(found) is (context.rank == 0)
    assert bool(pairs) is (context.rank < 2)
    for each in filter(None, (found, pairs)):
        same_entries(each["state"], want)
    return [f"{key} {form}" for key, form in sorted(forms.items()) if "up.weight" in key]


@LONG
@pytest.mark.parametrize("replicas", [False, True])
@KINDS
def test_optimizer_states_are_those_of_the_plain_optimizer(
    *, original: bool, replicas: bool
) -> None:
    found = agreed(_optimizer_states, 4, original=original, replicas=replicas)
    sharded = "whole" if replicas else "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    for number in range(2):
        name = f"blocks.{number}.up.weight"
        assert f"{name} FULL_STATE_DICT whole" in found
        assert f"{name} SHARDED_STATE_DICT {sharded}" in found


def _resumed(context: RankContext, *, kind: str, original: bool, full: bool) -> None:
    """Save, load into a fresh model and optimizer, one step: the uninterrupted step."""
    mesh = square()
    rank = data_rank(context, mesh)
    model, fresh = wrapped(mesh, use_orig_params=original), wrapped(mesh, use_orig_params=original)
    _, optimizer = train(model, rank, kind=kind)
    other = optimizer_of(fresh.parameters(), kind)
    options = StateDictOptions(full_state_dict=full, cpu_offload=full, broadcast_from_rank0=full)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    if full:
        assert bool(model_state) is bool(optim_state) is (context.rank < 2)
        if context.rank:
            model_state, optim_state = {}, {}
    set_state_dict(
        fresh,
        other,
        model_state_dict=model_state,
        optim_state_dict=optim_state,
        options=options,
    )
    losses, _ = train(model, rank, steps=1, first=2, optimizer=optimizer)
    again, _ = train(fresh, rank, steps=1, first=2, optimizer=other)
    assert losses == again
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)


@LONG
@KINDS
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "from_rank0"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_training_goes_on_bit_for_bit(*, kind: str, original: bool, full: bool) -> None:
    agreed(_resumed, 4, kind=kind, original=original, full=full)


def _through_files(context: RankContext, *, directory: str) -> list[str]:
    mesh = square()
    model = wrapped(mesh)
    train(model, data_rank(context, mesh), steps=1)
    with FSDP.state_dict_type(model, SHARDED):
        dcp.save(model.state_dict(), checkpoint_id=directory)
        other = wrapped(mesh, use_orig_params=True)
        with FSDP.state_dict_type(other, SHARDED):
            state = other.state_dict()
            dcp.load(state, checkpoint_id=directory)
            other.load_state_dict(state)
    plain = build(Net)
    with FSDP.state_dict_type(model, FULL):
        plain.load_state_dict(model.state_dict())
    assert_equal(other, plain, 0)
    bare = {key: torch.empty_like(value) for key, value in plain.state_dict().items()}
    dcp.load(bare, checkpoint_id=directory)
    same(bare, plain.state_dict(), 0)
    return sorted(bare)[:1]


@LONG
def test_a_sharded_state_goes_through_a_checkpoint_of_torch(tmp_path: Path) -> None:
    found = agreed(_through_files, 4, directory=str(tmp_path / "saved"))
    assert found == ["blocks.0.down.bias"]


def _through_directory(context: RankContext, *, directory: str, original: bool) -> None:
    """Save, load into the other kind, one step: the uninterrupted step."""
    mesh = square()
    rank = data_rank(context, mesh)
    model, other = wrapped(mesh, use_orig_params=original), wrapped(mesh, use_orig_params=True)
    _, optimizer = train(model, rank, kind="adamw")
    fresh = optimizer_of(other.parameters(), "adamw")
    save(directory, model, optimizer)
    load(directory, other, fresh)
    losses, _ = train(model, rank, steps=1, first=2, optimizer=optimizer)
    again, _ = train(other, rank, steps=1, first=2, optimizer=fresh)
    assert losses == again
    ours, theirs = whole_parameters(model), whole_parameters(other)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@LONG
@KINDS
def test_training_goes_on_from_a_directory(*, original: bool, tmp_path: Path) -> None:
    directory = str(tmp_path / "saved")
    on_ranks(_through_directory, 4, directory=directory, original=original)

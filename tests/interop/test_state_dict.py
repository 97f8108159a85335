"""States of our wrapper and of torch's are the same, and load into each other."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TheirPolicy
from torch.distributed.tensor import DTensor

import fsdp as our_fsdp
from conformance.ranks import RankContext
from fsdp.wrap import ModuleWrapPolicy as OurPolicy
from tests.fsdp.ranks import on_ranks
from tests.state_dict import cells

OURS = SimpleNamespace(package=our_fsdp, policy=OurPolicy)
THEIRS = SimpleNamespace(package=torch_fsdp, policy=TheirPolicy)
CONFIGS = {
    "FULL_STATE_DICT": "FullStateDictConfig",
    "LOCAL_STATE_DICT": "LocalStateDictConfig",
    "SHARDED_STATE_DICT": "ShardedStateDictConfig",
}
KIND = pytest.mark.parametrize("kind", CONFIGS, ids=("full", "local", "sharded"))


def _make(side: Any, seed: int, cell: dict[str, Any], **given: Any) -> Any:
    model = cells.plain(seed=seed, buffers=True)
    if cell.get("checkpointed"):
        model = cells.checkpointed(model)
    strategy = cell.get("strategy", "FULL_SHARD")
    mixed = side.package.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return side.package.FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            auto_wrap_policy=side.policy({cells.Block}),
            use_orig_params=cell["original"],
            mixed_precision=mixed if cell.get("low") else None,
            sharding_strategy=side.package.ShardingStrategy[strategy],
            **given,
        )


def _call(side: Any, model: Any, kind: str, *load: Any, **config: Any) -> Any:
    """Save, or load what is given."""
    package = side.package
    kept = getattr(package, CONFIGS[kind])(**config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with package.FullyShardedDataParallel.state_dict_type(
            model, package.StateDictType[kind], kept
        ):
            return model.load_state_dict(*load) if load else model.state_dict()


def _facts(state: dict[str, Any]) -> dict[str, Any]:
    """All that can be told of the values without communication."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        facts = [type(value).__name__, tuple(value.size()), value.dtype, str(value.device)]
        if isinstance(value, ShardedTensor):
            metadata = value.metadata()
            facts += [
                (list(each.shard_offsets), list(each.shard_sizes), str(each.placement))
                for each in metadata.shards_metadata
            ]
            # That of a local value depends on what autograd was doing in torch's.
            facts.append(dataclasses.replace(metadata.tensor_properties, requires_grad=False))
        if isinstance(value, DTensor):
            facts += [value.device_mesh, value.placements, value.stride(), value.to_local().shape]
        found[name] = facts
    return found


def _same(context: RankContext, kind: str, cell: dict[str, Any]) -> None:
    given: dict[str, Any] = {}
    if cell.get("mesh"):
        given["device_mesh"] = init_device_mesh("cpu", (context.world_size,))
    if cell.get("strategy") == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
        given = {"device_mesh": mesh} if cell["mesh"] else {"process_group": groups}
    models = [_make(side, 7, cell, **given) for side in (OURS, THEIRS)]
    for model in models:
        cells.step(model, context.rank)
    config = {name: cell[name] for name in ("offload_to_cpu", "rank0_only") if name in cell}
    ours, theirs = (
        _call(side, model, kind, **config)
        for side, model in zip((OURS, THEIRS), models, strict=True)
    )
    assert list(ours) == list(theirs)
    compared = list(ours)
    if kind == "LOCAL_STATE_DICT" and cell.get("low"):
        # Torch leaves buffers cast in this form.
        compared = [name for name, value in ours.items() if isinstance(value, ShardedTensor)]
    mine, other = ({name: state[name] for name in compared} for state in (ours, theirs))
    assert _facts(mine) == _facts(other)
    cells.same(cells.locals_of(mine), cells.locals_of(other))
    if cell.get("rank0_only"):
        return
    wanted = _call(THEIRS, models[1], "FULL_STATE_DICT")
    for side, state in ((OURS, theirs), (THEIRS, ours)):
        other = _make(side, 8, cell, **given)
        assert str(_call(side, other, kind, state)) == "<All keys matched successfully>"
        cells.same(_call(side, other, "FULL_STATE_DICT"), wanted)


def _cells() -> list[Any]:
    axes = {"original": (False, True), "low": (False, True), "checkpointed": (False, True)}
    found = []
    for kind, values in itertools.product(CONFIGS, itertools.product(*axes.values())):
        cell = dict(zip(axes, values, strict=True))
        if kind == "LOCAL_STATE_DICT" and cell["original"]:
            continue  # torch's cannot be loaded
        meshes = (False, True) if kind == "SHARDED_STATE_DICT" else (False,)
        quick = cell["low"] == cell["checkpointed"] == cell["original"]
        marks = () if quick or not any(values) else (pytest.mark.long,)
        for mesh in meshes:
            words = [kind.split("_")[0].lower(), *(n for n, v in cell.items() if v)]
            id_ = "-".join([*words, *(["mesh"] if mesh else [])])
            found.append(pytest.param(kind, {**cell, "mesh": mesh}, id=id_, marks=marks))
    return found


@pytest.mark.parametrize(("kind", "cell"), _cells())
def test_a_state_of_either_loads_into_the_other(kind: str, cell: dict[str, Any]) -> None:
    on_ranks(_same, 3, kind=kind, cell=cell)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"], ids=["full", "sharded"])
@pytest.mark.parametrize("mesh", [False, True], ids=["groups", "mesh"])
def test_a_state_of_replicas_of_either_loads_into_the_other(kind: str, *, mesh: bool) -> None:
    cell = {"original": True, "strategy": "HYBRID_SHARD", "mesh": mesh}
    on_ranks(_same, 4, kind=kind, cell=cell)


@KIND
def test_a_state_without_shards_of_either_loads_into_the_other(kind: str) -> None:
    cell = {"original": False, "strategy": "NO_SHARD"}
    on_ranks(_same, 2, kind=kind, cell=cell)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_the_first_rank_alone_has_the_same_state(*, original: bool) -> None:
    cell = {"original": original, "rank0_only": True}
    on_ranks(_same, 2, kind="FULL_STATE_DICT", cell=cell)


def _who_gets_it(context: RankContext) -> list[list[bool]]:
    """Of four ranks, two replicas: who has a model state, an optimizer state, whole parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    found = []
    for side in (OURS, THEIRS):
        package, cell = side.package, {"original": False, "strategy": "HYBRID_SHARD"}
        wrapper, model = (
            package.FullyShardedDataParallel,
            _make(side, 7, cell, process_group=groups),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cells.loss_of(model, cells.batch(0, context.rank)).backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = _call(side, model, "FULL_STATE_DICT", rank0_only=True)
            optim = wrapper.full_optim_state_dict(model, optimizer, rank0_only=True)
            with wrapper.summon_full_params(model, rank0_only=True, writeback=False):
                shown = "inp.weight" in dict(model.named_parameters())
        found.append([bool(state), bool(optim), shown])
    return found


def test_one_rank_of_each_replica_is_the_first_for_models_and_one_of_all_for_optimizers() -> None:
    found = on_ranks(_who_gets_it, 4)
    for rank, (ours, theirs) in enumerate(found):
        assert ours == theirs == [rank in (0, 2), rank == 0, rank in (0, 2)]


def _unusual(context: RankContext, kind: str) -> None:
    """Tied weights, ignored modules and a parent that is no unit."""
    states = []
    for side in (OURS, THEIRS):
        torch.manual_seed(3)
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        inner[1].weight = inner[0].weight
        model = nn.Sequential(
            nn.Linear(4, 4),
            side.package.FullyShardedDataParallel(
                inner, device_id=torch.device("cpu"), ignored_modules=[inner[2]]
            ),
        )
        state = _call(side, model, kind)
        states.append((list(state), _facts(state), cells.locals_of(state)))
        load = {
            name: value.clone() if type(value) is torch.Tensor else value
            for name, value in state.items()
        }
        assert str(_call(side, model, kind, load)) == "<All keys matched successfully>"
    (keys, facts, values), (their_keys, their_facts, their_values) = states
    # Torch puts a tied parameter behind the others of its module.
    assert sorted(keys) == sorted(their_keys)
    for key in keys:
        assert facts[key] == their_facts[key], (key, facts[key], their_facts[key])
    cells.same(values, {key: their_values[key] for key in keys})


@KIND
def test_unusual_trees_have_the_same_state(kind: str) -> None:
    on_ranks(_unusual, 2, kind=kind)


def test_configurations_have_the_same_fields() -> None:
    names = [*CONFIGS.values(), *(name.replace("State", "OptimState") for name in CONFIGS.values())]
    for name in (*names, "StateDictConfig", "OptimStateDictConfig"):
        assert vars(getattr(our_fsdp, name)()) == vars(getattr(torch_fsdp, name)()), name
    assert [*our_fsdp.StateDictType.__members__] == [*torch_fsdp.StateDictType.__members__]

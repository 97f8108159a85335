"""Over which ranks: meshes of any origin, pure replication, hybrid beside tensor parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.ranks import RankContext
from fsdp import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    fully_shard,
)
from fsdp.engine.managed import move_to
from fsdp.engine.mesh import DataParallelMeshInfo, default_device
from tests.fsdp.plain import DIM, batch, build, compare, loss_of, train_plain, train_sharded, whole
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks
from tests.fsdp.test_parallel import Pair
from tests.fsdp.test_training import shard_blocks


def _from_groups(context: RankContext, dims: int) -> list[bool]:
    if dims == 1:
        shard = dist.group.WORLD
        mesh = DeviceMesh.from_group(shard, "cpu")
        groups = [shard]
    else:
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        shard = pairs[context.rank // 2]
        replicate = pairs[2 + context.rank % 2]
        mesh = DeviceMesh.from_group(
            [replicate, shard],
            "cpu",
            mesh=torch.arange(4).view(2, 2),
            mesh_dim_names=("replicate", "shard"),
        )
        groups = [shard, replicate]
    model = shard_blocks(build(), mesh=mesh)
    train_sharded(model, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    compare(model, plain)
    info = fully_shard.state(model).mesh_info
    return [
        got.group_name == want.group_name for got, want in zip(info.groups, groups, strict=True)
    ]


@pytest.mark.parametrize("dims", [1, 2])
def test_a_mesh_made_of_groups_uses_these_groups(dims: int) -> None:
    assert agreed(_from_groups, 2 * dims, dims=dims) == [True] * dims


def _replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    def spread(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            everywhere = [Replicate()] * mesh.ndim
            copy = distribute_tensor(param.detach(), mesh, everywhere)
            module.register_parameter(key, nn.Parameter(copy))

    return distribute_module(model, mesh, spread)


def _pure_replication(context: RankContext) -> list[Any]:
    """No dim to shard over: parameters stay whole, gradients are averaged."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, plain = _replicated(build(Pair), mesh), build(Pair)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if module is plain:
            return loss_of(module, x)
        out = module(DTensor.from_local(x, mesh, [Replicate()], run_check=False))
        return out.to_local().pow(2).mean()

    context.recorder.mark("train")
    train_sharded(model, context.rank, loss=loss)
    ops = {r.op for r in context.recorder.records if r.phase == "train"} - {"all_gather"}
    train_plain(plain, context.world_size, loss=loss)
    compare(model, plain)
    info = fully_shard.state(model).mesh_info
    return [type(info).__name__, sorted(ops), str(model.blocks[0].up.weight.placements)]


def test_without_a_dim_to_shard_gradients_are_averaged_over_replicas() -> None:
    kind, ops, placements = agreed(_pure_replication, 2)
    assert kind == "DDPMeshInfo"
    assert ops == ["all_reduce"]
    assert placements == "(Replicate(),)"


def _hybrid_tensor_parallel(context: RankContext) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model, plain = build(Pair), build(Pair)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    shard_blocks(model, mesh=mesh["replicate", "shard"])
    train_sharded(model, mesh["replicate"].get_local_rank())
    train_plain(plain, 2)
    compare(model, plain)
    saved = {name: whole(value) for name, value in model.state_dict().items()}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=2e-6, atol=2e-6)
    return [model.blocks[0].up.weight.device_mesh.ndim, len(saved)]


def test_hybrid_sharding_beside_tensor_parallelism() -> None:
    assert agreed(_hybrid_tensor_parallel, 4) == [3, 8]


def _largest_beside_tensor_parallel(context: RankContext) -> list[bool]:
    """Tensor parallelism cuts other dims of each parameter than the placement function."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, originals = build(Pair), dict(build(Pair).named_parameters())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)

    def largest(param: nn.Parameter) -> Shard:
        sizes = list(param.to_local().shape if isinstance(param, DTensor) else param.shape)
        return Shard(sizes.index(max(sizes)))

    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh["dp"], shard_placement_fn=largest)
    return [
        all(p.to_local().is_contiguous() for p in model.parameters()),
        all(torch.equal(p.full_tensor(), originals[n]) for n, p in model.named_parameters()),
    ]


def test_other_dims_than_those_of_tensor_parallelism_may_be_cut() -> None:
    assert agreed(_largest_beside_tensor_parallel, 4) == [True, True]


class Experts(nn.Module):
    """A dense layer and experts of which each rank of a pair holds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.expert = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.dense(x)))


def _experts(context: RankContext) -> list[bool]:
    """The expert is left alone by the outer unit and sharded over its own, smaller mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    expert_rank = mesh["ep"].get_local_rank()

    def make() -> Experts:
        model = build(Experts)
        with torch.no_grad():
            model.expert.weight.mul_(1 + expert_rank)  # another expert on each rank of a pair
        return model

    model, plain = make(), make()
    fully_shard(model.expert, mesh=mesh["edp"])
    flat = mesh["edp", "ep"]._flatten("dp")
    fully_shard(model, mesh=flat)
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(4):
        other = make() if rank % 2 == expert_rank else build(Experts)
        if rank % 2 != expert_rank:
            with torch.no_grad():
                other.expert.weight.mul_(2 - expert_rank)
        loss_of(other, batch(0, rank)).backward()
        for mine, theirs in zip(plain.dense.parameters(), other.dense.parameters(), strict=True):
            part = theirs.grad / 4
            mine.grad = part if mine.grad is None else mine.grad + part
        if rank % 2 == expert_rank:
            part = other.expert.weight.grad / 2
            grad = plain.expert.weight.grad
            plain.expert.weight.grad = part if grad is None else grad + part
    return [
        torch.allclose(whole(got.grad), want.grad, rtol=1e-5, atol=1e-6)
        for got, want in zip(model.parameters(), plain.parameters(), strict=True)
    ]


def test_experts_may_be_sharded_over_a_mesh_of_their_own() -> None:
    assert agreed(_experts, 4) == [True, True, True]


def _ignored_expert(context: RankContext) -> list[Any]:
    """Ignored parameters of one unit, all of a module: it is not managed, moved or reduced."""
    model = build(Experts)
    kept = set(model.expert.parameters())
    fully_shard(model, ignored_params=kept)
    loss_of(model, batch(0, context.rank)).backward()
    alone = build(Experts)
    loss_of(alone, batch(0, context.rank)).backward()
    names = [p.fqn for g in fully_shard.state(model).groups for p in g.fsdp_params]
    managed = [hasattr(m, "_is_fsdp_managed_module") for m in (model.dense, model.expert)]
    own = torch.allclose(model.expert.weight.grad, alone.expert.weight.grad)
    return [names, managed, own]


def test_an_ignored_expert_keeps_the_gradient_of_its_rank() -> None:
    assert agreed(_ignored_expert, 2) == [["dense.weight", "dense.bias"], [True, False], True]


def _edges_of_reshard(context: RankContext, size: int) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = shard_blocks(build(), reshard_after_forward=size)
    output = model(batch(0, context.rank))
    after = type(model.blocks[0].up.weight.data).__name__
    output.sum().backward()
    model.zero_grad()
    train_sharded(model, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    compare(model, plain)
    return [after, sum("reshard_after_forward=1" in str(w.message) for w in caught)]


@pytest.mark.parametrize(("size", "wanted"), [(1, ["Tensor", 1]), (2, ["DTensor", 0])])
def test_one_rank_means_keep_and_all_ranks_mean_reshard(size: int, wanted: list[Any]) -> None:
    assert agreed(_edges_of_reshard, 2, size=size) == wanted


def test_an_accelerator_that_torch_serves_and_the_machine_lacks_is_no_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def served(check_available: bool = False) -> torch.device | None:  # noqa: FBT001, FBT002
        return None if check_available else torch.device("meta")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", served)
    assert default_device() == torch.device("cpu")


def test_names_of_dims_are_a_tuple_however_given() -> None:
    dims = DataParallelMeshDims(shard=("a", "b"), replicate="c")
    assert (dims.shard_names, dims.replicate_names) == (("a", "b"), ("c",))
    assert DataParallelMeshDims(shard="a").replicate_names == ()


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))


def _two_infos() -> None:
    mesh = _mesh()["dp"]
    infos = [FSDPMeshInfo(mesh, shard_mesh_dim=0) for _ in range(2)]
    fully_shard(
        nn.Linear(4, 4),
        mesh=mesh,
        shard_placement_fn=lambda p: ShardPlacementResult(None, infos[p.ndim - 1]),
    )


def _replicas_only(*, whole_mesh: bool) -> None:
    mesh = _mesh()
    info = DDPMeshInfo(mesh["dp"], replicate_mesh_dim=0)
    if whole_mesh:
        dims = DataParallelMeshDims(replicate="dp")
        fully_shard(
            _replicated(nn.Linear(4, 4), mesh),
            mesh=mesh,
            dp_mesh_dims=dims,
            shard_placement_fn=lambda p: Shard(0),
        )
    fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: ShardPlacementResult(None, info))


def _sharded_on_dp() -> None:
    mesh, module = _mesh(), nn.Linear(4, 4)
    for name, param in list(module.named_parameters()):
        cut = distribute_tensor(param.detach(), mesh, [Shard(0), Replicate()])
        module.register_parameter(name, nn.Parameter(cut))
    fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def _other_mesh() -> None:
    module = _replicated(nn.Linear(4, 4), _mesh())
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    fully_shard(module, mesh=other, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def _int_on_named_mesh() -> None:
    mesh = _mesh()
    fully_shard(
        _replicated(nn.Linear(4, 4), mesh),
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
        reshard_after_forward=2,
    )


def _three_model_parallel_dims() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=("a", "b", "c", "dp"))
    fully_shard(_replicated(nn.Linear(4, 4), mesh["a", "b", "c"]), mesh=mesh["dp"])


def _elsewhere() -> None:
    tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Replicate()])
    move_to([tensor], torch.device("meta"))


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "two_infos": (_two_infos, ValueError, "must use the same FSDPMeshInfo object"),
    "ddp_info": (
        lambda: _replicas_only(whole_mesh=False),
        ValueError,
        "it shards over nothing",
    ),
    "ddp_mesh": (
        lambda: _replicas_only(whole_mesh=True),
        ValueError,
        "is not supported with DDPMeshInfo",
    ),
    "sharded_on_dp": (_sharded_on_dp, ValueError, "Expected Replicate() on DP shard dim 'dp'"),
    "other_mesh": (_other_mesh, ValueError, "different mesh objects"),
    "int_on_named_mesh": (_int_on_named_mesh, NotImplementedError, "not yet supported with SPMD"),
    "model_parallel": (
        _three_model_parallel_dims,
        NotImplementedError,
        "FSDP only supports 1D TP/EP or 2D EP+TP",
    ),
    "elsewhere": (
        _elsewhere,
        ValueError,
        "mesh of the same type as the FSDP mesh but got cpu for DTensor and meta for FSDP",
    ),
    "no_role": (lambda: DataParallelMeshInfo(_mesh()), AssertionError, "At least one of"),
    "fsdp_role": (lambda: FSDPMeshInfo(_mesh(), None, 0), AssertionError, "shard_mesh_dim"),
    "ddp_role": (lambda: DDPMeshInfo(_mesh(), 0), AssertionError, "replicate_mesh_dim"),
    "hsdp_role": (lambda: HSDPMeshInfo(_mesh(), 0), AssertionError, "replicate_mesh_dim"),
    "unnamed_slice": (
        lambda: (
            HSDPMeshInfo(
                init_device_mesh("cpu", (1, 2)), shard_mesh_dim=1, replicate_mesh_dim=0
            ).shard_mesh
        ),
        AssertionError,
        "needs dim names to be sliced",
    ),
}


Errors = tuple[dict[str, list[str]], ...]


def _raise_all(context: RankContext) -> dict[str, list[str]]:
    return {name: error_of(call) for name, (call, *_) in CASES.items()}


@pytest.fixture(scope="module")
def errors() -> Errors:
    """Of every rank, the error of each case."""
    return on_ranks(_raise_all, 2)


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_that_does_not_fit_is_named_on_every_rank(case: str, errors: Errors) -> None:
    _, kind, fragment = CASES[case]
    named_on_every_rank(tuple(each[case] for each in errors), kind, fragment)


def _replicas_that_differ(context: RankContext) -> bool:
    """Each replica starts with other values; a broadcast over replicas makes them equal."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(context.rank // 2)
    model = nn.Linear(DIM, DIM)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    group = mesh.get_group("replicate")
    for param in model.parameters():
        dist.broadcast(param.to_local().detach(), src=context.rank % 2, group=group)
    same = all(torch.equal(whole(p), first[n]) for n, p in model.named_parameters())
    return same == (context.rank < 2)


def test_replicas_can_be_made_equal_by_a_broadcast_of_shards() -> None:
    assert agreed(_replicas_that_differ, 4) is True

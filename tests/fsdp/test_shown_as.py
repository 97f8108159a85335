"""On which mesh and in which dtype parameters are shown that are DTensors already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from conformance.ranks import RankContext
from fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from tests.fsdp.plain import DIM, batch, build
from tests.fsdp.ranks import agreed
from tests.fsdp.test_training import shard_blocks


def _distributed(mesh: Any, placements: Any) -> nn.Linear:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, placements))
    return linear


def _shown(context: RankContext) -> list[Any]:
    names = ("shard", "replica", "tp")
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=names)
    one = _distributed(mesh, [Replicate(), Replicate(), Shard(1)])
    dims = DataParallelMeshDims(shard="shard", replicate="replica")
    fully_shard(one, mesh=mesh, dp_mesh_dims=dims)
    other = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "model"))
    two = _distributed(other, [Replicate(), Replicate(), Shard(1)])
    fully_shard(two, mesh=other, dp_mesh_dims=DataParallelMeshDims(shard=("a", "b")))
    return [
        one.weight.device_mesh == mesh,
        one.weight.placements == (Shard(0), Replicate(), Shard(1)),
        two.weight.device_mesh.ndim,
        two.weight.placements == (Shard(0), Shard(1)),
    ]


def test_several_shard_dims_are_shown_as_one_and_a_single_one_where_it_is() -> None:
    assert agreed(_shown, 1) == [True, True, 2, True]


def _described(context: RankContext) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    linear = _distributed(mesh["tp"], [Shard(0)])
    fully_shard(linear, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    linear.unshard()
    weight = linear.weight
    return [str(weight.dtype), str(weight._spec.tensor_meta.dtype)]


def test_a_whole_parameter_is_described_in_the_dtype_that_it_has() -> None:
    assert agreed(_described, 1) == ["torch.bfloat16"] * 2


def _unsharded_first(context: RankContext) -> bool:
    model = shard_blocks(build())
    model.blocks[0].unshard()
    return model(batch(0, context.rank)).shape == (4, 3) and DIM == 10


def test_a_unit_may_be_gathered_before_the_first_forward() -> None:
    assert agreed(_unsharded_first, 2)


def _one_dtype(context: RankContext) -> bool:
    """Parameters of two dtypes are all computed with in the one of the policy."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model.bias = nn.Parameter(model.bias.detach().to(torch.float16), requires_grad=False)
    weight, bias = model.weight.detach().bfloat16(), model.bias.detach().bfloat16()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = torch.ones(2, 8)
    out = model(x)
    out.sum().backward()
    kept = model.weight.grad.dtype is torch.float32 and model.bias.grad is None
    return kept and torch.equal(out, nn.functional.linear(x.bfloat16(), weight, bias))


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_of_two_dtypes_are_cast_to_that_of_the_policy(world: int) -> None:
    assert agreed(_one_dtype, world)

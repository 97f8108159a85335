"""Beside tensor parallelism, on named meshes, with several meshes in one unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from conformance.ranks import RankContext
from fsdp import (
    AllGather,
    DataParallelMeshDims,
    FSDPMeshInfo,
    MixedPrecisionPolicy,
    ReduceScatter,
    ShardPlacementResult,
    fully_shard,
    share_comm_ctx,
)
from tests.fsdp.plain import DIM, batch, build, compare, loss_of, train_plain, train_sharded, whole
from tests.fsdp.ranks import agreed
from tests.fsdp.test_training import shard_blocks


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 16)
        self.down = nn.Linear(16, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _bf16_beside_tensor_parallel(context: RankContext) -> list[str]:
    """What forward sees of a parameter is a DTensor in the compute dtype, through and through."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, plain = build(Pair), build(Pair)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    shard_blocks(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    seen: list[str] = []

    def look(module: nn.Module, *_: Any) -> None:
        weight = module.up.weight
        kinds = (weight, weight.to_local(), weight.full_tensor())
        seen.extend(str(kind.dtype).removeprefix("torch.") for kind in kinds)

    # On the class, so that it runs between the hooks of the unit.
    usual = MLP.forward
    MLP.forward = lambda self, x: (look(self), usual(self, x))[1]
    try:
        loss_of(model, batch(0, 0)).backward()
    finally:
        MLP.forward = usual
    loss_of(plain, batch(0, 0)).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        seen.append(str(got.grad.dtype).removeprefix("torch."))
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=0.05, atol=0.005)
    return sorted(set(seen[:6])) + sorted(set(seen[6:]))


def test_the_policy_holds_beside_tensor_parallelism() -> None:
    assert agreed(_bf16_beside_tensor_parallel, 2) == ["bfloat16", "float32"]


def _tensor_parallel(context: RankContext) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, plain = build(Pair), build(Pair)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    shard_blocks(model, mesh=mesh["dp"])
    originals = dict(build(Pair).named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), originals[name]), name
    dp_rank = mesh["dp"].get_local_rank()
    train_sharded(model, dp_rank)
    train_plain(plain, 2)
    compare(model, plain)
    norm = nn.utils.get_total_norm(list(model.parameters()))
    want = nn.utils.get_total_norm(list(plain.parameters()))
    torch.testing.assert_close(whole(norm), want)
    saved = model.state_dict()
    fresh = build(Pair)
    for block in fresh.blocks:
        parallelize_module(block, mesh["tp"], plan)
    shard_blocks(fresh, mesh=mesh["dp"])
    fresh.load_state_dict(saved)
    compare(fresh, plain)
    return [type(p).__name__ for p in model.blocks[0].up.weight.placements]


def test_training_beside_tensor_parallelism() -> None:
    names = agreed(_tensor_parallel, 4)
    assert names == ["_StridedShard", "Shard"]


def _named_dims(context: RankContext, shard: Any, replicate: Any) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def spread(name: str, module: nn.Module, mesh: Any) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()])
            module.register_parameter(key, nn.Parameter(spread))

    model, plain = build(Pair), build(Pair)
    distribute_module(model, mesh, spread)
    dims = DataParallelMeshDims(shard=shard, replicate=replicate)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, dp_mesh_dims=dims)

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if module is model:
            x = distribute_tensor(x, mesh, [Replicate(), Replicate()], src_data_rank=None)
            out = module(x)
            return out.to_local().float().pow(2).mean()
        return loss_of(module, x)

    train_sharded(model, context.rank, loss=loss)
    train_plain(plain, 4)
    compare(model, plain, tolerance=1e-5)
    return str(model.blocks[0].up.weight.placements)


@pytest.mark.parametrize(
    ("shard", "replicate"), [("b", "a"), pytest.param(("a", "b"), None, marks=pytest.mark.long)]
)
def test_named_dims_of_a_larger_mesh(shard: Any, replicate: Any) -> None:
    agreed(_named_dims, 4, shard=shard, replicate=replicate)


def _two_meshes(context: RankContext) -> list[int]:
    """Some parameters over four ranks, the others over pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pairs = FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
    model, plain = build(Pair), build(Pair)
    for block in model.blocks:
        chosen = {block.down.weight}
        fully_shard(
            block,
            shard_placement_fn=lambda p, chosen=chosen: (
                ShardPlacementResult(Shard(0), pairs) if p in chosen else None
            ),
        )
    fully_shard(model)
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(4):
        (loss_of(plain, batch(0, rank)) / 4).backward()
    torch.testing.assert_close(
        whole(model.blocks[0].up.weight.grad), plain.blocks[0].up.weight.grad
    )
    # Over pairs, the gradient is the mean over the pair.
    pair_plain = build(Pair)
    first = 2 * (context.rank // 2)
    for rank in (first, first + 1):
        (loss_of(pair_plain, batch(0, rank)) / 2).backward()
    torch.testing.assert_close(
        whole(model.blocks[1].down.weight.grad), pair_plain.blocks[1].down.weight.grad
    )
    return [len(fully_shard.state(block).groups) for block in model.blocks]


def test_a_unit_may_shard_over_several_meshes() -> None:
    assert agreed(_two_meshes, 4) == [2, 2]


class Lends:
    """Counts calls, and knows what memory it has lent: that alone is to be sent from and into."""

    def __init__(self) -> None:
        self.calls = 0
        self.lent: list[torch.Tensor] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.lent.append(torch.empty(*size, dtype=dtype, device=device))
        return self.lent[-1]

    def called(self, *tensors: torch.Tensor) -> None:
        self.calls += 1
        assert {t.data_ptr() for t in tensors} <= {t.data_ptr() for t in self.lent}


class CountingGather(Lends, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):  # noqa: FBT002
        self.called(output_tensor)
        return torch.distributed.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class CountingScatter(Lends, ReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # noqa: FBT002
        self.called(output_tensor, input_tensor)
        return torch.distributed.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def _custom_comms(context: RankContext) -> list[int]:
    model, plain = shard_blocks(build()), build()
    gather, scatter, hooked = CountingGather(), CountingScatter(), []
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[0].set_custom_reduce_scatter(scatter)
    model.blocks[1].set_all_reduce_hook(lambda shard: hooked.append(shard.numel()))
    train_sharded(model, context.rank, steps=2)
    train_plain(plain, context.world_size, steps=2)
    compare(model, plain)
    return [gather.calls, scatter.calls, len(hooked)]


def test_users_may_bring_their_own_collectives() -> None:
    assert agreed(_custom_comms, 2) == [4, 2, 2]


def _group_allocated(context: RankContext) -> list[str]:
    model, plain = shard_blocks(build()), build()
    for unit in (model, *model.blocks):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    train_sharded(model, context.rank, steps=2)
    train_plain(plain, context.world_size, steps=2)
    compare(model, plain)
    errors = []
    model.blocks[0].set_custom_all_gather(CountingGather())
    for call in (
        lambda: model.blocks[0].set_allocate_memory_from_process_group_for_comm(True),
        lambda: model.blocks[0].set_symm_mem_for_comm(),
        lambda: model.blocks[1].set_symm_mem_for_comm(),
    ):
        try:
            call()
        except (AssertionError, NotImplementedError) as error:
            errors.append(type(error).__name__)
    return errors


def test_buffers_may_come_from_the_group_but_not_with_a_custom_collective() -> None:
    wanted = ["AssertionError", "AssertionError", "NotImplementedError"]
    assert agreed(_group_allocated, 2) == wanted


def _shared_context(context: RankContext) -> bool:
    first, second = shard_blocks(build(Pair)), shard_blocks(build(Pair))
    share_comm_ctx([first, second])
    plain = build(Pair)
    for step in range(2):
        second(first(batch(step, context.rank))).pow(2).mean().backward()
        for rank in range(context.world_size):
            hidden = plain(batch(step, rank))
            (plain(hidden).pow(2).mean() / context.world_size).backward()
    for a, b, want in zip(first.parameters(), second.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(a.grad) + whole(b.grad), want.grad, rtol=1e-5, atol=1e-6)
    states = [fully_shard.state(unit) for unit in (first, *first.blocks, second, *second.blocks)]
    return len({id(state.comm()) for state in states}) == 1


def test_two_roots_may_share_streams_and_order() -> None:
    assert agreed(_shared_context, 2) is True


def _scaler(context: RankContext) -> list[Any]:
    model, plain = shard_blocks(build()), build()
    found = []
    for each in (model, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        if each is model:
            scaler.scale(loss_of(each, batch(0, context.rank))).backward()
        else:
            for rank in range(context.world_size):
                scaler.scale(loss_of(each, batch(0, rank)) / context.world_size).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    compare(model, plain)
    return found


def test_the_plain_gradient_scaler_works() -> None:
    assert agreed(_scaler, 2) == [8.0, 8.0]

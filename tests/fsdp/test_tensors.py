"""What tensors of a sharded module are: which objects, over which memory, laid out how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from conformance.ranks import RankContext
from tests.fsdp.plain import (
    Stack,
    batch,
    build,
    compare,
    loss_of,
    train_plain,
    train_sharded,
)
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_training import largest_even_dim, shard_blocks


def _whole_ones(context: RankContext) -> list[Any]:
    """A whole parameter over two iterations: its object, memory and version counter."""
    model = shard_blocks(build())
    (param, *_) = model.blocks[0]._state().groups[0].fsdp_params
    seen: list[torch.Tensor] = []
    sizes, versions = [], []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(module.weight)
        sizes.append(module.weight.untyped_storage().size() > 0)
        versions.append(module.weight._version)

    model.blocks[0].up.register_forward_hook(look)
    for _ in range(2):
        loss = loss_of(model, batch(0, context.rank))
        sizes.append(seen[-1].untyped_storage().size() > 0)
        loss.backward()
        sizes.append(seen[-1].untyped_storage().size() > 0)
        versions.append(seen[-1]._version)
    one = all(each is param.unsharded for each in seen)
    return [one, isinstance(seen[0], nn.Parameter), sizes, len(set(versions))]


def test_a_whole_parameter_is_one_object_whose_memory_comes_and_goes() -> None:
    one, is_parameter, sizes, versions = agreed(_whole_ones, 2)
    assert one
    assert is_parameter
    assert sizes == [True, False, False] * 2
    assert versions == 1  # what autograd has saved stays valid


def _other_dims(context: RankContext) -> list[int]:
    """Parameters and gradients that are cut along any dim: placements and memory."""
    choose = largest_even_dim(context.world_size)
    model = shard_blocks(build(hidden=12), shard_placement_fn=choose)
    loss_of(model, batch(0, context.rank)).backward()
    dims = []
    for param, plain in zip(model.parameters(), build(hidden=12).parameters(), strict=True):
        wanted = choose(plain) or Shard(0)
        for tensor in (param, param.grad):
            assert tensor.placements == (wanted,)
            assert tensor.to_local().is_contiguous()
            assert tensor.full_tensor().is_contiguous()
            assert tensor.stride() == plain.stride()
        dims.append(wanted.dim)
    return dims


def test_gradients_lie_like_parameters_along_any_dim() -> None:
    assert set(agreed(_other_dims, 2)) == {0, 1}


def _from_the_first_rank(context: RankContext) -> None:
    """One rank has values and the others none; they get theirs parameter by parameter."""
    plain = build()
    with torch.device("cpu" if context.rank == 0 else "meta"):
        model = build() if context.rank == 0 else Stack()
    source = {name: value.clone() for name, value in model.state_dict().items()}
    shard_blocks(model)
    state = {}
    for name, value in model.state_dict().items():
        full = source[name] if context.rank == 0 else torch.empty(value.shape)
        dist.broadcast(full, 0)
        if isinstance(value, DTensor):
            full = distribute_tensor(full, value.device_mesh, value.placements)
        state[name] = full
    model.load_state_dict(state, assign=True)
    compare(model, plain)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_values_of_one_rank_reach_models_on_meta() -> None:
    on_ranks(_from_the_first_rank, 3)


def _converted(context: RankContext, *, swap: bool) -> list[str]:
    """A cast after training follows, also where torch swaps the tensors behind parameters."""
    model, plain = shard_blocks(build()), build()
    loss_of(model, batch(0, context.rank)).backward()
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    plain.double()

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x.double()).pow(2).mean()

    train_sharded(model, context.rank, loss=loss)
    train_plain(plain, context.world_size, loss=loss)
    compare(model, plain, tolerance=1e-12)
    return sorted({str(param.dtype) for param in model.parameters()})


@pytest.mark.parametrize("swap", [False, True])
def test_a_cast_is_followed_on_either_path_of_torch(*, swap: bool) -> None:
    assert agreed(_converted, 3, swap=swap) == ["torch.float64"]

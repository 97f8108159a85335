"""One plain model cut by tensor parallelism, and by either face beside it, over any mesh."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp.engine.mesh import default_device
from fsdp.wrap import ModuleWrapPolicy

WIDTH, HIDDEN = 6, 12


class Layer(nn.Module):
    """Cut on dim 0, on dim 1, and not at all: as a DTensor, and as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.rand(5))


class Stack(nn.Module):
    """Two layers, a convolution, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.out = nn.Linear(WIDTH, 3)
        self.picture = nn.Conv2d(3, 4, 2)
        self.register_buffer("scale", torch.rand(3))


PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    "norm": SequenceParallel(sequence_dim=0),
}


def stack(seed: int = 7) -> Stack:
    torch.manual_seed(seed)
    return Stack()


def shaped(face: str, sizes: Sequence[int], seed: int = 7) -> nn.Module:
    """The model in form ``face`` over a mesh of ``sizes``, the last one of tensor parallelism.

    ``plain``: no mesh. ``tensor``: cut by tensor parallelism alone. ``fully``, ``fully_last_dim``:
    sharded beside it. ``flat``, ``original``, ``no_shard``: wrapped. With three sizes the first is
    that of replicas.
    """
    model: Any = stack(seed).to(default_device())
    if face == "plain":
        return model
    names = ("replicas", "data", "tensor")[-len(sizes) :]
    mesh = init_device_mesh(default_device().type, tuple(sizes), mesh_dim_names=names)
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], PLAN)
    if not face.startswith("fully"):
        _cut_channels_last(model.picture, mesh["tensor"])
    if face == "tensor":
        return model
    data = mesh[names[:-1]] if len(names) > 2 else mesh["data"]
    if face.startswith("fully"):
        return _composable(model, data, last=face == "fully_last_dim")
    options: dict[str, Any] = {"use_orig_params": face == "original"}
    if face == "no_shard":
        options = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True}
    elif len(names) > 2:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        policy = ModuleWrapPolicy({Layer})
        return FullyShardedDataParallel(model, device_mesh=data, auto_wrap_policy=policy, **options)


def _cut_channels_last(picture: nn.Conv2d, mesh: DeviceMesh) -> None:
    """Cut a weight whose elements do not lie in the order of its indices."""
    start = picture.weight.detach().chunk(mesh.size())[mesh.get_local_rank()]
    local = start.clone(memory_format=torch.channels_last)
    shape = picture.weight.shape
    stride = torch.empty(shape, memory_format=torch.channels_last).stride()
    whole = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride)
    picture.weight = nn.Parameter(whole)


def _composable(model: Any, mesh: DeviceMesh, *, last: bool) -> nn.Module:
    def on_last(param: nn.Parameter) -> Shard | None:
        divides = param.dim() == 2 and param.shape[-1] % 4 == 0
        return Shard(1) if divides else None

    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=on_last if last else None)
    return model

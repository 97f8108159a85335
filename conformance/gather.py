"""Full tensors of many DTensors at once: one collective for all of them instead of one for each.

``DTensor.full_tensor`` costs milliseconds of host time a tensor; an observed step has hundreds.
Knows how a DTensor's pieces lie. Must not know wrappers, models or what the tensors mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # imported for real it takes a second, and ranks with DTensors have it already
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Source:
    """Tensors that can travel together: same group, same dtype, same device."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device


@torch.no_grad()  # else each `to_local` is a node of autograd
def full_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full copies on CPU, in the order of `tensors`; plain tensors are copied as they are.

    Collective: one all-gather per group, dtype and device of what is sharded on one mesh
    dimension, one per sharded dimension of each other DTensor; same keys in the same order on all
    ranks.
    Memory: everything once in full on the device, per group, dtype and device.
    """
    together: dict[Source, dict[str, DTensor]] = {}
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}  # a mesh looks them up by name
    copies: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not is_dtensor(tensor):
            copies[key] = tensor.detach().to("cpu", copy=True)
            continue
        mesh_dim = _only_sharded(tensor)
        if mesh_dim is None:
            copies[key] = tensor.full_tensor().detach().to("cpu", copy=True)
        else:
            mesh = tensor.device_mesh
            place = (id(mesh), mesh_dim)
            if place not in groups:
                groups[place] = mesh.get_group(mesh_dim)
            source = Source(groups[place], tensor.dtype, tensor.device)
            together.setdefault(source, {})[key] = tensor
    for source, members in together.items():
        copies |= _gathered(source, members)
    return {key: copies[key] for key in tensors}


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is distributed."""
    return hasattr(tensor, "full_tensor")


def _only_sharded(tensor: DTensor) -> int | None:
    """The one mesh dimension on which `tensor` is cut in the plain way, the rest replicated."""
    cut = [d for d, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    # by the exact name: a strided shard says that it is a shard, but its pieces lie elsewhere
    plain = len(cut) == 1 and type(tensor.placements[cut[0]]).__name__ == "Shard"
    return cut[0] if plain else None


def _gathered(source: Source, members: Mapping[str, DTensor]) -> dict[str, Tensor]:
    world = dist.get_world_size(source.group)
    widths = [math.prod(_piece_shape(tensor, 0, world)) for tensor in members.values()]
    own = torch.zeros(sum(widths), dtype=source.dtype, device=source.device)
    for place, tensor in zip(own.split(widths), members.values(), strict=True):
        piece = tensor.to_local().reshape(-1)  # (own rows × rest,), at most as long as rank 0's
        place[: piece.numel()] = piece
    everyone = torch.empty(world * own.numel(), dtype=source.dtype, device=source.device)
    dist.all_gather_into_tensor(everyone, own, group=source.group)
    rows = everyone.view(world, -1).to("cpu")  # (world, padded elements)
    return {
        key: _joined(tensor, pieces)
        for (key, tensor), pieces in zip(members.items(), rows.split(widths, dim=1), strict=True)
    }


def _joined(tensor: DTensor, pieces: Tensor) -> Tensor:
    """What `tensor` is in full, from the padded piece of every rank, (world, elements)."""
    if _shard_dim(tensor) == 0:  # ranks hold runs of it; what was padded is the end
        return pieces.reshape(-1)[: tensor.numel()].view(tensor.shape)
    shapes = [_piece_shape(tensor, rank, len(pieces)) for rank in range(len(pieces))]
    own = [row[: math.prod(s)].view(s) for row, s in zip(pieces, shapes, strict=True)]
    return torch.cat(own, dim=_shard_dim(tensor))


def _piece_shape(tensor: DTensor, rank: int, world: int) -> list[int]:
    """Shape of the piece that `rank` holds: that of `torch.chunk`, empty beyond the end."""
    dim = _shard_dim(tensor)
    shape = list(tensor.shape)
    step = -(-shape[dim] // world)
    shape[dim] = max(0, min(step, shape[dim] - rank * step))
    return shape


def _shard_dim(tensor: DTensor) -> int:
    shard: Any = next(p for p in tensor.placements if not p.is_replicate())
    dim: int = shard.dim
    return dim % tensor.dim()

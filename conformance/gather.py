"""Full tensors of many DTensors at once: one collective for all of them instead of one for each.

``DTensor.full_tensor`` costs milliseconds of host time a tensor; an observed step has hundreds.
Knows how a DTensor's pieces lie. Must not know wrappers, models or what the tensors mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

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
    together: dict[Source, dict[str, Cut]] = {}
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}  # a mesh looks them up by name
    copies: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not is_dtensor(tensor):
            copies[key] = tensor.detach().to("cpu", copy=True)
            continue
        found = _only_cut(tensor)
        if found is None:
            copies[key] = tensor.full_tensor().detach().to("cpu", copy=True)
        else:
            mesh_dim, dim = found
            mesh = tensor.device_mesh
            place = (id(mesh), mesh_dim)
            if place not in groups:
                groups[place] = mesh.get_group(mesh_dim)
            source = Source(groups[place], tensor.dtype, tensor.device)
            shape = tuple(tensor.shape)
            cut = Cut(tensor.to_local(), shape, dim, -(-shape[dim] // mesh.size(mesh_dim)))
            together.setdefault(source, {})[key] = cut
    for source, members in together.items():
        copies |= _gathered(source, members)
    return {key: copies[key] for key in tensors}


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is distributed."""
    return hasattr(tensor, "full_tensor")


class Cut(NamedTuple):
    """A tensor that is cut along one of its dimensions, as `torch.chunk` cuts it.

    Attributes:
        piece: what this rank holds; empty on ranks beyond the end.
        shape: of the whole.
        dim: dimension that is cut.
        step: length along it of every piece but the last ones.
    """

    piece: Tensor
    shape: tuple[int, ...]
    dim: int
    step: int

    @property
    def width(self) -> int:
        """Elements of rank 0's piece, as many as any other has at most."""
        return self._numel(self.step)

    def joined(self, pieces: Tensor) -> Tensor:
        """The whole, from the padded piece of every rank, (world, width)."""
        if self.dim == 0:  # ranks hold runs of it; what was padded is the end
            return pieces.reshape(-1)[: math.prod(self.shape)].view(self.shape)
        total = self.shape[self.dim]
        lengths = [max(0, min(self.step, total - r * self.step)) for r in range(len(pieces))]
        own = [
            row[: self._numel(length)].view(*self.shape[: self.dim], length, *self._rest)
            for row, length in zip(pieces, lengths, strict=True)
        ]
        return torch.cat(own, dim=self.dim)

    def _numel(self, length: int) -> int:
        return math.prod(self.shape[: self.dim]) * length * math.prod(self._rest)

    @property
    def _rest(self) -> tuple[int, ...]:
        return self.shape[self.dim + 1 :]


def _only_cut(tensor: DTensor) -> tuple[int, int] | None:
    """The one mesh dimension on which `tensor` is cut in the plain way, and which of its own.

    ``None`` if there are none or several, or if it is cut in another way.
    """
    cut = [(d, p) for d, p in enumerate(tensor.placements) if not p.is_replicate()]
    # by the exact name: a strided shard says that it is a shard, but its pieces lie elsewhere
    if len(cut) != 1 or type(cut[0][1]).__name__ != "Shard":
        return None
    mesh_dim, placement = cut[0]
    shard: Any = placement
    return mesh_dim, shard.dim % tensor.dim()


def _gathered(source: Source, members: Mapping[str, Cut]) -> dict[str, Tensor]:
    world = dist.get_world_size(source.group)
    widths = [cut.width for cut in members.values()]
    own = torch.zeros(sum(widths), dtype=source.dtype, device=source.device)
    for place, cut in zip(own.split(widths), members.values(), strict=True):
        place[: cut.piece.numel()] = cut.piece.reshape(-1)
    everyone = torch.empty(world * own.numel(), dtype=source.dtype, device=source.device)
    dist.all_gather_into_tensor(everyone, own, group=source.group)
    rows = everyone.view(world, -1).to("cpu")  # (world, padded elements)
    return {
        key: cut.joined(pieces)
        for (key, cut), pieces in zip(members.items(), rows.split(widths, dim=1), strict=True)
    }

"""What this rank holds of every tensor of a model, whichever way the model is sharded.

One view for all: the units of ``FullyShardedDataParallel``, DTensors (of ``fully_shard`` and of
PyTorch's own), and plain tensors, which are whole on every rank. Everything that saves, loads or
moves states reads this view and asks for no face.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.engine.extension import extends
from fsdp.engine.layout import Cut
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.torch_private import is_persistent, local_tensor, spec_of
from fsdp.engine.unit import state_of
from fsdp.flat_exposure import FlatExposure
from fsdp.flat_parameter import FLAT_PARAM, FlatParam, order_in_memory
from fsdp.full_params import check_idle
from fsdp.plain_names import joined, named_plainly
from fsdp.reshard.dealt import Dealt, Ranks, whole
from fsdp.reshard.meshes import dealt_in_unit, dealt_on_mesh
from fsdp.reshard.telling import own_rank
from fsdp.wrapper_unit import WrappedUnit

Slot = tuple[nn.Module, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """This rank's elements of one tensor of the plain model.

    Attributes:
        names: of the tensor; several if it is tied.
        dealt: its whole shape, and who holds what of it.
        dtype: in which it is saved.
        holder: the parameter that an optimizer knows, or the buffer.
        window: (offset, elements) of the tensor in ``holder`` and in what is laid out like it, for
            a flat parameter; None if ``holder`` is this tensor alone.
        trained: whether it is a parameter.
    """

    names: tuple[str, ...]
    dealt: Dealt
    dtype: torch.dtype
    holder: torch.Tensor
    window: tuple[int, int] | None = None
    trained: bool = True

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of ``tensor``, which is laid out like ``holder``, in order of its units.

        The view enumerates them from first to last, in any number of dims.
        """
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        if self.window is not None:
            return local.narrow(0, *self.window)
        order = self.dealt.order
        if order is not None and local.shape == self.dealt.part:
            return local.permute(order)
        return local

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has an element for each of ``holder``."""
        return tensor.shape == self.holder.shape


def pieces_of(root: nn.Module, ranks: Sequence[int]) -> list[Piece]:
    """Return a piece for every parameter and persistent buffer, in the order of the plain model.

    Units of both faces give up whole parameters first, as they do before a state dict.

    Args:
        root: the model.
        ranks: those that have this model, for tensors that are not sharded.

    Raises:
        RuntimeError: a unit is in forward or backward, or opened; nothing was changed.
        NotImplementedError: a tensor that is sharded in another way than by cuts of its dims.
    """
    modules = list(named_plainly(root))
    _check_idle(modules)
    tables = _Tables()
    everywhere = tables.of([[rank] for rank in ranks])
    flat: dict[Slot, Piece] = {}
    cast: dict[torch.Tensor, torch.dtype] = {}
    for _, module in modules:
        state = state_of(module)
        for group in state.groups if state is not None else ():
            group.to_sharded()
            group.relink()
        if isinstance(module, WrappedUnit):
            cast.update(module._buffer_dtypes)
            for group in module._state.groups:
                flat.update(_of_flat_group(group, tables))
    found: dict[int, Piece] = {}
    names: dict[int, list[str]] = {}
    for path, module in modules:
        for name, tensor in _tensors(module, flat):
            piece = flat.get((module, name))
            key = id(tensor if piece is None else piece)
            if key not in found:
                where = joined(path, name)
                found[key] = piece or _alone(tensor, where, everywhere, tables, cast)
            names.setdefault(key, []).append(joined(path, name))
    return [replace(piece, names=tuple(names[key])) for key, piece in found.items()]


def _check_idle(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse units whose parameters are whole for somebody, who writes them back or drops them.

    Raises:
        RuntimeError: names the first.
    """
    for path, module in modules:
        state = state_of(module)
        if state is None:
            continue
        try:
            check_idle([state])
        except AssertionError as error:
            raise RuntimeError(
                f"the unit '{path}' ({type(module).__name__}) is in use: {error}. Save, load and "
                "reshard outside of forward, backward and summon_full_params; after an exception "
                "that was caught there, run a forward first."
            ) from error


def _tensors(module: nn.Module, flat: Mapping[Slot, Piece]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a state dict of the plain module has, in its order, under the plain names."""
    parameters = module._parameters.items()
    # Flat parameters leave plain attributes where their parts were; others are no state.
    parts = [(n, v) for n, v in module.__dict__.items() if (module, n) in flat]
    for name, tensor in (*parameters, *parts, *module._buffers.items()):
        hidden = name == FLAT_PARAM or not is_persistent(module, name)
        if tensor is not None and not hidden:
            yield name, tensor


class _Tables:
    """Equal tables of ranks as one object, so that a plan looks each up once."""

    def __init__(self) -> None:
        self._known: dict[str, Ranks] = {}

    def of(self, rows: list[list[int]]) -> Ranks:
        key = repr(rows)
        if key not in self._known:
            self._known[key] = Ranks(rows)
        return self._known[key]


def _of_flat_group(group: FSDPParamGroup, tables: _Tables) -> dict[Slot, Piece]:
    info, shard, exposure = group.mesh_info, group.shard, group.options.exposure
    flat = exposure.flat if isinstance(exposure, FlatExposure) else None
    found: dict[Slot, Piece] = {}
    for index, param in enumerate(shard.plain):
        assert isinstance(param, FlatParam)
        holder = flat if flat is not None else param.original
        assert holder is not None
        held = shard.layout.piece(index, info.shard_rank)
        piece = Piece(
            names=(),
            dealt=_dealt_part(param, replace(shard.layout.cuts[index], base=0), info, tables),
            dtype=param.dtype,
            holder=holder,
            window=(held.offset, held.numel) if flat is not None else None,
        )
        found.update(dict.fromkeys(param.info.owners(), piece))
    return found


def _dealt_part(param: FlatParam, cut: Cut, info: DataParallelMeshInfo, tables: _Tables) -> Dealt:
    """Return how a parameter is dealt out of whose part here a unit makes ``cut``."""
    if param.outer is not None:
        return dealt_in_unit(param.outer, cut, info, param.order, tables.of)
    ranks = tables.of(_rows(info))
    return Dealt(shape=tuple(param.shape), cut=cut, ranks=ranks, order=param.order)


def _rows(info: DataParallelMeshInfo) -> list[list[int]]:
    """Return the ranks of a mesh as one row per replica."""
    mesh = info.mesh.mesh
    if info.shard_mesh_dim is None:
        mesh = mesh.reshape(-1, 1)
    rows: list[list[int]] = mesh.reshape(-1, mesh.shape[-1]).tolist()
    return rows


def _alone(
    tensor: torch.Tensor,
    name: str,
    everywhere: Ranks,
    tables: _Tables,
    cast: Mapping[torch.Tensor, torch.dtype],
) -> Piece:
    """Return the piece of a tensor that is no part of a flat parameter."""
    if isinstance(tensor, DTensor):
        dealt = _dealt_dtensor(tensor, name, tables)
    else:
        dealt = whole(tensor.shape, everywhere)
        dealt = replace(dealt, order=order_in_memory(tensor))
    return Piece(
        names=(),
        dealt=dealt,
        dtype=cast.get(tensor, tensor.dtype),
        holder=tensor,
        trained=isinstance(tensor, nn.Parameter),
    )


def _dealt_dtensor(tensor: DTensor, name: str, tables: _Tables) -> Dealt:
    spec, local = spec_of(tensor), local_tensor(tensor)
    dealt = None
    if not extends(local):
        dealt = dealt_on_mesh(tensor.shape, spec.mesh, spec.placements, tables.of)
    if dealt is None:
        raise NotImplementedError(
            f"'{name}' is a {type(local).__name__} with placements {tuple(spec.placements)}; "
            "resharding needs a plain tensor that is cut along its dims, or whole. Save it with "
            "torch.distributed.checkpoint."
        )
    shard = dealt.ranks.shard_of(own_rank())
    held = 0 if shard is None else dealt.held(shard)
    if held != local.numel():
        raise NotImplementedError(
            f"'{name}' of shape {tuple(tensor.shape)} with placements {tuple(spec.placements)} on "
            f"{spec.mesh} has {local.numel()} elements here, and {held} if its dims were cut one "
            "after another as torch.chunk does. Redistribute it, or save it with "
            "torch.distributed.checkpoint."
        )
    return dealt

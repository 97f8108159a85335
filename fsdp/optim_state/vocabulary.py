"""What the parts of this package hand to each other. Values only: no collectives, no optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp.engine.layout import Fragment
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.unit import FSDPState
from fsdp.flat_parameter import FlatParam, flat_params
from fsdp.optim_state.judge import facts_of

Entry = Mapping[str, Any]  # state name -> value, of one parameter


class OptimStateKeyType(Enum):
    """What an optimizer state is keyed by: names of parameters, or their numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


class _OptimStateKey(NamedTuple):
    """What all ranks call one parameter of an optimizer.

    ``unflat_param_names`` has one name, or those of all parameters inside a flat one.
    """

    unflat_param_names: tuple[str, ...]
    is_fsdp_managed: bool


class _PosDimTensorInfo(NamedTuple):
    """Stands for a tensor with dims where only its shape and dtype travel."""

    shape: torch.Size
    dtype: torch.dtype


class Opaque:
    """Stands for a value that cannot be sent; each rank keeps its own."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    def __hash__(self) -> int:
        return 0


class PackedScalar(NamedTuple):
    """The bits of a tensor without dims."""

    bits: bytes
    dtype: torch.dtype


@dataclass(kw_only=True)
class StateInfo:
    """What ranks tell each other of one entry: everything but the elements of large tensors."""

    tensors: dict[str, _PosDimTensorInfo] = field(default_factory=dict)
    scalar_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensors: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return what all ranks that hold elements must have in common."""
        dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        return facts_of(dtypes, self.scalar_tensors | self.non_tensors)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.scalar_tensors or self.non_tensors)

    def __getstate__(self) -> dict[str, Any]:
        # To pickle a tensor and back takes 0.35 ms of host time, its bits 0.05; there is one for
        # each parameter and rank.
        scalars = {name: packed(value) for name, value in self.scalar_tensors.items()}
        return {**vars(self), "scalar_tensors": scalars}

    def __setstate__(self, state: dict[str, Any]) -> None:
        scalars = {name: unpacked(value) for name, value in state["scalar_tensors"].items()}
        vars(self).update(state, scalar_tensors=scalars)


def packed(value: torch.Tensor) -> torch.Tensor | PackedScalar:
    """Return a tensor without dims as what is quickly pickled."""
    plain = type(value) is torch.Tensor and value.layout is torch.strided
    if not plain or value.is_complex() or value.is_neg() or value.is_quantized:
        return value  # may be more than its bits
    return PackedScalar(bytes(value.reshape(1).view(torch.uint8).tolist()), value.dtype)


def unpacked(value: torch.Tensor | PackedScalar) -> torch.Tensor:
    """Return the tensor of which ``packed`` was made, on the host if it was packed."""
    if isinstance(value, torch.Tensor):
        return value
    bits = torch.tensor(list(value.bits), dtype=torch.uint8, device="cpu")  # whatever the default
    return bits.view(value.dtype).reshape(())


@dataclass(kw_only=True)
class ConsolidatedOptimState:
    """The state of one original parameter after the exchange."""

    tensor_state: dict[str, Any] = field(default_factory=dict)
    zero_dim_tensor_state: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensor_state: dict[str, Any] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """Return it as users see it: tensors, zero-dim tensors, others, each sorted by name."""
        kinds = (self.tensor_state, self.zero_dim_tensor_state, self.non_tensor_state)
        return {name: kind[name] for kind in kinds for name in sorted(kind)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One tensor of a unit that optimizers see: a flat parameter, or this rank's part of one.

    Attributes:
        param: what is in the optimizer.
        key: what ranks call it.
        indices: the original parameters inside it, as the unit numbers them.
        shape: of the tensor here.
        offset: of its first element in the shard.
        numel: of its elements in the shard, padding included.
        is_whole: whether it is the user's own parameter, all of it, in its own shape; of what
            tensor parallelism has cut, this rank's part.
        is_part: whether other ranks, or other parameters, have states of the same tensor.
    """

    param: nn.Parameter
    key: _OptimStateKey
    indices: tuple[int, ...]
    shape: torch.Size
    offset: int
    numel: int
    is_whole: bool
    is_part: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class FSDPParamInfo:
    """One unit with parameters, and how they are called.

    Attributes:
        state: the unit.
        group: its parameters.
        param_indices: name -> index, in flattening order.
        param_requires_grad: by index.
        pieces: what this rank holds of each, by index.
        members: what an optimizer sees of it.
        use_dtensor: whether the user gave a mesh, so that chunks are DTensors on it.
    """

    state: FSDPState
    group: FSDPParamGroup
    param_indices: dict[str, int]
    param_requires_grad: tuple[bool, ...]
    pieces: tuple[Fragment, ...]
    members: tuple[Member, ...]
    use_dtensor: bool

    @property
    def mesh(self) -> DataParallelMeshInfo:
        """Over which ranks the unit is sharded and replicated."""
        return self.group.mesh_info

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters, by index."""
        return tuple(self.param_indices)

    @cached_property
    def params(self) -> list[FlatParam]:
        """Its parameters, by index."""
        return flat_params(self.group.shard.plain)

    @property
    def is_sharded(self) -> bool:
        """Whether a rank lacks anything of it."""
        return self.mesh.shard_size > 1

    @property
    def ranks(self) -> list[int]:
        """The ranks of the shard group, as the default group counts."""
        group = self.mesh.shard_group
        return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)

    def owners(self, member: Member) -> list[int]:
        """Return which ranks of the shard group hold elements; all, if ``member`` has none."""
        found: set[int] = set()
        for cut in (self.group.shard.layout.cuts[index] for index in member.indices):
            if cut.extent.numel:
                found |= set(range(cut.owner(0), cut.owner(cut.extent.dim - 1) + 1))
        return sorted(found or range(self.mesh.shard_size))


def info_of(entry: Entry) -> StateInfo:
    """Return what other ranks are told of ``entry``."""
    info = StateInfo()
    for name, value in sorted(entry.items()):
        if not isinstance(value, torch.Tensor):
            info.non_tensors[name] = value
        elif value.dim() == 0:
            info.scalar_tensors[name] = value.detach().cpu()
        else:
            info.tensors[name] = _PosDimTensorInfo(value.shape, value.dtype)
    return info

"""Options of both faces: frozen values, checked once when they are made.

Knows nothing of modules, meshes in use, or the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype each stage of a parameter group uses.

    Sharded parameters, sharded gradients and optimizer state always keep the original dtype.

    Attributes:
        param_dtype: dtype of the all-gather and of the computation. None: the original dtype.
        reduce_dtype: dtype of the gradient reduction and of gradients accumulated without
            reduction. None: the dtype the gradients arrive in.
        output_dtype: floating-point outputs of the module are cast to it. None: left alone.
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(
                    f"MixedPrecisionPolicy: {name} must be a torch.dtype, got {dtype!r}"
                )
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecisionPolicy: {name} must be a floating-point dtype, got {dtype}"
                )
        _check_bool(self, "cast_forward_inputs")


@dataclass(frozen=True)
class OffloadPolicy:
    """Base of the offload policies; by itself it means that nothing is offloaded."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and optimizer state in host memory.

    Attributes:
        pin_memory: whether that memory is page-locked, so that copies to and from the device
            overlap with computation.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _check_bool(self, "pin_memory")


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names the data-parallel dims of a larger mesh on which the parameters are DTensors.

    Attributes:
        shard: dim name or names to shard over; several are flattened into one.
        replicate: dim name or names to replicate over; several are flattened into one.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for role, names in (("shard", self.shard_names), ("replicate", self.replicate_names)):
            if not all(isinstance(name, str) for name in names):
                raise TypeError(
                    f"DataParallelMeshDims: {role} must be the name of a mesh dim or several, got "
                    f"{getattr(self, role)!r}"
                )
        if not self.shard_names and not self.replicate_names:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The shard dims as a tuple."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicate dims as a tuple."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return tuple(names) if isinstance(names, tuple | list) else (names,)


def _check_bool(options: object, name: str) -> None:
    value = getattr(options, name)
    if not isinstance(value, bool):
        raise TypeError(f"{type(options).__name__}: {name} must be a bool, got {value!r}")


class Comm(ABC):
    """A user's way of running one kind of collective."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tensor of ``size`` to be used as a buffer of the collective."""


class AllGather(Comm):
    """A user's all-gather."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (n,) of every rank into ``output_tensor`` (world * n,)."""


class ReduceScatter(Comm):
    """A user's reduce-scatter."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (world * n,) and leave this rank's part in ``output_tensor``."""

"""The constructor's arguments that a unit keeps, checked before anything happens."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import MixedPrecisionPolicy
from fsdp.wrapper_mesh import check_groups
from fsdp.wrapper_options import (
    STRATEGIES,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the units of one constructor call have in common."""

    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool

    def check(
        self, module: nn.Module, groups: Any, mesh: DeviceMesh | None, *, has_policy: bool
    ) -> None:
        """Refuse what cannot be done, and warn of what does nothing.

        Raises:
            ValueError: a value that makes no sense.
            TypeError: a value of another type.
            NotImplementedError: a value that is not supported.
        """
        for name, kinds in (
            ("sharding_strategy", ShardingStrategy),
            ("cpu_offload", CPUOffload),
            ("mixed_precision", MixedPrecision),
            ("backward_prefetch", (BackwardPrefetch, type(None))),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise TypeError(f"FullyShardedDataParallel: {name} got {value!r}, wanted {kinds}")
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise ValueError(f"Expected {self.param_init_fn} to be callable")
        check_groups(groups, mesh, self.sharding_strategy, has_policy=has_policy)
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if container and type(module).forward is nn.Module.forward:
            warnings.warn(
                f"FSDP will not all-gather parameters for containers that do not implement "
                f"forward: {module}",
                stacklevel=3,
            )

    def settled(self, strategy: ShardingStrategy) -> Arguments:
        """Return the same with the strategy that fits the number of ranks."""
        return dataclasses.replace(self, sharding_strategy=strategy)

    def for_children(self) -> dict[str, Any]:
        """Return what the units of an auto-wrap policy are made with."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def gradient_dtype(self) -> torch.dtype | None:
        """Return the dtype in which gradients stay after reduction; None: the parameters'."""
        mixed = self.mixed_precision
        if not mixed.keep_low_precision_grads:
            return None
        if STRATEGIES[self.sharding_strategy].shards:
            return mixed.param_dtype
        return mixed.reduce_dtype or mixed.param_dtype

    def policy(self, *, cast_forward_inputs: bool = False) -> MixedPrecisionPolicy:
        """Return the dtypes as the engine takes them."""
        mixed = self.mixed_precision
        return MixedPrecisionPolicy(
            param_dtype=mixed.param_dtype,
            reduce_dtype=mixed.reduce_dtype,
            cast_forward_inputs=cast_forward_inputs or mixed.cast_forward_inputs,
        )

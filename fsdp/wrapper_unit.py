"""What every part of the wrapper face knows of a unit: its state, its module, the units below.

Nothing runs here; the verbs are in the modules that build on this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.engine.state import TrainingState
from fsdp.engine.unit import FSDPState
from fsdp.flat_exposure import FlatExposure
from fsdp.flat_handle import FlatParamHandle
from fsdp.original_exposure import OriginalExposure
from fsdp.plain_names import CHECKPOINTED, WRAPPED, clean, joined
from fsdp.wrapper_checks import Arguments
from fsdp.wrapper_environment import Environment
from fsdp.wrapper_options import ShardingStrategy, StateDictSettings


class WrappedUnit(nn.Module):
    """A module that wraps another one and is a unit of the engine.

    Attributes are set by the constructor of ``FullyShardedDataParallel``.
    """

    _fsdp_wrapped_module: nn.Module
    _arguments: Arguments
    _environment: Environment
    _exposure: FlatExposure | OriginalExposure
    _ignored_modules: set[nn.Module]
    _ignored_params: set[nn.Parameter]
    _nested: bool  # whether another unit was made around this one
    _device_mesh: DeviceMesh | None  # what the user gave; None if that was groups, or nothing
    _buffers_owned: list[tuple[nn.Module, str]]
    _buffer_dtypes: dict[torch.Tensor, torch.dtype]  # original dtypes of the buffers that were cast
    _state_dict_settings: StateDictSettings
    _comm_hook: Callable[..., Any] | None = None
    _comm_hook_state: object = None
    _saving: bool  # whether a save is under way in which this unit takes part
    _finish_save: Any  # what brings this unit's entries into their form, while it is saved
    _loading: Any  # the load under way in which this unit takes part
    _order: Any  # a ForwardOrder while there is one to record or to compare

    @property
    def _state(self) -> FSDPState:
        state: FSDPState = self.__dict__["_fsdp_state"]
        return state

    @property
    def _is_root(self) -> bool | None:
        return self._state.is_root

    @property
    def training_state(self) -> TrainingState:
        """Where this unit is in an iteration."""
        return self._state.training_state

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy, after a single rank was found to have nothing to shard."""
        return self._arguments.sharding_strategy

    @property
    def module(self) -> nn.Module:
        """The user's module, without a wrapper for activation checkpointing around it."""
        inner = self._fsdp_wrapped_module
        seen: nn.Module = getattr(inner, CHECKPOINTED, inner)
        return seen

    @property
    def _flat_param(self) -> nn.Parameter | None:
        exposure = self._exposure
        return exposure.flat if isinstance(exposure, FlatExposure) else None

    @property
    def _handle(self) -> FlatParamHandle | None:
        """What lies where in the flat parameter; None for a unit without parameters."""
        names = {
            (module, name): clean(joined(path, name))
            for path, module in self._fsdp_wrapped_module.named_modules()
            for name in (*module._parameters, *module.__dict__)
        }
        for group in self._state.groups:
            owners = [(param.info.module, param.info.param_name) for param in group.fsdp_params]
            return FlatParamHandle(group, [names[owner] for owner in owners], self._flat_param)
        return None

    def _check_idle(self) -> None:
        """Refuse in forward, in backward and inside a summon.

        Raises:
            ValueError: not idle.
        """
        if self.training_state is not TrainingState.IDLE:
            raise ValueError(
                f"expected to be in states [{TrainingState.IDLE}] but current state is "
                f"{self.training_state}"
            )

    def _is_open(self) -> bool:
        return self.training_state is TrainingState.SUMMON_FULL_PARAMS

    def _is_first_rank(self) -> bool:
        mesh = self._state.mesh_info.mesh
        return mesh.get_rank() == int(mesh.mesh.flatten()[0])

    def _is_first_of_shards(self) -> bool:
        """Whether this rank is the first of those over which the unit is gathered.

        There is one in every replica of a unit that is sharded and replicated.
        """
        info = self._state.mesh_info
        return self._is_first_rank() if info.shard_group is None else info.shard_rank == 0

    def __getattr__(self, name: str) -> Any:
        """Look into the wrapped module for what the wrapper does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]


def units_of(module: nn.Module) -> list[WrappedUnit]:
    """Return the units from ``module`` down, it included, each before those inside it."""
    return [each for each in module.modules() if isinstance(each, WrappedUnit)]

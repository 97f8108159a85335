"""Which form of state a unit is asked for, and the checks of that. No tensors, no state dicts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

from fsdp.wrapper_options import (
    STRATEGIES,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp.wrapper_unit import WrappedUnit

Config = TypeVar("Config", StateDictConfig, OptimStateDictConfig)

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def checked_settings(
    kind: StateDictType,
    model: StateDictConfig | None,
    optim: OptimStateDictConfig | None,
    *,
    use_dtensor: bool,
) -> StateDictSettings:
    """Return the settings; configs that are not given have their defaults.

    Args:
        kind: the form.
        model: options of model states.
        optim: options of optimizer states.
        use_dtensor: whether sharded values are DTensors; the configs of the sharded form say so.

    Raises:
        TypeError: ``kind`` is no form.
        RuntimeError: a config of another form.
    """
    if not isinstance(kind, StateDictType):
        raise TypeError(f"state_dict_type got {kind!r}, wanted a StateDictType")
    wanted_model, wanted_optim = _CONFIGS[kind]
    settings = StateDictSettings(
        state_dict_type=kind,
        state_dict_config=_checked("state_dict_config", kind, model, wanted_model),
        optim_state_dict_config=_checked("optim_state_dict_config", kind, optim, wanted_optim),
    )
    # The user's own objects stay as they are.
    if isinstance(settings.state_dict_config, ShardedStateDictConfig):
        config = dataclasses.replace(settings.state_dict_config, _use_dtensor=use_dtensor)
        settings.state_dict_config = config
    if isinstance(settings.optim_state_dict_config, ShardedOptimStateDictConfig):
        optim_config = dataclasses.replace(
            settings.optim_state_dict_config, _use_dtensor=use_dtensor
        )
        settings.optim_state_dict_config = optim_config
    return settings


def _checked(name: str, kind: StateDictType, given: Any, wanted: type[Config]) -> Config:
    if given is None:
        return wanted()
    if type(given) is not wanted:
        raise RuntimeError(
            f"Expected {name} of type {wanted.__name__} for {kind} but got {type(given).__name__}"
        )
    return given


def form_of(unit: WrappedUnit) -> tuple[StateDictType, StateDictConfig]:
    """Return in which form ``unit`` saves and loads: the one that is set, if there are shards.

    Raises:
        RuntimeError: the local form, which a device mesh does not have.
    """
    settings = unit._state_dict_settings
    kind, config = settings.state_dict_type, settings.state_dict_config
    if kind is StateDictType.FULL_STATE_DICT:
        return kind, config
    if not STRATEGIES[unit.sharding_strategy].shards:
        full = FullStateDictConfig(offload_to_cpu=config.offload_to_cpu)
        return StateDictType.FULL_STATE_DICT, full
    if kind is StateDictType.LOCAL_STATE_DICT and unit._device_mesh is not None:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
            "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor "
            "state_dict."
        )
    return kind, config


def check_forms(units: Iterable[WrappedUnit]) -> None:
    """Refuse what one of ``units`` cannot do, and say which of them do something else.

    Raises:
        RuntimeError: see ``form_of``.
    """
    others = 0
    for unit in units:
        kind, _ = form_of(unit)
        asked = unit._state_dict_settings.state_dict_type
        others += bool(unit._state.groups) and kind is not asked
    if others:
        warnings.warn(
            "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.",
            stacklevel=3,
        )

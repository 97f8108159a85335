"""``state_dict`` and ``load_state_dict`` of the wrapper face, in the full form.

A unit gathers its parameters when the recursion enters it and gives them up when it leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from fsdp.wrapper_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

WRAPPED = "_fsdp_wrapped_module"
PREFIX = f"{WRAPPED}."


def full_settings(
    kind: StateDictType, model: StateDictConfig | None, optim: OptimStateDictConfig | None
) -> StateDictSettings:
    """Return the settings, checked.

    Raises:
        NotImplementedError: another form than the full one.
        RuntimeError: a config of another form.
    """
    if kind is not StateDictType.FULL_STATE_DICT:
        raise NotImplementedError(
            f"state_dict_type={kind} is not supported by this FullyShardedDataParallel yet; use "
            "StateDictType.FULL_STATE_DICT"
        )
    settings = StateDictSettings()
    for name, given, wanted in (
        ("state_dict_config", model, FullStateDictConfig),
        ("optim_state_dict_config", optim, FullOptimStateDictConfig),
    ):
        if given is None:
            continue
        if not isinstance(given, wanted):
            raise RuntimeError(
                f"Expected {name} of type {wanted.__name__} for {kind} but got "
                f"{type(given).__name__}"
            )
        setattr(settings, name, given)
    return settings


def detach_unit(
    found: dict[str, Any],
    keys: Iterable[str],
    full: torch.Tensor | None,
    dtypes: Mapping[torch.Tensor, torch.dtype],
    config: FullStateDictConfig,
) -> None:
    """Make the values that a unit has saved independent of it, in place.

    Args:
        found: the state dict.
        keys: those of the unit and of the units below it.
        full: the memory of the whole parameters, which does not outlive the call.
        dtypes: the original dtype of the buffers that were cast.
        config: what the user has set.
    """
    originals = {buffer.data_ptr(): (buffer, dtype) for buffer, dtype in dtypes.items()}
    gathered = full.untyped_storage().data_ptr() if full is not None else None
    for key in keys:
        value = found[key]
        if not isinstance(value, torch.Tensor):
            continue
        if gathered is not None and value.untyped_storage().data_ptr() == gathered:
            value = value.detach().clone()
        elif value.data_ptr() in originals:
            buffer, dtype = originals[value.data_ptr()]
            value = value.to(dtype) if value.shape == buffer.shape else value
        found[key] = value.cpu() if config.offload_to_cpu else value


def new_destination() -> dict[str, Any]:
    """Return an empty state dict with the metadata that modules write into it."""
    destination: OrderedDict[str, Any] = OrderedDict()
    destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    return destination


def insert_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    """Rename the keys below ``prefix`` to what the wrapper's own tree calls them."""
    below = [key for key in state_dict if key.startswith(prefix)]
    renamed = {f"{prefix}{PREFIX}{key[len(prefix) :]}": state_dict.pop(key) for key in below}
    state_dict.update(renamed)


def clean(names: list[str]) -> None:
    """Remove the wrapper's part from ``names``, in place."""
    names[:] = [name.replace(PREFIX, "") for name in names]


def not_yet(what: str) -> NoReturn:
    """Refuse what is not there.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{what} is not supported by this FullyShardedDataParallel yet; for optimizer states use "
        "torch.distributed.checkpoint with fully_shard"
    )

"""What becomes of the tensors that a unit's modules have put into a state dict. No collectives."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from fsdp.state_dict.form import is_sharded
from fsdp.state_dict.names import below, named_buffers, unit_prefixes
from fsdp.wrapper_unit import WrappedUnit


def memory_of(value: Any) -> int | None:
    """Return the address of the memory behind a plain tensor; None for anything else."""
    if not isinstance(value, torch.Tensor) or is_sharded(value):
        return None
    if value.layout is not torch.strided:
        return None
    return value.untyped_storage().data_ptr() or None


def copied(value: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    """Return a copy of ``value`` with memory of its own, in host memory or where it is."""
    if to_cpu and value.device.type != "cpu":
        return value.detach().cpu()
    return value.detach().clone()


def finish_others(
    unit: WrappedUnit, found: MutableMapping[str, Any], prefix: str, *, to_cpu: bool
) -> None:
    """Finish what ``unit`` has saved beside its parameters, in place.

    Buffers that were cast get their original dtype back. All others stay the live ones, as in any
    module; so do tensors of ignored modules. ``to_cpu`` moves them to host memory.
    """
    for name, buffer in named_buffers(unit):
        dtype, value = unit._buffer_dtypes.get(buffer), found.get(prefix + name)
        if dtype is not None and memory_of(value) == memory_of(buffer):
            assert value is not None
            found[prefix + name] = value.to(dtype)
    if not to_cpu:
        return
    for key in own_keys(unit, found, prefix):
        value = found[key]
        if memory_of(value) is not None and not value.is_meta:
            found[key] = value.cpu()


def own_keys(unit: WrappedUnit, found: MutableMapping[str, Any], prefix: str) -> list[str]:
    """Return the keys of ``unit`` in ``found``, without those of the units below it."""
    inner = tuple(start for each, start in unit_prefixes(unit, prefix) if each is not unit)
    return [key for key in below(found, prefix) if not (inner and key.startswith(inner))]

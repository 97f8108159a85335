"""The local form: one entry per unit, this rank's part of the flat parameter without its padding.

No copies and no collectives. The entry is a view: it changes with the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.torch_private import ShardedTensor, ShardMetadata, sharded_tensor_of
from fsdp.flat_parameter import FLAT_PARAM
from fsdp.full_params import taken_out
from fsdp.plain_names import PREFIX
from fsdp.state_dict.form import place_of
from fsdp.state_dict.names import param_names
from fsdp.state_dict.tensors import finish_others
from fsdp.state_dict.unit_form import Finish
from fsdp.wrapper_options import StateDictConfig
from fsdp.wrapper_unit import WrappedUnit


@contextmanager
def saving(unit: WrappedUnit, config: StateDictConfig) -> Iterator[Finish]:
    """Leave the sharded parameters registered while the modules of ``unit`` are saved."""
    with taken_out(unit._state) as group:
        yield partial(_finish, unit, group, config)


@contextmanager
def loading(
    unit: WrappedUnit, found: MutableMapping[str, Any], prefix: str, config: StateDictConfig
) -> Iterator[None]:
    """Write the entry of ``unit`` into its shard; the modules then copy what they have already."""
    with taken_out(unit._state) as group:
        if group is not None:
            value = found.pop(f"{prefix}{PREFIX}{FLAT_PARAM}")
            _fill(group, value)
            flat = unit._flat_param
            if flat is not None:
                found[f"{prefix}{PREFIX}{FLAT_PARAM}"] = flat
            else:
                for names, param in zip(param_names(unit), group.shard.plain, strict=True):
                    for name in names:
                        found[f"{prefix}{PREFIX}{name}"] = param.registered()
        yield


def problem_with(group: FSDPParamGroup, value: Any) -> str | None:
    """Return why ``value`` cannot be loaded into the shard of ``group``; None if it can."""
    if value is None:
        return (
            "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters: "
            "load it with the form and the wrapping that it was saved with"
        )
    if not isinstance(value, ShardedTensor):
        return (
            f"Tensors in local_state_dict should be ShardedTensor, got {type(value).__name__}: "
            "set the state dict type that it was saved with"
        )
    held, valid = value.local_shards(), _valid(group)
    if valid and len(held) != 1:
        return f"load_local_state_dict assume one shard per ShardedTensor, got {len(held)}"
    if valid and held[0].tensor.numel() != valid:
        return (
            f"Local shard size = {valid} and the tensor in the state_dict is "
            f"{held[0].tensor.numel()}: it was saved by other ranks, or wrapped otherwise"
        )
    return None


def _finish(
    unit: WrappedUnit,
    group: FSDPParamGroup | None,
    config: StateDictConfig,
    found: MutableMapping[str, Any],
    prefix: str,
) -> None:
    finish_others(unit, found, prefix, to_cpu=config.offload_to_cpu)
    if group is None:
        return
    for names in param_names(unit):
        for name in names:  # of parts, where the original parameters are registered
            found.pop(f"{prefix}{name}", None)
    found[f"{prefix}{FLAT_PARAM}"] = _value(group, to_cpu=config.offload_to_cpu)


@torch.no_grad()
def _fill(group: FSDPParamGroup, value: ShardedTensor) -> None:
    valid = _valid(group)
    if valid:
        group.shard.data.narrow(0, 0, valid).copy_(value.local_shards()[0].tensor)


def _value(group: FSDPParamGroup, *, to_cpu: bool) -> ShardedTensor:
    info, data, numel = group.mesh_info, group.shard.data, group.shard.layout.shard_numel
    shards = info.shard_group
    assert shards is not None, "a unit without shards saves the full form"
    own = data.detach().narrow(0, 0, _valid(group))
    if to_cpu:
        own = own.cpu()
    total = unpadded(group)
    places = [
        ShardMetadata(
            [rank * numel],
            [min(numel, total - rank * numel)],
            place_of(global_rank, own.device, own=rank == info.shard_rank),
        )
        for rank, global_rank in enumerate(dist.get_process_group_ranks(shards))
        if rank * numel < total
    ]
    held = own if own.numel() else None
    return sharded_tensor_of(held, places, size=(total,), dtype=own.dtype, group=shards)


def unpadded(group: FSDPParamGroup) -> int:
    """Return how many elements the flat parameter has, without the padding of its end."""
    starts = group.shard.layout.unsharded_offsets
    sizes = (param.shape.numel() for param in group.shard.plain)
    return max((start + n for start, n in zip(starts, sizes, strict=True)), default=0)


def _valid(group: FSDPParamGroup) -> int:
    """Return how many elements of this rank's shard are no padding."""
    numel = group.shard.layout.shard_numel
    return max(0, min(numel, unpadded(group) - group.mesh_info.shard_rank * numel))

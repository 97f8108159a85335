"""The sharded form: one entry per original parameter, of which each rank has a chunk of rows.

Ranks exchange the elements that others need; nobody gathers. Only a unit whose modules change what
they save or load, by hooks of their own, is gathered: those hooks expect whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fsdp.engine.mesh import device_of
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.trace import logger
from fsdp.flat_parameter import flat_params
from fsdp.full_params import taken_out, whole_params
from fsdp.plain_names import PREFIX
from fsdp.state_dict.exchange import chunks_of, fill_from_chunks
from fsdp.state_dict.form import chunked, gathered
from fsdp.state_dict.hooked import changes_loads, changes_saves
from fsdp.state_dict.members import (
    chunk_of,
    cut,
    is_of,
    part_of,
    parts_of_entries,
    place_of_part,
    to_load,
)
from fsdp.state_dict.names import below, param_names
from fsdp.state_dict.stand_ins import StandIns
from fsdp.state_dict.tensors import finish_others, memory_of
from fsdp.state_dict.unit_form import Finish
from fsdp.wrapper_options import StateDictConfig
from fsdp.wrapper_unit import WrappedUnit

Names = list[list[str]]


@contextmanager
def saving(unit: WrappedUnit, config: StateDictConfig) -> Iterator[Finish]:
    """Show what the chunks of ``unit`` will take the place of while its modules are saved.

    *Collective* over the shard group: one all-to-all. *Memory*: the chunks, three times.
    """
    if changes_saves(unit):
        with whole_params(unit._state, writeback=False):
            yield partial(_finish_whole, unit, config)
        return
    with taken_out(unit._state) as group:
        if group is None:
            yield partial(finish_others, unit, to_cpu=config.offload_to_cpu)
            return
        stand_ins = StandIns(group)
        with stand_ins.shown():
            yield partial(_finish, unit, group, stand_ins, config)


@contextmanager
def loading(
    unit: WrappedUnit, found: MutableMapping[str, Any], prefix: str, config: StateDictConfig
) -> Iterator[None]:
    """Write the entries of ``unit`` into the shards; the modules find their own parameters.

    A parameter without an entry keeps its values, and is reported as missing.

    *Collective* over the shard group: one all-to-all. *Memory*: the chunks, twice.
    """
    start = f"{prefix}{PREFIX}"
    names = [[f"{start}{name}" for name in each] for each in param_names(unit)]
    for key in (name for each in names for name in each if name not in found):
        logger.warning(
            "Did not find param with FQN %s, skipping it. The weight will not be filled if you "
            "expect it to be.",
            key,
        )
    opened = _load_whole if changes_loads(unit) else _load_chunks
    with opened(unit, found, names):
        yield


@contextmanager
def _load_whole(unit: WrappedUnit, found: MutableMapping[str, Any], names: Names) -> Iterator[None]:
    for group in unit._state.groups:
        for key in (name for each in names for name in each if name in found):
            found[key] = gathered(found[key], unit._state.device, group=group.mesh_info.shard_group)
    with whole_params(unit._state, writeback=True), parts_of_entries(unit._state.groups):
        yield


@contextmanager
def _load_chunks(
    unit: WrappedUnit, found: MutableMapping[str, Any], names: Names
) -> Iterator[None]:
    with taken_out(unit._state) as group:
        if group is None:
            yield
            return
        params = flat_params(group.shard.plain)
        there = [
            [key for key in each if isinstance(found.get(key), torch.Tensor)] for each in names
        ]
        chunks = {
            index: to_load(params[index], found[key], group.mesh_info)
            for index, keys in enumerate(there)
            for key in keys  # of several names the last one counts, as in any module
        }
        fill_from_chunks(group, chunks)
        del chunks
        with StandIns(group).shown():
            for keys, param in zip(there, params, strict=True):
                found.update(dict.fromkeys(keys, param.registered()))
            yield


def _finish(
    unit: WrappedUnit,
    group: FSDPParamGroup,
    stand_ins: StandIns,
    config: StateDictConfig,
    found: MutableMapping[str, Any],
    prefix: str,
) -> None:
    keys: dict[int, list[str]] = {}
    for key in below(found, prefix):
        index = stand_ins.index_of(found[key])
        if index is not None:
            keys.setdefault(index, []).append(key)
    chunks = chunks_of(group)
    for index, param in enumerate(flat_params(group.shard.plain)):
        for number, key in enumerate(keys.get(index, [])):
            # Every name has memory of its own, as in the full form.
            own = chunks[index] if number == 0 else chunks[index].clone()
            found[key] = chunk_of(
                param,
                own,
                group.mesh_info,
                use_dtensor=unit._device_mesh is not None,
                offload_to_cpu=config.offload_to_cpu,
            )
    finish_others(unit, found, prefix, to_cpu=config.offload_to_cpu)


def _finish_whole(
    unit: WrappedUnit, config: StateDictConfig, found: MutableMapping[str, Any], prefix: str
) -> None:
    use_dtensor, offload = unit._device_mesh is not None, config.offload_to_cpu
    for group in unit._state.groups:
        info, params = group.mesh_info, flat_params(group.shard.plain)
        names = {
            f"{prefix}{name}": param
            for param, each in zip(params, param_names(unit), strict=True)
            for name in each
        }
        whole = {memory_of(param.registered()) for param in params} - {None}
        parts = {place_of_part(param.registered()): param for param in params}
        for key in below(found, prefix):
            value = found[key]
            param = names.get(key) or parts.get(place_of_part(value))
            if param is not None and param.outer is not None and is_of(param, value):
                own = part_of(param, value, info)
                found[key] = cut(param, own, info, use_dtensor=True, offload_to_cpu=offload)
            elif memory_of(value) in whole or (key in names and memory_of(value) is not None):
                value = value.to(device_of(info.mesh))
                found[key] = chunked(value, info, use_dtensor=use_dtensor, offload_to_cpu=offload)
    finish_others(unit, found, prefix, to_cpu=config.offload_to_cpu)

"""The full form: whole parameters under the names of the plain model, gathered unit by unit.

A unit gathers its parameters when the recursion enters it and gives them up when it leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from fsdp.full_params import whole_params
from fsdp.state_dict.names import below, named_buffers, param_names
from fsdp.state_dict.tensors import copied, finish_others, memory_of
from fsdp.state_dict.unit_form import Finish
from fsdp.wrapper_options import FullStateDictConfig, StateDictConfig
from fsdp.wrapper_unit import WrappedUnit


@contextmanager
def saving(unit: WrappedUnit, config: StateDictConfig) -> Iterator[Finish]:
    """Show the whole parameters of ``unit`` while its modules are saved.

    *Collective* over the shard group: one all-gather. *Memory*: the whole parameters.
    """
    assert isinstance(config, FullStateDictConfig)
    with ExitStack() as stack:
        if not unit._is_open():  # inside a summon they are shown already
            stack.enter_context(whole_params(unit._state, writeback=False))
        yield partial(_finish, unit, config)


@contextmanager
def loading(
    unit: WrappedUnit, found: MutableMapping[str, Any], prefix: str, config: StateDictConfig
) -> Iterator[None]:
    """Show the whole parameters of ``unit`` while its modules are loaded; changes stay.

    *Collective* over the shard group: one all-gather. *Memory*: the whole parameters.
    """
    with whole_params(unit._state, writeback=True):
        yield


def _finish(
    unit: WrappedUnit, config: FullStateDictConfig, found: MutableMapping[str, Any], prefix: str
) -> None:
    names = [f"{prefix}{name}" for each in param_names(unit) for name in each]
    if config.rank0_only and not unit._is_first_of_shards():
        for key in (*names, *(prefix + name for name, _ in named_buffers(unit))):
            found.pop(key, None)
        return
    params = [param for group in unit._state.groups for param in group.fsdp_params]
    whole = {memory_of(param.registered()) for param in params} - {None}
    for key in below(found, prefix):
        value = found[key]
        if memory_of(value) in whole:
            found[key] = copied(value, to_cpu=config.offload_to_cpu)
    finish_others(unit, found, prefix, to_cpu=config.offload_to_cpu)

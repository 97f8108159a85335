"""The full form: whole parameters under the names of the plain model, gathered unit by unit.

A unit gathers its parameters when the recursion enters it and gives them up when it leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from fsdp.flat_parameter import FlatParam, flat_params
from fsdp.full_params import whole_params
from fsdp.state_dict.members import Place, parts_of_entries, place_of_part, whole_of
from fsdp.state_dict.names import below, named_buffers, param_names
from fsdp.state_dict.tensors import copied, finish_others, memory_of
from fsdp.state_dict.unit_form import Finish
from fsdp.wrapper_options import FullStateDictConfig, StateDictConfig
from fsdp.wrapper_unit import WrappedUnit


@contextmanager
def saving(unit: WrappedUnit, config: StateDictConfig) -> Iterator[Finish]:
    """Show the whole parameters of ``unit`` while its modules are saved.

    *Collective* over the shard group: one all-gather; and one for each parameter that tensor
    parallelism has cut, over its mesh. *Memory*: the whole parameters.
    """
    assert isinstance(config, FullStateDictConfig)
    with ExitStack() as stack:
        alone = unit._is_open()  # inside a summon they are shown already, and others may not save
        if not alone:
            stack.enter_context(whole_params(unit._state, writeback=False))
        yield partial(_finish, unit, config, not alone)


@contextmanager
def loading(
    unit: WrappedUnit, found: MutableMapping[str, Any], prefix: str, config: StateDictConfig
) -> Iterator[None]:
    """Show the whole parameters of ``unit`` while its modules are loaded; changes stay.

    *Collective* over the shard group: one all-gather. *Memory*: the whole parameters.
    """
    with whole_params(unit._state, writeback=True), parts_of_entries(unit._state.groups):
        yield


def _finish(
    unit: WrappedUnit,
    config: FullStateDictConfig,
    gathers: bool,  # noqa: FBT001 - bound by position
    found: MutableMapping[str, Any],
    prefix: str,
) -> None:
    names = [f"{prefix}{name}" for each in param_names(unit) for name in each]
    if config.rank0_only and not unit._is_first_of_shards():
        for key in (*names, *(prefix + name for name, _ in named_buffers(unit))):
            found.pop(key, None)
        return
    params = flat_params(param for group in unit._state.groups for param in group.fsdp_params)
    _finish_parts(params, found, prefix, gathers=gathers, to_cpu=config.offload_to_cpu)
    whole = {memory_of(param.registered()) for param in params} - {None}
    for key in below(found, prefix):
        value = found[key]
        if memory_of(value) in whole:
            found[key] = copied(value, to_cpu=config.offload_to_cpu)
    finish_others(unit, found, prefix, to_cpu=config.offload_to_cpu)


def _finish_parts(
    params: Sequence[FlatParam],
    found: MutableMapping[str, Any],
    prefix: str,
    *,
    gathers: bool,
    to_cpu: bool,
) -> None:
    """Make whole what tensor parallelism has cut; not inside a summon, where a rank may be alone.

    *Collective* over the meshes of ``params``, whatever this rank's modules have put into
    ``found``. *Memory*: the whole of one parameter beside the result.
    """
    keys: dict[Place | None, list[str]] = {}
    for key in below(found, prefix):
        keys.setdefault(place_of_part(found[key]), []).append(key)
    for param in params:
        shown = param.registered()
        if param.outer is None or shown is None:
            continue
        part = param.inside(shown)
        whole = whole_of(param, part) if gathers else part
        for number, key in enumerate(keys.get(place_of_part(shown), [])):
            # Every name has memory of its own.
            own = whole if whole is not part and number == 0 else copied(whole, to_cpu=False)
            found[key] = own if gathers else param.shown(own)
            if to_cpu:
                found[key] = found[key].cpu()

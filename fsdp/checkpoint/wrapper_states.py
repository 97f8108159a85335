"""States of wrapped models, as ``torch.distributed.checkpoint.state_dict`` has them of any other.

What torch's functions do for its own wrapper, for this package's: they test for torch's class.
Optimizers are in ``wrapper_optimizers.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fsdp.checkpoint.wrapper_names import as_registered, form
from fsdp.engine.agreement import Topic, agree
from fsdp.optim_state.names import Names
from fsdp.optim_state.request import Request
from fsdp.optim_state.sources import FirstRank, route_of
from fsdp.plain_names import plain
from fsdp.state_dict.form import gathered
from fsdp.wrapper_unit import units_of

State = dict[str, Any]
_ASKED = Topic(
    what="request to load a model state",
    parts="options",
    remedy="Pass the same StateDictOptions on all ranks.",
)


def model_state(
    model: nn.Module, submodules: Collection[nn.Module], options: StateDictOptions
) -> State:
    """Return parameters and buffers; {} on other ranks than the first if full and offloaded.

    *Collective*: over the ranks of the model.
    """
    with form(model, options):
        found = {plain(key): value for key, value in model.state_dict().items()}
    if submodules:
        found = _below(found, model, submodules, keep=options.keep_submodule_prefixes)
    if options.ignore_frozen_params:
        frozen = _frozen(model)
        found = {key: value for key, value in found.items() if key not in frozen}
    return _finished(found, model, options)


def load_model_state(model: nn.Module, state: Mapping[str, Any], options: StateDictOptions) -> Any:
    """Load parameters and buffers; return the missing and unexpected keys.

    *Collective*: over the ranks of the model. *Memory*: with ``broadcast_from_rank0`` the whole
    state in host memory of every rank.

    Raises:
        ValueError: ranks have other forms, or some have ``broadcast_from_rank0`` and others not.
    """
    names = Names(model)
    asked = [f"broadcast_from_rank0={options.broadcast_from_rank0}"]
    agree(asked, None, names.groups, names.device, _ASKED)
    if options.broadcast_from_rank0:
        state = _from_first(model, state)
    rename = as_registered(model)
    named = {rename(key): value for key, value in state.items()}
    with form(model, options):
        return model.load_state_dict(named, strict=options.strict)


def _below(
    found: State, model: nn.Module, submodules: Collection[nn.Module], *, keep: bool
) -> State:
    """Return the entries of ``submodules``, with or without their prefixes."""
    prefixes = [f"{plain(path)}." for path, module in model.named_modules() if module in submodules]
    return {
        key if keep else key[len(prefix) :]: value
        for key, value in found.items()
        for prefix in prefixes
        if key.startswith(prefix)
    }


def _frozen(model: nn.Module) -> set[str]:
    names = Names(model)
    found = {
        name
        for info in names.infos
        for name, trained in zip(info.names, info.param_requires_grad, strict=True)
        if not trained
    }
    found |= {
        key.unflat_param_names[0]
        for param, key in names.keys.items()
        if not key.is_fsdp_managed and not param.requires_grad
    }
    return {plain(name) for name in found}


def _finished(found: State, model: nn.Module, options: StateDictOptions) -> State:
    """Bring what no unit manages into the form that was asked for."""
    root = units_of(model)[0]
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    if options.full_state_dict:
        device = root._state.device
        found |= {key: gathered(value, device) for key, value in tensors.items()}
        if options.cpu_offload and not root._is_first_rank():
            return {}
    if options.cpu_offload:
        found |= {key: found[key].cpu() for key in tensors}
    return found


def _from_first(model: nn.Module, state: Mapping[str, Any]) -> State:
    names = Names(model)
    source = FirstRank(names.device, route_of(names, None))
    outline = source.structure(state)
    mine = state if Request().is_source(names) else outline
    return {key: source.other(mine[key]) for key in outline}

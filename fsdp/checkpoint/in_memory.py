"""``get_state_dict`` and its kin for any model: wrapped ones have their own way, others torch's.

Names and signatures of ``torch.distributed.checkpoint.state_dict``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_helpers
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fsdp.checkpoint import states
from fsdp.checkpoint.wrapper_optimizers import load_optimizer_state, optimizer_state
from fsdp.checkpoint.wrapper_states import load_model_state, model_state
from fsdp.joint_state import expect_separate
from fsdp.module import FSDPModule
from fsdp.wrapper_unit import units_of

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return parameters and buffers of ``model``, in the form that ``options`` ask for.

    *Collective*: over the ranks of the model.
    """
    if not units_of(model):
        return torch_helpers.get_model_state_dict(model, submodules=submodules, options=options)
    if submodules:
        _warn_of_submodules()
    return model_state(model, submodules or set(), _checked(options))


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> Any:
    """Return the state of ``optimizers`` under the names of the plain model.

    *Collective*: over the ranks of the model.

    Raises:
        NotImplementedError: an optimizer has one state for all of its parameters (``LBFGS``).
        RuntimeError: no optimizer.
    """
    chosen = _separate(optimizers)
    if not units_of(model):
        _reshard(model)
        return torch_helpers.get_optimizer_state_dict(
            model,
            chosen,
            submodules=submodules,
            options=options,
        )
    if not chosen:
        raise RuntimeError("Optimizers are not passed in but optim_only is set to True.")
    return optimizer_state(model, chosen, _checked(options))


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], Any]:
    """Return the states of ``model`` and of ``optimizers``; an empty one of the latter if none.

    *Collective*: over the ranks of the model.

    Raises:
        NotImplementedError: an optimizer has one state for all of its parameters (``LBFGS``).
    """
    chosen = _separate(optimizers)
    if not units_of(model):
        return torch_helpers.get_state_dict(
            model,
            chosen,
            submodules=submodules,
            options=options,
        )
    found = get_model_state_dict(model, submodules=submodules, options=options)
    return found, optimizer_state(model, chosen, _checked(options)) if chosen else {}


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Load parameters and buffers of ``model``; return the missing and unexpected keys.

    *Collective*: over the ranks of the model.
    """
    if not units_of(model):
        _reshard(model)
        return torch_helpers.set_model_state_dict(model, model_state_dict, options=options)
    return load_model_state(model, model_state_dict, _checked(options))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Any,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of ``optimizers``; parameters without an entry have no state afterwards.

    *Collective*: over the ranks of the model.

    Raises:
        NotImplementedError: an optimizer has one state for all of its parameters (``LBFGS``).
        RuntimeError: no optimizer; or strict, and the state does not name a trained parameter.
    """
    chosen = _separate(optimizers)
    if not units_of(model):
        _reshard(model)
        states.set_optimizer_state_dict(model, chosen, optim_state_dict, options=options)
        return
    if not chosen:
        raise RuntimeError("Optimizers are not passed in but optim_only is set to True.")
    load_optimizer_state(model, chosen, optim_state_dict, _checked(options))


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Any,
    optim_state_dict: Any,
    options: StateDictOptions | None = None,
) -> Any:
    """Load the states of ``model`` and ``optimizers``; return the missing and unexpected keys.

    *Collective*: over the ranks of the model.
    """
    chosen = _separate(optimizers)
    if chosen:
        set_optimizer_state_dict(model, chosen, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


def _separate(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return ``optimizers``; refuse those whose state cannot be told by parameter."""
    chosen = states._as_tuple(optimizers)
    expect_separate(chosen)
    return chosen


def _reshard(model: nn.Module) -> None:
    """Register sharded parameters: torch looks at what is registered, and an evaluation gathers."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _checked(options: StateDictOptions | None) -> StateDictOptions:
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("full_state_dict must be True when broadcast_from_rank0 is True.")
    return options


def _warn_of_submodules() -> None:
    warnings.warn(
        "Getting submodules only model/optim state_dict is deprecated: filter the state dict of "
        "the model instead.",
        FutureWarning,
        stacklevel=3,
    )

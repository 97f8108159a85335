"""Installs a unit on its modules: forward hooks, state-dict hooks, a guard for optimizers.

Every hook is a trampoline to a named method. Nothing is decided here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.unit import FSDPState

P = ParamSpec("P")
R = TypeVar("R")


def untraced(method: Callable[P, R]) -> Callable[P, R]:
    """Return ``method``, kept out of graphs that the compiler captures around it.

    The compiler is asked only while it traces: importing it costs seconds, and a permanent
    guard costs more per call than most hooks.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            hidden: Callable[P, R] = torch._dynamo.disable(method, recursive=True)
            return hidden(*args, **kwargs)
        return method(*args, **kwargs)

    return call


def install_forward_hooks(state: FSDPState) -> None:
    """Run ``state`` around the forward of each of its modules."""
    before, after = untraced(state.pre_forward), untraced(state.post_forward)
    for module in state.modules:
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # Called as well when forward raises: nothing else tells that it did.
        module.register_forward_hook(after, always_call=True)


def install_state_dict_hooks(group: FSDPParamGroup) -> None:
    """Show the sharded parameters to ``state_dict`` and take in what ``load_state_dict`` did."""
    owners: dict[nn.Module, None] = {}  # a set with an order
    for param in group.fsdp_params:
        for module, _ in param.info.owners():
            owners[module] = None

    def before(*_args: Any, **_kwargs: Any) -> None:
        group.to_sharded()

    def after(*_args: Any) -> None:
        group.relink()

    for module in owners:
        module.register_state_dict_pre_hook(before)
        module.register_load_state_dict_pre_hook(before)
        module.register_load_state_dict_post_hook(after)


_REPLACED = "_fsdp_replaced"
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_guarding = False


def guard_optimizers(original: nn.Parameter, name: str) -> None:
    """Name ``original``, now replaced by a sharded parameter, if an optimizer steps on it."""
    global _guarding
    setattr(original, _REPLACED, name)
    if not _guarding:
        _guarding = True
        register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: Optimizer, *_args: Any) -> None:
    if optimizer in _checked:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stale = [name for param in params if (name := getattr(param, _REPLACED, None)) is not None]
    if stale:
        shown = ", ".join(stale[:3]) + (", ..." if len(stale) > 3 else "")
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(stale)} parameters that were sharded after it "
            f"was made ({shown}): its steps would change nothing. Make the optimizer after "
            "sharding."
        )
    _checked.add(optimizer)

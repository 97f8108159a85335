"""Installs a unit on its modules: forward hooks and state-dict hooks.

Every hook is a trampoline to a named method. Nothing is decided here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from fsdp.engine.forward import post_forward, pre_forward
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.unit import FSDPState

P = ParamSpec("P")
R = TypeVar("R")


def untraced(method: Callable[P, R]) -> Callable[P, R]:
    """Return ``method``, kept out of graphs that the compiler captures around it.

    The compiler is asked only while it traces: importing it costs seconds, and a permanent
    guard costs more per call than most hooks.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            hidden: Callable[P, R] = torch._dynamo.disable(method, recursive=True)
            return hidden(*args, **kwargs)
        return method(*args, **kwargs)

    return call


def install_forward_hooks(state: FSDPState) -> None:
    """Run ``state`` around the forward of each of its modules."""
    before = untraced(functools.partial(pre_forward, state))
    after = untraced(functools.partial(post_forward, state))
    for module in state.modules:
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # Called as well when forward raises: nothing else tells that it did.
        module.register_forward_hook(after, always_call=True)


def wrap_method(state: FSDPState, module: nn.Module, method_name: str) -> None:
    """Run ``state`` around another method of ``module`` than ``forward``."""
    original = getattr(module, method_name)
    before, after = untraced(pre_forward), untraced(post_forward)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(state, module, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except Exception:
            after(state, module, args, None)
            raise
        return after(state, module, args, output)

    setattr(module, method_name, wrapped)


def install_state_dict_hooks(
    group: FSDPParamGroup, portable: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Show the sharded parameters to ``state_dict`` and take in what ``load_state_dict`` did.

    What ``state_dict`` has detached goes through ``portable``, so that it can be saved and copied.
    """
    owners: dict[nn.Module, None] = {}  # a set with an order
    for param in group.fsdp_params:
        for module, _ in param.info.owners():
            owners[module] = None

    def before(*_args: Any, **_kwargs: Any) -> None:
        group.to_sharded()

    def after(*_args: Any) -> None:
        group.relink()

    def detached(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name in module._parameters:
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                state[prefix + name] = portable(value)

    for module in owners:
        module.register_state_dict_pre_hook(before)
        module.register_state_dict_post_hook(detached)
        module.register_load_state_dict_pre_hook(before)
        module.register_load_state_dict_post_hook(after)

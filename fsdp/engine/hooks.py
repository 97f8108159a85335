"""Installs a unit on its modules: forward hooks and state-dict hooks.

Every hook is a trampoline to a named function, none of which the compiler enters. Nothing is
decided here.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fsdp.engine.forward import post_forward, pre_forward
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.torch_private import untraced_frame
from fsdp.engine.unit import FSDPState


def install_forward_hooks(state: FSDPState) -> None:
    """Run ``state`` around the forward of each of its modules."""
    before = functools.partial(pre_forward, state)
    after = functools.partial(post_forward, state)
    for module in state.modules:
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # Called as well when forward raises: nothing else tells that it did.
        module.register_forward_hook(after, always_call=True)


def wrap_method(state: FSDPState, module: nn.Module, method_name: str) -> None:
    """Run ``state`` around another method of ``module`` than ``forward``."""
    original = getattr(module, method_name)

    @untraced_frame
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pre_forward(state, module, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            post_forward(state, module, args, None)
            raise
        return post_forward(state, module, args, output)

    setattr(module, method_name, wrapped)


def install_state_dict_hooks(group: FSDPParamGroup) -> None:
    """Show the sharded parameters to ``state_dict`` and take in what ``load_state_dict`` did."""
    owners: dict[nn.Module, None] = {}  # a set with an order
    for param in group.fsdp_params:
        for module, _ in param.info.owners():
            owners[module] = None
    inside = {each for owner in owners for each in owner.modules() if each is not owner}

    def show(*_args: Any, **_kwargs: Any) -> None:
        group.to_sharded()

    def before(*_args: Any, **_kwargs: Any) -> None:
        group.to_sharded()
        group.follow()

    def after(*_args: Any) -> None:
        group.relink()

    for module in owners:
        module.register_state_dict_pre_hook(before)
        # A load that assigns may be half through with a parameter that an owner around it shares.
        module.register_load_state_dict_pre_hook(show if module in inside else before)
        module.register_load_state_dict_post_hook(after)

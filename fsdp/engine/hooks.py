"""Installs a unit on its modules: forward hooks and state-dict hooks.

Every hook is a trampoline to a named function, none of which the compiler enters. Nothing is
decided here.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fsdp.engine.forward import post_forward, pre_forward
from fsdp.engine.param import FSDPParam
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
    """Show the sharded parameters to ``state_dict`` and take in what ``load_state_dict`` did.

    *Host cost*: what one walk asks of all parameters it asks where it enters the group; of a
    module inside it asks for that module's own.
    """
    owned: dict[nn.Module, list[FSDPParam]] = {}
    for param in group.fsdp_params:
        for module, _ in param.info.owners():
            owned.setdefault(module, []).append(param)
    owned.update(dict.fromkeys(group.modules, group.fsdp_params))  # who has one asks for all
    inside = {each for outer in group.modules for each in outer.modules() if each is not outer}
    load = _Load(group)
    for module, params in owned.items():
        _install(module, params, load, inner=module in inside)


def _install(module: nn.Module, params: list[FSDPParam], load: _Load, *, inner: bool) -> None:
    """Install functions, which a copy of ``module`` shares: all else is copied with what it holds.

    A group refuses to be.
    """

    def save(*_args: Any) -> None:
        load.group.to_sharded()
        load.group.follow(params)

    def enter(entered: nn.Module, *args: Any) -> None:
        load.enter(entered, args[4], inner=inner)

    def leave(left: nn.Module, incompatible: Any) -> None:
        load.leave(left, incompatible.missing_keys)

    module.register_state_dict_pre_hook(save)
    module.register_load_state_dict_pre_hook(enter)
    module.register_load_state_dict_post_hook(leave)


class _Load:
    """Loads of a group's parameters: looked at before and after each, not at every module.

    Between, one that assigns may be half through with a parameter that two modules share.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self.group = group
        # The walk under way, known by the list in which it collects missing keys, and the module by
        # which it has entered the group. One that an error has ended is followed by another list.
        self._walk: tuple[list[str], nn.Module] | None = None

    def enter(self, module: nn.Module, missing: list[str], *, inner: bool) -> None:
        """Show what is sharded; the first module of a walk lets the group see what is there.

        An ``inner`` one does not, inside a module of the group: loaders that give each module a
        list of its own, or load one by itself in the midst of a walk, may be half through.
        """
        self.group.to_sharded()
        if self._walk is None or self._walk[0] is not missing:
            self._walk = (missing, module)
            if not inner:
                self.group.follow()

    def leave(self, module: nn.Module, missing: list[str]) -> None:
        """Adopt what was loaded, once the walk is through with the module that it entered by."""
        if self._walk is not None and self._walk[0] is missing:
            if self._walk[1] is not module:
                return
            self._walk = None
        self.group.relink()

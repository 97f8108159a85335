"""Watches the optimizers of the process while whole parameters may exist. Knows no sharding.

Names parameters that an optimizer must not hold, at its first step: one that was made before
sharding, or while parameters are whole, would step on tensors that nobody reads afterwards,
silently, for a whole training run. Refuses one that wants sparse gradients. Lets others look at an
optimizer before its first step, for what they know of its parameters. And tells trees of units of
steps: they make old what was gathered.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SparseAdam
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fsdp.engine.torch_private import graph_task, untraced

Look = Callable[[Optimizer, Mapping[torch.Tensor, str]], None]

_MARK = "_fsdp_seen_by_optimizers"
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Listener(Protocol):
    """What is told of steps."""

    def is_stepped_on(self, held: Set[int]) -> bool:
        """Whether a parameter of the listener is among ``held``: those of an optimizer, by id."""

    def after_step(self, *, surely: bool) -> None:
        """An optimizer has stepped that has parameters of the listener, or of no listener.

        Outside of backward: steps inside of one are not told.

        ``surely``: the former. The latter may write to any, such as one that keeps copies of them.
        """


class _Mark:
    """What a parameter is called, and who looks at its optimizers; lives as long as it does."""

    def __init__(self, name: str, look: Look) -> None:
        self.name = name
        self.look = look

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing of it goes into files, which must load where this package is not.

        An empty set is what ``torch.load`` makes without trust in the file; None is no object.
        """
        return set, ()


class _Guard:
    """The hooks on every optimizer's step, installed while marked parameters are alive."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._marks: set[weakref.ref[_Mark]] = set()
        self._hooks: list[RemovableHandle] = []
        # re-entrant: a collection that starts inside may drop a mark on the same thread
        self._lock = threading.RLock()

    def listen(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.add(listener)

    def watch(self, mark: _Mark) -> None:
        with self._lock:
            self._marks.add(weakref.ref(mark, self._drop))
            if not self._hooks:
                self._hooks = [
                    register_optimizer_step_pre_hook(_check_optimizer),
                    register_optimizer_step_post_hook(self._tell),
                ]

    @untraced
    def _tell(self, optimizer: Optimizer, *_args: Any) -> None:
        # Optimizers that step inside a backward step on what it is through with; the rest is still
        # needed as forward had it. One for each parameter: nobody is to be asked about each.
        if graph_task() != -1:
            return
        with self._lock:  # another thread may start with a model of its own
            listeners = list(self._listeners)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        stepped = [listener for listener in listeners if listener.is_stepped_on(held)]
        for listener in stepped or listeners:
            listener.after_step(surely=bool(stepped))

    def _drop(self, gone: weakref.ref[_Mark]) -> None:
        with self._lock:
            self._marks.discard(gone)
            if not self._marks:
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []


_guard = _Guard()


def tell_of_steps(listener: Listener) -> None:
    """Call ``listener.after_step`` as long as it and a marked parameter live.

    After each step of an optimizer that has parameters of it, or of no listener at all.
    """
    _guard.listen(listener)


def look_at_optimizers(param: nn.Parameter, name: str, look: Look) -> None:
    """Call ``look`` before the first step of an optimizer that holds ``param``.

    It is given the optimizer, and by name the parameters in it that were given the same ``look``;
    what it raises, the step raises, and the next one is looked at again. Every optimizer of the
    process is looked at, once, as long as such a parameter is alive.
    """
    mark = _Mark(name, look)
    setattr(param, _MARK, mark)
    _guard.watch(mark)


def is_looked_at(param: torch.Tensor) -> bool:
    """Whether ``look_at_optimizers`` was given ``param``, and no swap has undone it since."""
    return isinstance(vars(param).get(_MARK), _Mark)


def refuse_in_optimizers(param: nn.Parameter, name: str, reason: str) -> None:
    """Let an optimizer that holds ``param`` raise a ValueError at its first step."""
    look_at_optimizers(param, name, _refusal(reason))


@functools.cache
def _refusal(reason: str) -> Look:
    """Return what refuses for ``reason``, the same object for each parameter."""

    def refuse(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        shown = ", ".join([*names.values()][:3]) + (", ..." if len(names) > 3 else "")
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(names)} parameters that {reason} "
            f"({shown}): its steps would change nothing. Make the optimizer over the sharded "
            "parameters, after sharding."
        )

    return refuse


@untraced
def _check_optimizer(optimizer: Optimizer, *_args: Any) -> None:
    if optimizer in _checked:
        return
    names: dict[Look, dict[torch.Tensor, str]] = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        mark = getattr(param, _MARK, None)
        if isinstance(mark, _Mark):  # else it was loaded with the parameter
            names.setdefault(mark.look, {})[param] = mark.name
    for look, of_params in names.items():
        if isinstance(optimizer, SparseAdam):
            raise NotImplementedError(
                f"{type(optimizer).__name__} takes sparse gradients only, and those of sharded "
                f"parameters, such as '{next(iter(of_params.values()))}', are dense. Use Adam."
            )
        look(optimizer, of_params)
    _checked.add(optimizer)

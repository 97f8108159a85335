"""Watches the optimizers of the process while whole parameters may exist. Knows no sharding.

Names parameters that an optimizer must not hold, at its first step: one that was made before
sharding, or while parameters are whole, would step on tensors that nobody reads afterwards,
silently, for a whole training run. And tells trees of units of every step: it makes old what they
have gathered.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

_MARK = "_fsdp_not_for_optimizers"
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Listener(Protocol):
    """What is told of every step."""

    def after_step(self) -> None:
        """An optimizer of the process has stepped."""


class _Mark:
    """What a parameter is called and why no optimizer may hold it; lives as long as it does."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason


class _Guard:
    """The hooks on every optimizer's step, installed while marked parameters are alive."""

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._marks: set[weakref.ref[_Mark]] = set()
        self._hooks: list[RemovableHandle] = []
        # re-entrant: a collection that starts inside may drop a mark on the same thread
        self._lock = threading.RLock()

    def watch(self, mark: _Mark) -> None:
        with self._lock:
            self._marks.add(weakref.ref(mark, self._drop))
            if not self._hooks:
                self._hooks = [
                    register_optimizer_step_pre_hook(_check_optimizer),
                    register_optimizer_step_post_hook(self._tell),
                ]

    def _tell(self, *_args: Any) -> None:
        for listener in list(self.listeners):
            listener.after_step()

    def _drop(self, gone: weakref.ref[_Mark]) -> None:
        with self._lock:
            self._marks.discard(gone)
            if not self._marks:
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []


_guard = _Guard()


def tell_of_steps(listener: Listener) -> None:
    """Call ``listener.after_step`` after every step, as long as it and a marked parameter live."""
    _guard.listeners.add(listener)


def refuse_in_optimizers(param: nn.Parameter, name: str, reason: str) -> None:
    """Let an optimizer that holds ``param`` raise at its first step.

    Every optimizer of the process is looked at, once, as long as such a parameter is alive.
    """
    mark = _Mark(name, reason)
    setattr(param, _MARK, mark)
    _guard.watch(mark)


def _check_optimizer(optimizer: Optimizer, *_args: Any) -> None:
    if optimizer in _checked:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    marks = [mark for param in params if (mark := getattr(param, _MARK, None)) is not None]
    if marks:
        shown = ", ".join(mark.name for mark in marks[:3]) + (", ..." if len(marks) > 3 else "")
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(marks)} parameters that {marks[0].reason} "
            f"({shown}): its steps would change nothing. Make the optimizer over the sharded "
            "parameters, after sharding."
        )
    _checked.add(optimizer)

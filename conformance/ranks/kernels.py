"""Stand before the kernels of collectives, so that who asks sees each one before it is issued.

A collective ends in the kernel of a device, whoever issues it: Python, DDP below Python, an
operator on DTensors, a compiled graph, autograd. Seen from there, nothing else is slowed down. A
dispatch mode would see the same and be called for every operator on every tensor: under one, a
small model trains at less than half the speed.

Knows torch's dispatcher. Must not know what collectives mean, nor who watches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import library as dispatcher

from conformance.ranks.operators import NOT_COLLECTIVES

__all__ = ["Issue", "unwatch", "watch"]

Issue: TypeAlias = Callable[[], Any]
Watcher: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any], Issue], Any]
"""Called with an operator, its arguments, and what issues it; returns what that returned."""

_NAMESPACES = ("c10d", "_c10d_functional")

_PLACE = torch._C.DispatchKey.BackendSelect
"""Where our kernels stand: below autograd, modes and tensor subclasses, right above the devices'.

Every call passes here, in inference mode too; operators that take tensors have no kernel of their
own there.
"""
_BELOW = torch._C._dispatch_keyset_full_after(_PLACE)
_SHAPES_ONLY = torch._C.DispatchKey.Meta
"""Of tensors without elements, with which compilers try out what a graph will do."""

_watchers: list[Watcher] = []
_thread = threading.local()


def watch(watcher: Watcher) -> None:
    """From now on `watcher` issues the collectives of this process, on whichever thread.

    What a collective issues in its turn, on the same thread, is part of it and not shown.
    """
    _stand_before()
    _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    """The reverse of `watch`."""
    _watchers.remove(watcher)


@cache
def _stand_before() -> list[dispatcher.Library]:
    """Register our kernels, once a process; they stay as long as what is returned."""
    libraries = [dispatcher.Library(namespace, "IMPL") for namespace in _NAMESPACES]
    names = sorted(torch._C._dispatch_get_all_op_names())
    for library in libraries:
        for name in names:
            namespace, _, operator = name.partition("::")
            if namespace == library.ns and operator not in NOT_COLLECTIVES:
                kernel = partial(_call, _operator(namespace, operator))
                library.impl(name, kernel, _PLACE.name, with_keyset=True)
    return libraries


def _operator(namespace: str, name: str) -> Any:
    """What the dispatcher calls `name` in `namespace`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _call(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Our kernel of `operator`: torch's, with the watchers around it.

    Not by the kernels that `get_kernel` finds, which run with Python's lock: a thread of a backend
    that waits for the lock may hold what they wait for.
    """
    issue: Issue = partial(operator.redispatch, keys & _BELOW, *args, **kwargs)
    if not _watchers or getattr(_thread, "inside", False) or keys.has(_SHAPES_ONLY):
        return issue()
    for watcher in _watchers:
        issue = partial(watcher, operator, args, kwargs, issue)
    _thread.inside = True
    try:
        return issue()
    finally:
        _thread.inside = False

"""Which module's forward or backward is running.

Forward is exact: a stack kept by global module hooks. Backward is the best knowledge without
touching the graph: the module whose backward *started* last, seen by a hook on the gradients of its
outputs. A collective that a wrapper issues when a module's backward ends (a reduce-scatter) is
therefore ascribed to the last inner module that the backward reached.

Knows modules and autograd. Must not know collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

__all__ = ["ModuleTracker", "in_backward", "strip_wrappers"]

WRAPPER_PARTS = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_dpp_module"}
)
"""Name components that wrappers put between a module and its parent."""

_MAX_OUTPUTS = 32


def strip_wrappers(name: str) -> str:
    """A fully qualified name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class ModuleTracker:
    """Answers `current()`; observes every module call between `install` and `remove`."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._forward: list[tuple[nn.Module, bool]] = []
        self._backward: str | None = None
        self._handles: list[Any] = []

    def name_modules(self, root: nn.Module) -> None:
        """Take the fully qualified names of all modules under `root`, wrapper parts removed.

        Names given later win, so a wrapped model may be named again.
        """
        inner = _unwrapped_root(root)
        if inner is not root:
            self._names[root] = ""
        for name, module in inner.named_modules():
            self._names[module] = strip_wrappers(name)

    def install(self) -> None:
        """Begin to observe."""
        self._handles = [
            register_module_forward_pre_hook(self._enter_forward),
            register_module_forward_hook(self._leave_forward, always_call=True),
        ]

    def remove(self) -> None:
        """Stop observing; harmless when not installed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forward.clear()

    def current(self) -> str | None:
        """Name of the module that runs; its class name if it was not named; None outside of all."""
        backward = in_backward()
        if self._forward and (not backward or self._forward[-1][1]):
            return self._name(self._forward[-1][0])
        return self._backward if backward else None

    def _name(self, module: nn.Module) -> str:
        name = self._names.get(module)
        return type(module).__name__ if name is None else name

    def _enter_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the compiler traces this hook too, and must find nothing in it
        # The flag tells a recomputation inside backward from a forward that is merely unfinished.
        self._forward.append((module, in_backward()))

    def _leave_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while self._forward:
            if self._forward.pop()[0] is module:
                break
        if torch.is_grad_enabled():
            name = self._name(module)
            for tensor in _tensors(output, _MAX_OUTPUTS):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    self._watch(tensor, name)

    def _watch(self, tensor: torch.Tensor, name: str) -> None:
        def enter_backward(grad: torch.Tensor) -> None:
            self._backward = name

        try:
            tensor.register_hook(enter_backward)
        except RuntimeError:
            return  # tensors of functorch transforms refuse hooks; the label stays the older one


def _unwrapped_root(root: nn.Module) -> nn.Module:
    """The model inside wrappers that keep it as their only child `module`."""
    if type(root).__name__ in {"DistributedDataParallel", "ShardedDataParallel"}:
        return root.module  # type: ignore[return-value]
    return root


def _tensors(value: Any, limit: int) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples, lists and dicts, at most about `limit` of them."""
    stack = [value]
    while stack and limit > 0:
        item = stack.pop()
        limit -= 1
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            stack.extend(item[:_MAX_OUTPUTS])
        elif isinstance(item, dict):
            stack.extend(list(item.values())[:_MAX_OUTPUTS])

"""Tensors inside the nested containers that modules take and return. No engine state.

Dicts, lists, tuples, named tuples, dataclasses and packed sequences are entered; anything else
that is no tensor is passed through as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to every tensor, containers of the same type.

    A container in which nothing changed is returned itself, so that identities survive.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):
        data = function(tree.data)
        return tree if data is tree.data else tree._replace(data=data)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(function, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return _map_dict(function, tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(function, tree)
    return tree


def _map_dict(
    function: Callable[[torch.Tensor], torch.Tensor], tree: dict[Any, Any]
) -> dict[Any, Any]:
    changed = {
        key: new for key, old in tree.items() if (new := map_tensors(function, old)) is not old
    }
    if not changed:
        return tree
    # A copy keeps the subclass, its order and, say, its default factory.
    copy = tree.copy()
    copy.update(changed)
    return copy


def _map_dataclass(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    changed = {
        item.name: new
        for item in dataclasses.fields(tree)
        if (new := map_tensors(function, old := getattr(tree, item.name))) is not old
    }
    if not changed:
        return tree
    copy = object.__new__(type(tree))
    # Not dataclasses.replace: it runs __init__ again, and fields may have init=False.
    for name, value in vars(tree).items():
        object.__setattr__(copy, name, changed.get(name, value))
    return copy


def grad_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of ``tree`` that require grad, in order, with repetitions."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.requires_grad else []
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return found


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Return ``tree`` with its floating-point tensors in ``dtype``."""
    if type(tree) is tuple and len(tree) == 1 and isinstance(tree[0], torch.Tensor):
        # By far the most frequent arguments, of which most need no cast.
        (only,) = tree
        return tree if only.dtype == dtype or not only.is_floating_point() else (only.to(dtype),)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == dtype or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return map_tensors(cast, tree)


def to_device(tree: Any, device: torch.device) -> Any:
    """Return ``tree`` with its tensors on ``device``."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    return map_tensors(move, tree)

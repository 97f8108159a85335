"""Announces that the gradients of some tensors are complete. Knows autograd and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp.engine.torch_private import hook_gradient, untraced


class _Watch(torch.autograd.Function):
    """An identity whose backward runs once all gradients of its outputs are complete."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.callback = callback
        return inputs

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.callback()
        return (None, *gradients)


def watch_inputs(
    inputs: Sequence[torch.Tensor], callback: Callable[[], None]
) -> list[torch.Tensor]:
    """Return stand-ins for ``inputs``; ``callback`` runs when the gradients of all are complete.

    One input, the common case, takes an alias and a hook on its gradient: a fifth of the cost of an
    autograd function, and in-place operations on it stay legal. The node hands gradients on as they
    are, where that of any other view would make views of them.
    """
    tensor = inputs[0]
    if len(inputs) > 1 or tensor.is_nested:  # which has no alias
        return list(_Watch.apply(callback, *inputs))  # type: ignore[no-untyped-call]
    watched = tensor[...]
    hook_gradient(watched, functools.partial(_tell, callback))
    return [watched]


@untraced
def _tell(callback: Callable[[], None], _gradient: torch.Tensor) -> None:
    callback()

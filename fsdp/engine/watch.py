"""Announces that the gradients of some tensors are complete. Knows autograd and nothing else.

Announces too that they are about to be differentiated themselves: what was used for them is
needed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp.engine.torch_private import hook_gradient, untraced

Again = Callable[[torch.Tensor], torch.Tensor | None]


class _Watch(torch.autograd.Function):
    """An identity whose backward runs once all gradients of its outputs are complete."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], again: Again, *inputs: torch.Tensor) -> Any:
        ctx.callback, ctx.again = callback, again
        return inputs

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.callback()
        for gradient in gradients:
            _expect_again(gradient, ctx.again)
        return (None, None, *gradients)


def watch_inputs(
    inputs: Sequence[torch.Tensor], callback: Callable[[], None], again: Again
) -> list[torch.Tensor]:
    """Return stand-ins for ``inputs``; ``callback`` runs when the gradients of all are complete.

    ``again`` runs before a backward through these gradients, if they are to have one.

    One input, the common case, takes an alias and a hook on its gradient: a fifth of the cost of an
    autograd function, and in-place operations on it stay legal. The node hands gradients on as they
    are, where that of any other view would make views of them.
    """
    tensor = inputs[0]
    if len(inputs) > 1 or tensor.is_nested:  # which has no alias
        return list(_Watch.apply(callback, again, *inputs))  # type: ignore[no-untyped-call]
    watched = tensor[...]
    hook_gradient(watched, functools.partial(_tell, callback, again))
    return [watched]


@untraced
def _tell(callback: Callable[[], None], again: Again, gradient: torch.Tensor) -> None:
    callback()
    _expect_again(gradient, again)


def _expect_again(gradient: torch.Tensor | None, again: Again) -> None:
    # A leaf is what the user has begun backward with: a hook would stay on it, for nothing.
    if gradient is not None and gradient.grad_fn is not None:
        hook_gradient(gradient, again)

"""What an optimizer makes of one parameter, for naming the cause of a wrong update.

Runs the real `torch.optim` class on a copy. Knows no history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.adapter import OptimizerFactory


def stepped(
    factory: OptimizerFactory, start: Tensor, gradients: Sequence[Tensor], *, warm_up: bool = False
) -> Tensor:
    """`start` after one step for each of `gradients`, in that order.

    Args:
        factory: makes the optimizer.
        start: the parameter before; not changed.
        gradients: one of the parameter's shape per step.
        warm_up: step once before that with a zero gradient and learning rate 0, which changes
            nothing but the optimizer's own state.
    """
    parameter = nn.Parameter(start.detach().clone())
    optimizer = factory([parameter])
    if warm_up:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for gradient in gradients:
        parameter.grad = gradient.detach().clone().to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


def state_after(
    factory: OptimizerFactory, start: Tensor, state: Mapping[str, Any], gradient: Tensor
) -> Mapping[str, Any]:
    """What the optimizer keeps of one parameter after one more step.

    Args:
        factory: makes the optimizer.
        start: the parameter before; not changed.
        state: what it kept until then; not changed.
        gradient: of the step, of the parameter's shape.
    """
    parameter = nn.Parameter(start.detach().clone())
    optimizer = factory([parameter])
    optimizer.state[parameter] = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }
    parameter.grad = gradient.detach().clone().to(parameter.dtype)
    optimizer.step()
    after: Mapping[str, Any] = optimizer.state[parameter]
    return after

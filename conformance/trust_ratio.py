"""An optimizer that needs the norm of each whole parameter, in its smallest form.

LARS, LAMB and their kind scale a parameter's update by the ratio of its norm to the update's. With
the norms of a part of it, every element moves by another amount. Knows no wrapper and no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class TrustRatio(Optimizer):
    """Gradient descent whose steps are as long as the parameter's norm says.

    Args:
        params: the parameters.
        lr: length of a step, in units of the parameter's own norm.
        momentum: what is left of the step before.
        weight_decay: added to the gradient, times the parameter.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.05,
        momentum: float = 0.5,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; of a DTensor the norms are those of the whole tensor.

        *Collective* for DTensors: what their norms need, once per parameter.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = parameter.grad + group["weight_decay"] * parameter
                ratio = self.norm(parameter) / (self.norm(update) + 1e-6)
                state = self.state[parameter]
                before = state.get("momentum")
                step = ratio * update
                state["momentum"] = step if before is None else group["momentum"] * before + step
                parameter.sub_(group["lr"] * state["momentum"])

    def norm(self, tensor: Tensor) -> Tensor:
        """The norm of the whole of `tensor`, 0-dim."""
        whole: Tensor = tensor.norm()
        return whole

"""Low-rank adapters inside the layers that they adapt: frozen and trainable weights in one unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "adapted"
RANK = 4


class AdaptedLinear(nn.Module):
    """A frozen linear layer and a trainable low-rank update of it.

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.linear.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.randn(outputs, RANK) * RANK**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs)."""
        update = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        out: Tensor = self.linear(x) + update
        return out


class Adapted(nn.Module):
    """Two adapted layers and a head, of which the bias alone trains.

    10 features, hidden layers of 20 and 16, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = AdaptedLinear(10, 20)
        self.second = AdaptedLinear(20, 16)
        self.head = nn.Linear(16, 4)
        self.head.weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 10) to (batch, 4)."""
        hidden = nn.functional.gelu(self.first(x))
        prediction: Tensor = self.head(nn.functional.gelu(self.second(hidden)))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Adapted()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (8, 10) and targets (8, 4)."""
    with drawing(NAME, rank, step, micro) as random:
        return regression(random, 8, 10, outputs=4)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets = batch
    return squared_error(module(inputs), targets)


CASE = ModelCase(
    name=NAME,
    why="Frozen and trainable weights share a unit: a wrapper that knows one answer per unit gives "
    "gradients to the frozen, none to the others, or refuses.",
    traits=frozenset({"frozen", "mixed"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(AdaptedLinear,),
)

"""Parameters that take no part in forward: a whole unit, and one inside a unit that is used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "unused"


class UnusedLayer(nn.Module):
    """A layer that is used, with a parameter that is not.

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.spare = nn.Parameter(torch.randn(outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs); leaves `spare` alone."""
        return nn.functional.gelu(self.linear(x))


class UnusedBranch(nn.Module):
    """A unit whose forward the root never calls.

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs)."""
        out: Tensor = self.linear(x)
        return out


class Unused(nn.Module):
    """Two used layers, and between them in registration order a branch that is not.

    10 features, hidden layers of 24 and 16, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = UnusedLayer(10, 24)
        self.branch = UnusedBranch(24, 16)
        self.second = UnusedLayer(24, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 10) to (batch, 4)."""
        prediction: Tensor = self.head(self.second(self.first(x)))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Unused()


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
    why="A parameter without a gradient: a wrapper may wait for it for ever, skip the reduction of "
    "its group, leave stale memory as its gradient, or let weight decay move it.",
    traits=frozenset({"unused"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(UnusedLayer, UnusedBranch),
)

"""Parameters without dimensions, which cannot be cut into rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "scalar"


class ScaledLayer(nn.Module):
    """A linear layer whose result is scaled by one trainable number, shape ().

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs)."""
        return nn.functional.gelu(self.linear(x) * self.scale)


class Scalar(nn.Module):
    """Two scaled layers and a head.

    8 features, hidden layers of 24 and 16, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = ScaledLayer(8, 24)
        self.second = ScaledLayer(24, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) to (batch, 4)."""
        prediction: Tensor = self.head(self.second(self.first(x)))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Scalar()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (8, 8) and targets (8, 4)."""
    with drawing(NAME, rank, step, micro) as random:
        return regression(random, 8, 8, outputs=4)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets = batch
    return squared_error(module(inputs), targets)


CASE = ModelCase(
    name=NAME,
    why="Shape (): a wrapper trains it and then fails to save it, or refuses when it is built, "
    "which is the better answer.",
    traits=frozenset({"scalar", "tiny"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(ScaledLayer,),
)

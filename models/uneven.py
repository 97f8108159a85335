"""Sizes that no small world divides: padding, short last shards and empty shards."""

from __future__ import annotations

from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "uneven"


class UnevenLayer(nn.Module):
    """A linear layer with a normalisation; all dim-0 sizes are the number of outputs.

    Args:
        inputs: features of the argument.
        outputs: features of the result, a number that 2, 3 and 4 do not divide.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs)."""
        return nn.functional.gelu(self.norm(self.linear(x)))


class Uneven(nn.Module):
    """Rows of 7, 13 and 5: in a world of 4 the rows of 5 leave one rank without any.

    11 features, hidden layers of 7 and 13, 5 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = UnevenLayer(11, 7)
        self.second = UnevenLayer(7, 13)
        self.head = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 11) to (batch, 5)."""
        prediction: Tensor = self.head(self.second(self.first(x)))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Uneven()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (8, 11) and targets (8, 5)."""
    with drawing(NAME, rank, step, micro) as random:
        return regression(random, 8, 11, outputs=5)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets = batch
    return squared_error(module(inputs), targets)


CASE = ModelCase(
    name=NAME,
    why="No dim-0 size is divisible by 2, 3 or 4: padding that leaks into gradients, norms or "
    "checkpoints, and rows lost or shifted at shard borders, show here.",
    traits=frozenset({"uneven"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(UnevenLayer,),
)

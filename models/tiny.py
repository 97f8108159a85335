"""Parameters with fewer elements than the world has ranks, beside parameters of ordinary size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "tiny"


class Gain(nn.Module):
    """One number, shape (1,), and nothing else: a parameter group smaller than any world.

    It starts away from one, so that leaving it out shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.25]))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same shape."""
        return x * self.gain


class TinyLayer(nn.Module):
    """A linear layer beside a scale and a shift of 3 elements, each used by a third of the row.

    Args:
        inputs: features of the argument.
        outputs: features of the result, a multiple of 3.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.scale = nn.Parameter(torch.empty(3).uniform_(0.75, 1.25))
        self.shift = nn.Parameter(torch.empty(3).uniform_(-0.25, 0.25))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs)."""
        thirds = self.linear(x).unflatten(-1, (-1, 3))
        return nn.functional.gelu((thirds * self.scale + self.shift).flatten(-2))


class Tiny(nn.Module):
    """Two layers with a `Gain` between them, and a head of shape (1, n) with a bias of shape (1,).

    8 features, hidden layers of 24 and 18, one output. There is no parameter of shape (): both of
    PyTorch's wrappers refuse those.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = TinyLayer(8, 24)
        self.gain = Gain()
        self.second = TinyLayer(24, 18)
        self.head = nn.Linear(18, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) to (batch, 1)."""
        prediction: Tensor = self.head(self.second(self.gain(self.first(x))))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Tiny()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (8, 8) and targets (8, 1)."""
    with drawing(NAME, rank, step, micro) as random:
        return regression(random, 8, 8, outputs=1)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets = batch
    return squared_error(module(inputs), targets)


CASE = ModelCase(
    name=NAME,
    why="Shapes (1,), (1, n) and (3,): some ranks own nothing of a parameter, or nothing of a "
    "whole group, where shards of size zero are lost, reduced wrongly or crash.",
    traits=frozenset({"tiny"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(TinyLayer, Gain),
)

"""Parameters that take part in some micro-batches and steps and not in others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "varying"


class SwitchedLayer(nn.Module):
    """A linear layer with two shifts, of which each forward uses one.

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.even = nn.Parameter(torch.randn(outputs) * 0.1)
        self.odd = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """(batch, inputs), (batch,) to (batch, outputs); the first sample's turn counts."""
        return nn.functional.gelu(self.linear(x) + (self.odd if int(turn[0]) % 2 else self.even))


class Varying(nn.Module):
    """Two switched layers and a head.

    10 features, hidden layers of 20 and 16, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = SwitchedLayer(10, 20)
        self.second = SwitchedLayer(20, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """(batch, 10), (batch,) to (batch, 4)."""
        prediction: Tensor = self.head(self.second(self.first(x, turn), turn))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Varying()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (8, 10) and targets (8, 4); whose turn it is, (8,), is the same on all ranks.

    With one micro-batch a step, what one step uses the next one does not. With three, the last one
    does not use what the one before it did.
    """
    with drawing(NAME, rank, step, micro) as random:
        return *regression(random, 8, 10, outputs=4), torch.full((8,), step + micro)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets, turn = batch
    return squared_error(module(inputs, turn), targets)


CASE = ModelCase(
    name=NAME,
    why="What took part before does not now: a wrapper reduces what the last micro-batch used and "
    "nothing else, or keeps a gradient of the step before.",
    traits=frozenset({"varying"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(SwitchedLayer,),
    concatenate=False,
)

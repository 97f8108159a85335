"""Batch normalisation: buffers that forward writes, an integer one, and one that is not saved."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "batchnorm"


class NormalisedLayer(nn.Module):
    """A linear layer and a batch normalisation.

    The linear layer has no bias: its gradient would be zero, because the mean is subtracted again.

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs); in training mode updates the running statistics."""
        return nn.functional.gelu(self.norm(self.linear(x)))


class BatchNormModel(nn.Module):
    """Two `NormalisedLayer` units, a fixed input scale that is no part of the state, a head.

    10 features, hidden layers of 20 and 12, 4 outputs.
    """

    input_scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("input_scale", torch.linspace(0.5, 1.5, 10), persistent=False)
        self.first = NormalisedLayer(10, 20)
        self.second = NormalisedLayer(20, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 10) to (batch, 4)."""
        prediction: Tensor = self.head(self.second(self.first(x * self.input_scale)))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return BatchNormModel()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (12, 10) and targets (12, 4)."""
    with drawing(NAME, rank, step, micro) as random:
        return regression(random, 12, 10, outputs=4)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets = batch
    return squared_error(module(inputs), targets)


CASE = ModelCase(
    name=NAME,
    why="Running statistics, a step counter of integers and an unsaved buffer: a wrapper may cast, "
    "average, lose or fail to save buffers, or update them twice when it recomputes.",
    traits=frozenset({"buffers", "batchnorm"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(NormalisedLayer,),
    concatenate=False,
)

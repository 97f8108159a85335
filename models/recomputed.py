"""Activation checkpointing, inside a unit and around one: forward runs again during backward."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "recomputed"


class RecomputingLayer(nn.Module):
    """A unit that computes its body again in backward: checkpointing inside the unit.

    Args:
        width: features of argument and result.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        out: Tensor = x + checkpoint(self.body, x, use_reentrant=False)
        return out


class RecomputedLayer(nn.Module):
    """A unit that its caller computes again: checkpointing around the unit.

    Args:
        width: features of argument and result.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        return nn.functional.gelu(self.linear(x))


class Recomputed(nn.Module):
    """Stem, a layer that recomputes itself, one that is recomputed, a head.

    10 features, width 20, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(10, 20)
        self.inside = RecomputingLayer(20)
        self.outside = RecomputedLayer(20)
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 10) to (batch, 4)."""
        x = self.inside(self.stem(x))
        prediction: Tensor = self.head(checkpoint(self.outside, x, use_reentrant=False))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Recomputed()


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
    why="Forward runs again in backward: a wrapper may have freed what it needs, count the second "
    "run as another forward, or compute it in another precision.",
    traits=frozenset({"recomputed"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(RecomputingLayer, RecomputedLayer),
)

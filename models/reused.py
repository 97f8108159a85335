"""One unit called twice in one forward: its gradient has two parts and is complete only late."""

from __future__ import annotations

from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "reused"


class ReusedLayer(nn.Module):
    """A residual layer that can follow itself.

    Args:
        width: features of argument and result.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class SingleLayer(nn.Module):
    """A layer that is called once, between the two calls of the other.

    Args:
        width: features of argument and result.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        return nn.functional.gelu(self.linear(x))


class Reused(nn.Module):
    """Stem, shared layer, single layer, shared layer again, head.

    10 features, width 20, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(10, 20)
        self.shared = ReusedLayer(20)
        self.single = SingleLayer(20)
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 10) to (batch, 4)."""
        x = self.shared(self.stem(x))
        prediction: Tensor = self.head(self.shared(self.single(x)))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Reused()


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
    why="A unit runs twice before backward: a wrapper that reduces or reshards after its first "
    "backward loses half the gradient, adds it twice, or reads freed weights.",
    traits=frozenset({"reused"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(ReusedLayer, SingleLayer),
)

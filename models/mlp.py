"""The plain case: three linear layers with biases. What fails here fails everywhere."""

from __future__ import annotations

from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "mlp"


class MlpLayer(nn.Module):
    """A linear layer and a smooth activation (no dead units, so no gradient is zero).

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs)."""
        return nn.functional.gelu(self.linear(x))


class Mlp(nn.Module):
    """Two `MlpLayer` units and a linear head that belongs to the root.

    12 features, two hidden layers of 32 and 24, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = MlpLayer(12, 32)
        self.second = MlpLayer(32, 24)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 12) to (batch, 4)."""
        prediction: Tensor = self.head(self.second(self.first(x)))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Mlp()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (8, 12) and targets (8, 4)."""
    with drawing(NAME, rank, step, micro) as random:
        return regression(random, 8, 12, outputs=4)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets = batch
    return squared_error(module(inputs), targets)


CASE = ModelCase(
    name=NAME,
    why="Plain layers: a wrapper that reduces, scales or places gradients wrongly fails here "
    "before anything special is asked of it.",
    traits=frozenset(),
    build=build,
    batch=batch,
    loss=loss,
    units=(MlpLayer,),
)

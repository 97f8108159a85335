"""Wide layers and few samples, so that live bytes are parameters and little else."""

from __future__ import annotations

from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "wide"
WIDTH = 128


class WideLayer(nn.Module):
    """A square linear layer and a smooth activation: 64 KiB of weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 128) to (batch, 128)."""
        return nn.functional.gelu(self.linear(x))


class Wide(nn.Module):
    """Four `WideLayer` units and a linear head, less than a hundredth of the whole, at the root.

    128 features, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WideLayer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 128) to (batch, 4)."""
        for layer in self.layers:
            x = layer(x)
        prediction: Tensor = self.head(x)
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Wide()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (4, 128) and targets (4, 4)."""
    with drawing(NAME, rank, step, micro) as random:
        return regression(random, 4, WIDTH, outputs=4)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets = batch
    return squared_error(module(inputs), targets)


CASE = ModelCase(
    name=NAME,
    why="One unsharded unit that stays alive outweighs all activations, gradients of activations "
    "and the root's own parameters together.",
    traits=frozenset({"wide"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(WideLayer,),
)

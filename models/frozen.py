"""Fine-tuning: frozen weights in units of their own, trainable adapters in others.

A flat parameter either requires gradients or does not, so no unit mixes the two: each frozen layer
and each adapter is a unit, and everything that the root owns is trainable.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "frozen"
RANK = 4


class FrozenLinear(nn.Module):
    """A linear layer that does not train.

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.requires_grad_(False)

    def forward(self, x: Tensor, hint: Tensor | None = None) -> Tensor:
        """(batch, inputs) to (batch, outputs), whatever the hint."""
        out: Tensor = self.linear(x)
        return out


class Adapter(nn.Module):
    """A trainable low-rank update.

    Neither factor starts at zero, as `up` does in practice: `down` would have no gradient at first.

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.randn(outputs, RANK) * RANK**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs)."""
        return nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class Frozen(nn.Module):
    """A frozen encoder, two frozen layers with an adapter each, a trainable head.

    The encoder's output needs no gradient, so no backward reaches it, although it is handed a
    parameter that does need one. The second frozen layer does
    see a backward, for the sake of the first adapter, and holds no gradient after it. 10 features,
    width 20, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = FrozenLinear(10, 20)
        self.layers = nn.ModuleList(FrozenLinear(20, 20) for _ in range(2))
        self.adapters = nn.ModuleList(Adapter(20, 20) for _ in range(2))
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 10) to (batch, 4)."""
        x = torch.tanh(self.encoder(x, self.head.bias))
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            x = nn.functional.gelu(layer(x) + adapter(x))
        prediction: Tensor = self.head(x)
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Frozen()


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
    why="Frozen units beside trainable ones: a wrapper may reduce gradients that do not exist, "
    "never reshard a unit that has no gradient, or let weight decay move frozen weights.",
    traits=frozenset({"frozen"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(FrozenLinear, Adapter),
)

"""Parameters that are not contiguous: channels_last convolutions and a transposed matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, seeded, squared_error

NAME = "strided"


class StridedConv(nn.Module):
    """A convolution whose weight has the channels_last format.

    Args:
        inputs: channels of the argument.
        outputs: channels of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        weight = self.conv.weight.detach().contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, outputs, height, width)."""
        return nn.functional.gelu(self.conv(x))


class TransposedLinear(nn.Module):
    """A linear layer whose weight, shape (outputs, inputs), lies in memory as its transpose.

    Args:
        inputs: features of the argument.
        outputs: features of the result.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stored = torch.randn(inputs, outputs) * inputs**-0.5
        self.weight = nn.Parameter(stored.t())
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs)."""
        return nn.functional.linear(x, self.weight, self.bias)


class Strided(nn.Module):
    """Two `StridedConv` units, a mean over places, and a transposed linear layer in the root.

    3 channels, hidden layers of 8 and 12 channels, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = StridedConv(3, 8)
        self.second = StridedConv(8, 12)
        self.head = TransposedLinear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, 4)."""
        prediction: Tensor = self.head(self.second(self.first(x)).mean((2, 3)))
        return prediction


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Strided()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw images (4, 3, 6, 6) in channels_last format and targets (4, 4).

    Each image has a colour of its own: the mean over places would cancel noise alone, and all
    batches would give nearly the same gradient.
    """
    with drawing(NAME, rank, step, micro) as random:
        noise = torch.randn(4, 3, 6, 6, generator=random)
        colours = torch.randn(4, 3, 1, 1, generator=random)
        offsets = torch.linspace(2.0, 1.0, 4)
    images = (noise + colours).contiguous(memory_format=torch.channels_last)
    return images, 0.3 * torch.tanh(colours.sum((1, 2, 3))[:, None]) + offsets


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    images, targets = batch
    return squared_error(module(images), targets)


CASE = ModelCase(
    name=NAME,
    why="Memory order is not index order: a wrapper that flattens storage instead of elements, or "
    "rebuilds a parameter without its strides, permutes weights or slows convolutions.",
    traits=frozenset({"strided", "images"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(StridedConv,),
)

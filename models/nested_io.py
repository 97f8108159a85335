"""Units that pass dicts, tuples, named tuples and dataclasses, with None among the entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded, squared_error

NAME = "nested_io"


class Encoded(NamedTuple):
    """What the first unit returns."""

    hidden: Tensor
    mask: Tensor | None
    skips: tuple[Tensor, list[Tensor]]


@dataclass
class Mixed:
    """What the second unit returns. Not frozen: wrappers rebuild containers field by field."""

    hidden: Tensor
    mask: Tensor | None
    extra: dict[str, Tensor]


class DictToNamedTuple(nn.Module):
    """The first unit: a dict in, a named tuple with a nested tuple and list out.

    Args:
        inputs: features of the entry "x".
        outputs: features of the results.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, outputs)
        self.skip = nn.Linear(inputs, outputs)

    def forward(self, features: dict[str, Tensor | None]) -> Encoded:
        """{"x": (batch, inputs), "mask": None} to results of (batch, outputs)."""
        x = features["x"]
        assert x is not None, "the entry x always holds a tensor"
        skip = torch.tanh(self.skip(x))
        hidden = nn.functional.gelu(self.hidden(x))
        return Encoded(hidden, features["mask"], (skip, [skip * 0.5]))


class NamedTupleToDataclass(nn.Module):
    """The second unit: a named tuple and an argument that only goes by keyword, a dataclass out.

    Args:
        width: features of all tensors.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, encoded: Encoded, *, gain: Tensor) -> Mixed:
        """Results of the first unit, `gain` (batch, 1), to results of (batch, width)."""
        first, (second,) = encoded.skips
        hidden = nn.functional.gelu(self.linear(encoded.hidden) * gain + first)
        return Mixed(hidden, encoded.mask, {"second": second * gain})


class DataclassToTuple(nn.Module):
    """The third unit: a dataclass in, a tuple of a tensor, None and a dict out.

    Args:
        width: features of the argument's tensors.
        outputs: features of the results.
    """

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.second = nn.Linear(width, outputs)

    def forward(self, mixed: Mixed) -> tuple[Tensor, None, dict[str, Tensor]]:
        """Results of the second unit to results of (batch, outputs)."""
        return self.linear(mixed.hidden), None, {"side": self.second(mixed.extra["second"])}


class NestedIo(nn.Module):
    """The three units in a row and a root parameter; the root returns a dict too.

    10 features, width 20, 4 outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encode = DictToNamedTuple(10, 20)
        self.mix = NamedTupleToDataclass(20)
        self.decode = DataclassToTuple(20, 4)
        self.scale = nn.Parameter(torch.empty(4).uniform_(0.75, 1.25))

    def forward(self, features: dict[str, Tensor | None], *, gain: Tensor) -> dict[str, Any]:
        """{"x": (batch, 10), "mask": None} and (batch, 1) to results of (batch, 4)."""
        encoded = self.encode(features)
        out, nothing, side = self.decode(self.mix(encoded, gain=gain))
        return {"prediction": out * self.scale, "auxiliary": [(nothing, side["side"])]}


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return NestedIo()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (8, 10) inside a dict, a gain (8, 1), and targets (8, 4)."""
    with drawing(NAME, rank, step, micro) as random:
        inputs, targets = regression(random, 8, 10, outputs=4)
        gain = torch.rand(8, 1, generator=random) + 0.5
    return {"features": {"x": inputs, "mask": None}, "gain": gain, "targets": targets}


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared errors of both results of one forward."""
    out = module(batch["features"], gain=batch["gain"])
    ((_, auxiliary),) = out["auxiliary"]
    main = squared_error(out["prediction"], batch["targets"])
    return main + 0.5 * squared_error(auxiliary, batch["targets"])


CASE = ModelCase(
    name=NAME,
    why="Tensors hide in containers: a wrapper that looks for them only in plain arguments misses "
    "the moment to gather before backward, to cast, or to reduce, and loses keyword arguments.",
    traits=frozenset({"nested_io"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(DictToNamedTuple, NamedTupleToDataclass, DataclassToTuple),
)

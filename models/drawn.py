"""Models that are written in their names, so that whoever draws one can name it.

``drawn:6.(7b.5n).(5.(5s)r)f.3`` reads: six features in; a unit of a layer of 7 with bias and one of
5 with a normalisation; a frozen unit, called twice, of a layer of 5 and a unit of its own; a head
of 3. Sizes are numbers of features, and letters after the first one, a layer or a unit add to it:
``MODEL_LETTERS``, ``LAYER_LETTERS``, ``UNIT_LETTERS``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from .case import Batch, ModelCase, map_tensors
from .seeding import drawing as drawing_of
from .seeding import regression, seeded, squared_error

PREFIX = "drawn:"
MODEL_LETTERS: Mapping[str, str] = {"d": "weights, buffers and inputs are float64"}
LAYER_LETTERS: Mapping[str, str] = {
    "b": "a bias",
    "n": "a layer normalisation behind it",
    "s": "a weight that is stored transposed",
    "g": "a gain of one element",
    "t": "two more layers, square, that share one weight",
    "v": "a buffer that is added to the result, and a counter of forward passes",
}
UNIT_LETTERS: Mapping[str, str] = {
    "f": "does not train",
    "r": "is called twice, for which it must return as many features as it takes",
}
SAMPLES = 4
SMALL_WORLDS = (2, 3, 4)
_TOKEN = re.compile(r"(\d+)([a-z]*)|(\()|\)([a-z]*)|(\.)")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
        size: features of its result.
        letters: what it has besides a weight.
    """

    size: int
    letters: str = ""

    def __str__(self) -> str:
        return f"{self.size}{self.letters}"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Layers and units that become a parameter group together.

    Attributes:
        items: what it consists of, in the order of the forward pass.
        letters: what is special about it.
    """

    items: tuple[Layer | Unit, ...]
    letters: str = ""

    def __str__(self) -> str:
        return f"({_text(self.items)}){self.letters}"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A whole model; its string is its name.

    Attributes:
        inputs: features of its argument.
        items: what it consists of; the last one is a layer.
        letters: what is special about the whole.
    """

    inputs: int
    items: tuple[Layer | Unit, ...] = field(default=())
    letters: str = ""

    def __str__(self) -> str:
        return f"{PREFIX}{self.inputs}{self.letters}.{_text(self.items)}"

    @property
    def dtype(self) -> torch.dtype:
        """Of floating parameters, buffers and inputs."""
        return torch.float64 if "d" in self.letters else torch.float32


def _text(items: tuple[Layer | Unit, ...]) -> str:
    return ".".join(str(item) for item in items)


def parse(name: str) -> Drawing:
    """Read a name.

    Raises:
        ValueError: it is none, or what it describes cannot be built.
    """
    drawing = _read(name)
    if drawing is None or str(drawing) != name:
        raise ValueError(
            f"model {name!r}: not a drawn model; expected {PREFIX}INPUTS.ITEM.ITEM, such as"
            f" {PREFIX}6.(7b.5n)f.3"
        )
    problem = _problem(drawing)
    if problem:
        raise ValueError(f"model {name!r}: {problem}")
    return drawing


def _read(name: str) -> Drawing | None:
    """The drawing of `name` as far as it can be read; `parse` writes it again to compare."""
    text = name.removeprefix(PREFIX)
    open_units: list[list[Layer | Unit]] = [[]]
    for size, letters, opens, closed, dot in _TOKEN.findall(text):
        if size:
            open_units[-1].append(Layer(size=int(size), letters=letters))
        elif opens:
            open_units.append([])
        elif not dot:
            if len(open_units) == 1:
                return None
            items = tuple(open_units.pop())
            open_units[-1].append(Unit(items=items, letters=closed))
    whole = open_units.pop()
    if open_units or not whole or not isinstance(whole[0], Layer):
        return None
    return Drawing(inputs=whole[0].size, items=tuple(whole[1:]), letters=whole[0].letters)


def _problem(drawing: Drawing) -> str:
    """Why a drawing cannot be built; empty if it can."""
    if not drawing.items or not isinstance(drawing.items[-1], Layer):
        return "the last item must be a layer, whose result is compared with the targets"
    whole = f"{drawing.inputs}{drawing.letters}"
    problem = _wrong_letters(drawing.letters, MODEL_LETTERS, whole)
    return problem or next(
        _problems((Layer(size=drawing.inputs), *drawing.items), drawing.inputs), ""
    )


def _wrong_letters(letters: str, known: Mapping[str, str], of: str) -> str:
    if len(set(letters) & set(known)) == len(letters):
        return ""
    return f"letters {letters!r} of {of}: each of {''.join(known)!r} at most once"


def _problems(items: Sequence[Layer | Unit], size: int) -> Iterator[str]:
    for item in items:
        taken, size = size, size_of([item], size)
        known = LAYER_LETTERS if isinstance(item, Layer) else UNIT_LETTERS
        wrong = _wrong_letters(item.letters, known, str(item))
        if wrong:
            yield wrong
        if size < 1:
            yield "a size must be at least 1"
        if isinstance(item, Unit):
            if not item.items:
                yield "a unit needs at least one layer"
            if "r" in item.letters and size != taken:
                yield f"{item} is called twice, but takes {taken} and returns {size}"
            yield from _problems(item.items, taken)


class DrawnLayer(nn.Module):
    """A linear layer with what its letters say, and a smooth activation.

    Args:
        inputs: features of the argument.
        layer: its size and letters.
    """

    def __init__(self, inputs: int, layer: Layer) -> None:
        super().__init__()
        size, letters = layer.size, layer.letters
        self.linear = nn.Linear(inputs, size, bias="b" in letters)
        if "s" in letters:
            weight = self.linear.weight.detach()
            self.linear.weight = nn.Parameter(weight.t().contiguous().t())
        self.norm = nn.LayerNorm(size) if "n" in letters else nn.Identity()
        self.gain = nn.Parameter(torch.full((1,), 1.25)) if "g" in letters else None
        self.square, self.twin = None, None
        if "t" in letters:
            self.square = nn.Linear(size, size, bias=False)
            self.twin = nn.Linear(size, size, bias=False)
            self.twin.weight = self.square.weight
        self.offset: Tensor | None
        self.passes: Tensor | None
        held = "v" in letters
        self.register_buffer("offset", torch.linspace(-0.5, 0.5, size) if held else None)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long) if held else None)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, size)."""
        out: Tensor = self.norm(self.linear(x))
        if self.gain is not None:
            out = out * self.gain
        if self.square is not None and self.twin is not None:
            out = out + self.twin(torch.tanh(self.square(out)))
        if self.offset is not None and self.passes is not None:
            out = out + self.offset
            if self.training:
                self.passes += 1
        return torch.nn.functional.gelu(out) + 0.1 * out


class DrawnUnit(nn.Module):
    """What becomes a parameter group.

    Args:
        inputs: features of the argument.
        unit: its items and letters.
    """

    def __init__(self, inputs: int, unit: Unit) -> None:
        super().__init__()
        self.parts, self.times = _build(unit.items, inputs)
        if "f" in unit.letters:
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, features of the last item)."""
        return _passed(self.parts, self.times, x)


class Drawn(nn.Module):
    """The whole.

    Args:
        drawing: what it consists of.
    """

    def __init__(self, drawing: Drawing) -> None:
        super().__init__()
        self.parts, self.times = _build(drawing.items, drawing.inputs)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) to (batch, features of the last item)."""
        return _passed(self.parts, self.times, x)


def _passed(parts: nn.ModuleList, times: Sequence[int], x: Tensor) -> Tensor:
    # by number and not by type: a wrapper may put itself in the place of a part
    for part, count in zip(parts, times, strict=True):
        for _ in range(count):
            x = part(x)
    return x


def _build(items: Sequence[Layer | Unit], inputs: int) -> tuple[nn.ModuleList, list[int]]:
    """The modules of `items`, and how often each is called."""
    made, times, size = nn.ModuleList(), list[int](), inputs
    for item in items:
        taken, size = size, size_of([item], size)
        times.append(2 if isinstance(item, Unit) and "r" in item.letters else 1)
        made.append(DrawnLayer(taken, item) if isinstance(item, Layer) else DrawnUnit(taken, item))
    return made, times


def size_of(items: Sequence[Layer | Unit], inputs: int) -> int:
    """Features of the result of `items`, of which the first takes `inputs`."""
    for item in items:
        inputs = item.size if isinstance(item, Layer) else size_of(item.items, inputs)
    return inputs


def build(drawing: Drawing) -> nn.Module:
    """Make the model with its own weights."""
    with seeded(str(drawing)):
        return Drawn(drawing).to(drawing.dtype)


def batch(drawing: Drawing, rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (4, features) and targets (4, features of the last item)."""
    outputs = size_of(drawing.items, drawing.inputs)
    with drawing_of(str(drawing), rank, step, micro) as random:
        drawn = regression(random, SAMPLES, drawing.inputs, outputs=outputs)
    return map_tensors(lambda tensor: tensor.to(drawing.dtype), drawn)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Squared error of one forward."""
    inputs, targets = batch
    return squared_error(module(inputs), targets)


def traits(drawing: Drawing) -> frozenset[str]:
    """The traits of the model as it is built."""
    model = build(drawing)
    parameters = list(model.parameters())
    held = {
        "tied": len(parameters) < len(list(model.named_parameters(remove_duplicate=False))),
        "uneven": any(p.shape[0] % world for p in parameters for world in SMALL_WORLDS),
        "tiny": any(p.numel() < max(SMALL_WORLDS) for p in parameters),
        "frozen": not all(p.requires_grad for p in parameters),
        "buffers": any(True for _ in model.buffers()),
        "reused": any(2 in m.times for m in model.modules() if isinstance(m, (Drawn, DrawnUnit))),
        "strided": not all(p.is_contiguous() for p in parameters),
    }
    return frozenset(trait for trait, holds in held.items() if holds)


@lru_cache(maxsize=256)
def model_case(name: str) -> ModelCase:
    """The model case that `name` describes.

    Raises:
        ValueError: it describes none.
    """
    drawing = parse(name)
    return ModelCase(
        name=name,
        why="Drawn at random: what meets here, nobody thought of.",
        traits=traits(drawing),
        build=partial(build, drawing),
        batch=partial(batch, drawing),
        loss=loss,
        units=(DrawnUnit,),
        dtype=drawing.dtype,
    )

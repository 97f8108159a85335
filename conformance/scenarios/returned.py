"""What verbs of an adapter must return, looked at before it is recorded, for who wrote them.

Knows kinds of values. Must not know what is done with them, nor whether they are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from types import NoneType
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

Types: TypeAlias = type | tuple[type, ...]

LOSS = (Tensor, float, int)
SEVERAL = (Sequence, Set, ValuesView, Iterator, nn.ParameterList)  # a tensor would be its rows
NUMBERS_AND_WORDS = (bool, int, float, str, NoneType, list, tuple)


class Due(NamedTuple):
    """What a verb must return.

    Attributes:
        words: for the author of the adapter.
        levels: the type of the whole, of what is in it, of what is in that and in its parts.
    """

    words: str
    levels: tuple[Types, ...]


FQN_TO_TENSOR = Due("a mapping from FQN to tensor", (Mapping, Tensor))
STATE = Due("a mapping", (Mapping, object))

DUE: Mapping[str, Due] = {
    "step": Due("a conformance.StepResult with one loss per micro-batch", (LOSS,)),
    "evaluate": Due("the loss, a 0-dim tensor", (LOSS,)),
    "bare": Due("an nn.Module", (nn.Module,)),
    "full_parameters": FQN_TO_TENSOR,
    "full_gradients": Due("a mapping from FQN to tensor or None", (Mapping, (Tensor, NoneType))),
    "full_optimizer_state": Due(
        "a mapping from FQN to a mapping of tensors, numbers and strings",
        (Mapping, Mapping, (Tensor, Mapping, *NUMBERS_AND_WORDS)),
    ),
    "hyperparameters": Due(
        "a list of mappings of numbers and strings",
        ((list, tuple), Mapping, (Mapping, *NUMBERS_AND_WORDS)),
    ),
    "buffers": FQN_TO_TENSOR,
    "local_tensors": Due(
        "a mapping of 'parameters' and 'optimizer' to lists of tensors",
        (Mapping, SEVERAL, Tensor),
    ),
    "model_state": STATE,
    "optim_state": STATE,
}


def refuse_unless_due(owner: str, verb: str, got: object, at: str = "") -> None:
    """See that `got`, which `verb` of the class `owner` returned, perhaps as a part, is due.

    Raises:
        TypeError: it is not; says where in it.
    """
    due = DUE[verb]
    for place, value in _misfits(got, due.levels, at):
        found = "None" if value is None else f"an object of type {type(value).__name__}"
        inside = f", at {place} of what it returned" if place else ""
        raise TypeError(f"{owner}.{verb}() returned {found}{inside}; expected {due.words}")


def _misfits(value: object, levels: tuple[Types, ...], at: str) -> Iterator[tuple[str, object]]:
    """(place, what is there) of all that is of another type than due."""
    if not isinstance(value, levels[0]):
        yield at, value
        return
    if levels[0] is object:
        return  # nothing in it could be anything else
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    for key, part in parts:
        yield from _misfits(part, levels[1:] or levels, f"{at}[{key!r}]")

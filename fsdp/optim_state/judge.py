"""Whether what ranks, or the parts of one parameter, keep of an optimizer state is the same.

The one judge: of saves and loads by names, of resharding and of checkpoints. Values are compared as
what they are, never as bytes of a pickle, which differ for equal tensors. Knows values and texts;
who is heard, and what kind of error a difference is, is the caller's business.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp.engine.torch_private import local_tensor

Facts = Mapping[str, str]  # state name -> what it is


def text_of(value: Any) -> str:
    """Return a text that equal values share, and no others; of an object its kind alone.

    Numbers are compared by value, whether they are whole or not; a truth value is no number.
    """
    if isinstance(value, torch.Tensor):
        held = local_tensor(value) if isinstance(value, DTensor) else value
        shown = "meta" if held.is_meta else text_of(held.tolist())
        return f"tensor({shown}, {held.dtype})"
    if type(value) is float:  # a step of each parameter: all that is asked below takes longer
        return _number(value)
    if isinstance(value, (bool, enum.Enum)):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return _number(float(value))
    if isinstance(value, Mapping):
        pairs = sorted((text_of(key), text_of(each)) for key, each in value.items())
        return f"{type(value).__name__}({', '.join(': '.join(pair) for pair in pairs)})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return f"{type(value).__qualname__} {text_of(fields)}"
    if value is None or isinstance(value, (complex, str, bytes, torch.dtype)):
        return repr(value)
    # Its address, or the number of a device, differs from rank to rank.
    return f"an object of {type(value).__qualname__}"


def _number(value: float) -> str:
    return repr(int(value)) if value.is_integer() else repr(value)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; nan is nan, and objects are what their kind is."""
    return one is other or text_of(one) == text_of(other)


def facts_of(elements: Mapping[str, torch.dtype], values: Mapping[str, Any]) -> dict[str, str]:
    """Return what there is of one parameter, in the order of the names.

    Args:
        elements: the states with one element for each of the parameter, and their dtypes.
        values: the other states.
    """
    found = {state: f"elements of {dtype}" for state, dtype in elements.items()}
    found |= {state: text_of(value) for state, value in values.items()}
    return dict(sorted(found.items()))


def ranks_differ(name: str, told: Mapping[int, Facts]) -> str | None:
    """Say at which state of a parameter two ranks differ; None if at none.

    Args:
        name: of the parameter.
        told: by rank, of all ranks that hold elements; the steps of the others did nothing.
    """
    (first, wanted), *others = told.items()
    for rank, facts in others:
        for state in (*wanted, *(state for state in facts if state not in wanted)):
            here, there = wanted.get(state, "absent"), facts.get(state, "absent")
            if here != there:
                return (
                    f"Rank {rank} has different values for {state} of '{name}': it is {there}, and "
                    f"{here} on rank {first}. Give all ranks the same options and steps."
                )
    return None

"""What a model case is, and how to handle its batches. Knows no model, no wrapper, no process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any
"""A tree of tensors: dicts, lists, tuples, named tuples, dataclasses, None and plain values."""

TRAITS: Mapping[str, str] = {
    "tied": "one parameter is registered under two names",
    "uneven": "dim-0 sizes are not divisible by 2, 3 or 4",
    "tiny": "some parameters have fewer elements than the world has ranks",
    "unused": "some parameters take no part in forward",
    "frozen": "some parameters do not require gradients",
    "buffers": "the model has buffers",
    "batchnorm": "forward in training mode depends on the batch as a whole",
    "nested_io": "units receive and return containers",
    "reused": "one unit is called twice in one forward",
    "strided": "some parameters are not contiguous",
    "tokens": "inputs are integers",
    "images": "inputs are channels_last images",
    "recomputed": "some units run again in backward",
    "mixed": "some units hold frozen and trainable parameters",
    "scalar": "some parameters have no dimensions",
    "varying": "some parameters take part in some forwards and not in others",
    "routed": "some parameters take part on some ranks and not on others",
    "wide": "parameters take many times the bytes of everything else",
}
"""The names that `ModelCase.traits` may hold, with their meaning."""


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One model with its data and its loss: everything a training run needs except a wrapper.

    Attributes:
        name: the name under which the registry lists the case.
        why: one sentence: which class of defects the case exposes.
        traits: keys of `TRAITS` that hold for the case.
        build: returns the module on the CPU, in training mode, with the same weights at every call
            and on every rank; the global random state is left as it was.
        batch: (rank, step, micro) to one CPU micro-batch; distinct arguments give distinct data,
            all micro-batches have the same size.
        loss: (module, batch) to the mean loss, shape (); calls `module(...)` exactly once.
        units: module classes that become parameter groups of their own; the root always is one.
        dtype: of floating parameters, buffers and inputs.
        concatenate: whether one batch made with `concatenate` gives the mean of its micro-batches'
            gradients.

    Raises:
        ValueError: if `traits` holds a name that is not in `TRAITS`.
    """

    name: str
    why: str
    traits: frozenset[str]
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    units: tuple[type[nn.Module], ...]
    dtype: torch.dtype = torch.float32
    concatenate: bool = True

    @property
    def leaves_out(self) -> bool:
        """Whether some trainable parameter takes no part in some forward."""
        return bool(self.traits & {"unused", "varying"})

    @property
    def routes(self) -> bool:
        """Whether some of them takes part on some ranks only."""
        return "routed" in self.traits

    def __post_init__(self) -> None:
        """Refuse traits that nobody has defined."""
        unknown = sorted(self.traits - set(TRAITS))
        if unknown:
            raise ValueError(
                f"model case {self.name!r}: unknown traits {unknown}; known: {sorted(TRAITS)}"
            )


def map_tensors(function: Callable[..., Any], *trees: Batch) -> Batch:
    """Apply `function` to corresponding tensors of trees that have the same structure.

    Containers are rebuilt with their own type; plain values must agree and are kept.

    Args:
        function: receives one tensor per tree.
        trees: at least one tree.

    Returns:
        A tree with the results of `function` where the first tree has tensors.

    Raises:
        ValueError: if the trees differ in structure or in a plain value.
    """
    first = trees[0]
    if any(type(tree) is not type(first) for tree in trees):
        kinds = [type(tree).__name__ for tree in trees]
        raise ValueError(f"batches differ in structure: got {kinds} at the same place")
    if isinstance(first, Tensor):
        return function(*trees)
    if isinstance(first, dict):
        _require_equal([list(tree) for tree in trees], "keys")
        return type(first)((k, map_tensors(function, *(t[k] for t in trees))) for k in first)
    if isinstance(first, (list, tuple)):
        _require_equal([len(tree) for tree in trees], "lengths")
        items = [map_tensors(function, *parts) for parts in zip(*trees, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        columns = {n: [getattr(tree, n) for tree in trees] for n in names}
        return type(first)(**{n: map_tensors(function, *parts) for n, parts in columns.items()})
    _require_equal(list(trees), "values")
    return first


def _require_equal(values: Sequence[Any], what: str) -> None:
    if any(value != values[0] for value in values):
        raise ValueError(f"batches differ in structure: got {what} {list(values)}")


def move(batch: Batch, device: torch.device | str) -> Batch:
    """Copy a batch to `device`; structure, dtypes and strides stay.

    Args:
        batch: a tree of tensors.
        device: where the tensors go.

    Returns:
        The same tree with its tensors on `device`.
    """
    return map_tensors(lambda tensor: tensor.to(device), batch)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Join micro-batches into one batch, tensor by tensor on dim 0.

    Args:
        batches: at least one batch; all of the same structure.

    Returns:
        One batch whose tensors have the sum of the dim-0 sizes.

    Raises:
        ValueError: if there is no batch, or if the batches differ in structure.
    """
    if not batches:
        raise ValueError("concatenate: got no batch, wanted at least one")
    return map_tensors(lambda *tensors: torch.cat(tensors), *batches)

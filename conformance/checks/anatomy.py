"""What a model case is made of, by name: shapes, tied names, frozen parameters.

Builds the bare model once and keeps names and integers only. Knows no history and no wrapper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conformance.models import ModelCase


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parameters of a model.

    Attributes:
        shapes: FQN to shape; a tied parameter under each of its names.
        tied: groups of names of one parameter, the first registered name first.
        frozen: names of parameters that do not require gradients.
        buffer_bytes: of all buffers together.
        saved: keys of its state: without buffers that are not persistent.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: tuple[tuple[str, ...], ...]
    frozen: frozenset[str]
    buffer_bytes: int
    saved: frozenset[str]

    @property
    def distinct(self) -> list[str]:
        """One name of every parameter."""
        again = {name for group in self.tied for name in group[1:]}
        return [name for name in self.shapes if name not in again]

    @property
    def firsts(self) -> dict[str, str]:
        """Every name of a tied parameter to its first."""
        return {name: group[0] for group in self.tied for name in group}

    def numel(self, name: str) -> int:
        """Elements of one parameter."""
        return math.prod(self.shapes[name])

    def padded(self, name: str, world: int) -> int:
        """Elements of one parameter when dim 0 is filled up to a multiple of `world`."""
        shape = self.shapes[name] or (1,)
        return math.prod((-(-shape[0] // world) * world, *shape[1:]))


@lru_cache(maxsize=64)
def anatomy(model: ModelCase) -> Anatomy:
    """The anatomy of a model case."""
    names: dict[int, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    frozen: set[str] = set()
    built = model.build()
    for name, parameter in built.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[name] = tuple(parameter.shape)
        if not parameter.requires_grad:
            frozen.add(name)
    return Anatomy(
        shapes=shapes,
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        frozen=frozenset(frozen),
        buffer_bytes=sum(buffer.nbytes for buffer in built.buffers()),
        saved=frozenset(built.state_dict()),
    )

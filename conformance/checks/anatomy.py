"""What a model case is made of, by name: shapes, tied names, frozen parameters.

Builds the bare model once and keeps names and integers only. Knows no history and no wrapper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conformance.models import ModelCase
from conformance.scenarios.states import first_names


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parameters of a model.

    Attributes:
        shapes: FQN to shape; a tied parameter under each of its names.
        firsts: every name to the first one of the same parameter.
        frozen: names of parameters that do not require gradients.
        buffer_bytes: of all buffers together.
        saved: keys of its state: without buffers that are not persistent.
    """

    shapes: Mapping[str, tuple[int, ...]]
    firsts: Mapping[str, str]
    frozen: frozenset[str]
    buffer_bytes: int
    saved: frozenset[str]

    @property
    def distinct(self) -> list[str]:
        """One name of every parameter."""
        return [name for name, first in self.firsts.items() if name == first]

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names of one parameter, the first registered name first."""
        groups: dict[str, list[str]] = {}
        for name, first in self.firsts.items():
            groups.setdefault(first, []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

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
    shapes: dict[str, tuple[int, ...]] = {}
    frozen: set[str] = set()
    built = model.build()
    for name, parameter in built.named_parameters(remove_duplicate=False):
        shapes[name] = tuple(parameter.shape)
        if not parameter.requires_grad:
            frozen.add(name)
    return Anatomy(
        shapes=shapes,
        firsts=first_names(built),
        frozen=frozenset(frozen),
        buffer_bytes=sum(buffer.nbytes for buffer in built.buffers()),
        saved=frozenset(built.state_dict()),
    )

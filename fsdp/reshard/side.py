"""One side of a transfer, as it can be told to other ranks: no tensors but counts and options.

Says what a model and its optimizers consist of here; whether ranks agree is another's question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.engine.layout import Cut
from fsdp.plain_names import joined, named_plainly
from fsdp.reshard.dealt import Dealt, Ranks
from fsdp.reshard.nested import Boxes
from fsdp.reshard.optimizer import OptimizerView, Saved
from fsdp.reshard.pieces import Piece, pieces_of


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a rank tells of one tensor: the same on all ranks that have it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: Cut | Boxes
    rows: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] | None

    @classmethod
    def of(cls, piece: Piece) -> Told:
        """Return what is to be told of ``piece``."""
        dealt = piece.dealt
        return cls(
            names=piece.names,
            shape=dealt.shape,
            dtype=piece.dtype,
            cut=dealt.cut,
            rows=tuple(tuple(row) for row in dealt.ranks.table.tolist()),
            order=dealt.order,
        )

    def __str__(self) -> str:
        how = f"{len(self.rows[0])} shards" if len(self.rows[0]) > 1 else "whole"
        return (
            f"'{self.names[0]}' of shape {self.shape}, {self.dtype}, {how} on ranks "
            f"{[rank for row in self.rows for rank in row]}"
        )


@dataclass(frozen=True, kw_only=True)
class Side:
    """What a rank tells of its model and optimizers.

    Attributes:
        tensors: the parameters and buffers.
        states: of the optimizers, by name of the tensor; a rank without elements may have none.
        idle: names of the tensors of which this rank has no elements, though there are some: it
            never steps on them, and its states may be what its optimizer began with.
        groups: options and names of the parameter groups; None: no optimizers were given.
        objects: what modules keep as extra state.
    """

    tensors: tuple[Told, ...]
    states: Mapping[str, Saved] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()

    def dealt(self) -> dict[str, Dealt]:
        """Return how each tensor is dealt out, by its first name."""
        tables: dict[tuple[tuple[int, ...], ...], Ranks] = {}
        for told in self.tensors:
            if told.rows not in tables:
                tables[told.rows] = Ranks(told.rows)
        return {
            told.names[0]: Dealt(
                shape=told.shape, cut=told.cut, ranks=tables[told.rows], order=told.order
            )
            for told in self.tensors
        }


class Local:
    """A model and its optimizers on this rank.

    Args:
        model: in any form.
        optimizers: of its parameters; None: they are not looked at.
        ranks: those that have the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer] | None,
        ranks: Sequence[int],
    ) -> None:
        self.model = model
        self.pieces = pieces_of(model, ranks)
        self.view = OptimizerView(optimizers, self.pieces)
        self._with_optimizers = optimizers is not None

    @cached_property
    def by_name(self) -> dict[str, Piece]:
        """The pieces by their first names."""
        return {piece.name: piece for piece in self.pieces}

    @cached_property
    def told(self) -> Side:
        """What is to be told of it, as it was when it was first asked for.

        Raises:
            NotImplementedError: a state of an optimizer that nobody knows how to cut.
        """
        states = {}
        for piece in self.pieces:
            elements, values = self.view.per_element(piece), self.view.values(piece)
            if elements or values:
                dtypes = {key: elements[key].dtype for key in sorted(elements)}
                states[piece.name] = Saved(elements=dtypes, values=values)
        return Side(
            tensors=tuple(map(Told.of, self.pieces)),
            states=states,
            groups=self.view.groups() if self._with_optimizers else None,
            objects=extra_states(self.model),
            idle=frozenset(
                piece.name
                for piece in self.pieces
                if not piece.view(piece.holder).numel() and 0 not in piece.dealt.shape
            ),
        )


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return what modules keep beside tensors, by the key of a state dict."""
    return {
        joined(path, "_extra_state"): module.get_extra_state()
        for path, module in named_plainly(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def put_extra_states(model: nn.Module, objects: Mapping[str, Any]) -> None:
    """Give modules what ``extra_states`` has found."""
    for path, module in named_plainly(model):
        key = joined(path, "_extra_state")
        if key in objects:
            module.set_extra_state(objects[key])

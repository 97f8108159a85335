"""What a checkpoint consists of: from a model and its optimizers, and back into them.

Knows pieces and names, not files. Loading is in two steps: everything is read into memory of its
own and compared with the model; only then is anything changed.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from fsdp.checkpoint.boxed import Boxed
from fsdp.reshard.boxes import boxes_of
from fsdp.reshard.optimizer import Saved, Values
from fsdp.reshard.pieces import Piece
from fsdp.reshard.side import Local, Side
from fsdp.reshard.telling import own_rank

MODEL, STATE, GROUPS = "model.", "optim.state.", "optim.param_groups."


def boxed(piece: Piece, tensor: torch.Tensor, dtype: torch.dtype, *, copy: bool) -> Boxed:
    """Return what this rank holds of ``tensor``, which is laid out like the holder of ``piece``."""
    held = piece.view(tensor).reshape(-1).to(dtype).contiguous()
    if copy:
        held = held.to("cpu", copy=True)
    return empty_box(piece, held)


def empty_box(piece: Piece, held: torch.Tensor) -> Boxed:
    """Return ``held`` (n,) as the boxes of ``piece``."""
    dealt = piece.dealt
    return Boxed(dealt.shape, boxes_of(dealt, dealt.ranks.shard_of(own_rank())), held)


def state_of(local: Local, side: Side, *, leads: bool, copy: bool = False) -> dict[str, Any]:
    """Return what this rank writes, nested as ``torch.distributed.checkpoint`` users nest it.

    Args:
        local: the model and its optimizers.
        side: what the ranks have agreed on.
        leads: whether this rank writes what is not dealt out: values, options, extra state.
        copy: whether all of it is copied, tensors to the CPU, so that training may go on.
    """
    if copy and leads:  # others write none of it
        rest = pickle.dumps((side.groups, side.states, side.objects))
        groups, states, objects = pickle.loads(rest)
        side = replace(side, groups=groups, states=states, objects=objects)
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    chosen = written_by(side, own_rank())
    for piece in local.pieces:
        saved = side.states.get(piece.name)
        entries = dict(saved.values) if leads and saved is not None else {}
        if piece.name in chosen:
            whole = boxed(piece, piece.holder, piece.dtype, copy=copy)
            model.update(dict.fromkeys(piece.names, whole))
            if saved is not None:
                kept = local.view.per_element(piece).items()
                entries |= {k: boxed(piece, v, v.dtype, copy=copy) for k, v in kept}
        if entries:
            state[piece.name] = entries
    found: dict[str, Any] = {"model": model, "optim": {"state": state}}
    if leads:
        model.update(side.objects)
        if side.groups is not None:
            found["optim"]["param_groups"] = [dict(group) for group in side.groups]
    return found


def written_by(side: Side, rank: int) -> set[str]:
    """Return the names of the tensors of which ``rank`` writes what it holds.

    One replica writes a tensor: the one whose ranks have the fewest bytes to write so far.
    """
    dealt = side.dealt()
    found: set[str] = set()
    bytes_of = np.zeros(1 + max((int(d.ranks.table.max()) for d in dealt.values()), default=0))
    for told in side.tensors:
        table = dealt[told.names[0]].ranks.table
        row = table[np.argmin(bytes_of[table].max(axis=1))]
        saved = side.states.get(told.names[0])
        entries = saved.elements.values() if saved is not None else ()
        each = told.dtype.itemsize * len(told.names) + sum(dtype.itemsize for dtype in entries)
        bytes_of[row] += math.prod(told.shape) * each / len(row)
        if rank in row:
            found.add(told.names[0])
    return found


def within(side: Side, ranks: Sequence[int]) -> Side:
    """Return ``side`` with those replicas of its tensors of which all ranks are among ``ranks``.

    Raises:
        ValueError: none of a tensor is, so nobody could save all of it; names the first.
    """
    members = frozenset(ranks)
    inside = {
        rows: tuple(row for row in rows if members.issuperset(row))
        for rows in {told.rows for told in side.tensors}
    }
    for told in side.tensors:
        if not inside[told.rows]:
            raise ValueError(
                f"{told} cannot be saved by ranks {[*ranks]}, which do not hold all of it; pass a "
                "process_group with all ranks of a replica, or none"
            )
    tensors = (replace(told, rows=inside[told.rows]) for told in side.tensors)
    return replace(side, tensors=tuple(tensors))


def keys_of(side: Side) -> list[str]:
    """Return under which keys a checkpoint has the elements of tensors and of optimizer states."""
    found: list[str] = []
    for told in side.tensors:
        if 0 not in told.shape:
            saved = side.states.get(told.names[0])
            found += (f"{MODEL}{name}" for name in told.names)
            found += (f"{STATE}{told.names[0]}.{key}" for key in (saved.elements if saved else ()))
    return found


Entry = tuple[tuple[int, ...], torch.dtype]
# Shape and dtype of each tensor; None for what is no tensor.
Entries = dict[str, Entry | None]


class Catalog(Protocol):
    """What is in the files of a checkpoint.

    Attributes:
        entries: keys start with ``model.``, ``optim.state.`` or ``optim.param_groups.``.
    """

    entries: Entries

    def read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fill the boxes and tensors of ``wanted``; return what is no tensor."""


@dataclass(kw_only=True)
class Staged:
    """A checkpoint in memory of its own.

    Attributes:
        tensors: this rank's elements (n,) of each tensor, by its first name.
        elements: those of the per-element entries of its optimizer state.
        values: the other entries.
        groups: options and names of each parameter group.
        objects: extra state of modules.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    elements: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)

    def saved(self) -> dict[str, Saved]:
        """Return what there is of optimizer state."""
        return {
            name: Saved(
                elements={k: v.dtype for k, v in self.elements.get(name, {}).items()},
                values=self.values.get(name, {}),
            )
            for name in dict.fromkeys((*self.elements, *self.values))
        }

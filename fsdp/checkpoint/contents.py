"""What a checkpoint consists of: from a model and its optimizers, and back into them.

Knows pieces and names, not files. Loading is in two steps: everything is read into memory of its
own and compared with the model; only then is anything changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

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


def state_of(local: Local, side: Side, *, copy: bool = False) -> dict[str, Any]:
    """Return what this rank saves, nested as ``torch.distributed.checkpoint`` users nest it.

    Args:
        local: the model and its optimizers.
        side: what the ranks have agreed on; all of them save this where it is no tensor.
        copy: whether tensors are copied to the CPU, so that training may go on; ``side`` shares
            nothing with it.
    """
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for piece in local.pieces:
        whole = boxed(piece, piece.holder, piece.dtype, copy=copy)
        model.update(dict.fromkeys(piece.names, whole))
        saved = side.states.get(piece.name)
        if saved is not None:
            entries = local.view.per_element(piece)
            state[piece.name] = {
                **saved.values,
                **{k: boxed(piece, v, v.dtype, copy=copy) for k, v in entries.items()},
            }
    found: dict[str, Any] = {"model": {**model, **side.objects}}
    if side.groups is not None:
        groups = [dict(group) for group in side.groups]
        found["optim"] = {"state": state, "param_groups": groups}
    return found


# Shape and dtype of each tensor; None for what is no tensor.
Entries = dict[str, tuple[tuple[int, ...], torch.dtype] | None]


class Catalog(Protocol):
    """What is in the files of a checkpoint.

    Attributes:
        entries: keys start with ``model.``, ``optim.state.`` or ``optim.param_groups.``.
    """

    entries: Entries

    def read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fill the boxes and tensors of ``wanted``; return what is no tensor. *Collective*."""


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

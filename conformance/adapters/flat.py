"""Original parameters inside flat ones: this rank's elements, gathered and joined by position.

The side doors of wrappers that keep flat parameters: of every original parameter, of its gradient
and of its optimizer state. No state dict, no ``summon_full_params``, no all-gather of the wrapper.
Where the elements lie is for the adapter of each wrapper to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.adapter import to_cpu
from conformance.adapters.side_doors import Piece, gathered, joined, shaped


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One original parameter and this rank's elements of it.

    Attributes:
        fqns: its names; more than one if it is tied.
        shape: its shape.
        stride: its stride if its storage is not in index order, else ``None``.
        first: position in it of the first element that this rank holds.
        count: how many this rank holds.
        offset: where they start in this rank's part of the flat parameter.
        flat: the flat parameter.
        original: the parameter that the optimizer sees with ``use_orig_params``, else ``None``.
        group: ranks among which the flat parameter is cut; ``None`` if it is not.
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    first: int
    count: int
    offset: int
    flat: Any
    original: nn.Parameter | None
    group: dist.ProcessGroup | None

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def optimized(self) -> nn.Parameter:
        """What the optimizer's state is keyed by."""
        return self.flat if self.original is None else self.original

    def own_part(self, tensor: Tensor) -> Piece:
        """This rank's elements of the parameter, or of its gradient or state, out of `tensor`.

        `tensor` is this rank's part of the flat parameter or laid out as that; with
        ``use_orig_params`` it may hold the elements of this parameter alone, flat or in its shape.
        """
        elements = self._flattened(to_cpu(tensor))
        if self.original is None or elements.numel() != self.count:
            elements = elements.narrow(0, self.offset, self.count)
        return Piece(self.first, elements.clone())

    def _flattened(self, tensor: Tensor) -> Tensor:
        """`tensor` as (numel,), in the order in which the wrapper flattens the parameter."""
        if tensor.dim() > 1 and self.stride is not None:
            ordered = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype)
            return ordered.copy_(tensor).as_strided((self.numel,), (1,))
        return tensor.reshape(-1)


def local_shard(flat: Any) -> Tensor:
    """This rank's part of a flat parameter, whatever is registered on the module at the moment."""
    part: Tensor = getattr(flat, "_local_shard", flat)
    return part.detach()


def full_parameters(known: list[Entry]) -> dict[str, Tensor]:
    """FQN to full parameter. Collective: one object all-gather among the ranks of the shards."""
    whole = _assembled(known, lambda entry: local_shard(entry.flat))
    return {fqn: value for fqn, value in whole.items() if value is not None}


def full_gradients(known: list[Entry]) -> dict[str, Tensor | None]:
    """FQN to full gradient, ``None`` where no rank has one. Collective as `full_parameters`."""
    return _assembled(known, lambda entry: entry.optimized.grad)


def full_optimizer_state(known: list[Entry], optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """FQN to the state that `optimizer` keeps. Collective: one object all-gather, as above."""
    own: list[dict[str, Any]] = []
    for entry in known:
        state = optimizer.state.get(entry.optimized, {})
        own.append({k: _held(entry, v) for k, v in state.items()})
    ranks = gathered(own, _group(known))
    found: dict[str, dict[str, Any]] = {}
    for index, entry in enumerate(known):
        mine = dist.get_rank(entry.group) if entry.group is not None else 0
        # a rank without elements may keep no state, or an empty one: those with elements come first
        order = sorted(range(len(ranks)), key=lambda r: (not _holds(ranks[r][index]), r != mine))
        first = ranks[order[0]][index]
        for key, value in first.items():
            pieces = [state[index][key] for state in ranks if key in state[index]]
            whole = (
                shaped(
                    joined(pieces, entry.numel, f"{key} of {entry.fqns[0]}"),
                    entry.shape,
                    entry.stride,
                )
                if isinstance(value, Piece)
                else value
            )
            for fqn in entry.fqns:
                found.setdefault(fqn, {})[key] = whole
    return found


def _holds(state: Mapping[str, Any]) -> bool:
    return any(not isinstance(v, Piece) or v.values.numel() > 0 for v in state.values())


def _held(entry: Entry, value: Any) -> Any:
    """One value of an optimizer state: a piece if it is element-wise, else a copy of it."""
    if not isinstance(value, Tensor):
        return value
    return to_cpu(value) if value.dim() == 0 else entry.own_part(value)


def _assembled(
    known: list[Entry], tensor_of: Callable[[Entry], Tensor | None]
) -> dict[str, Tensor | None]:
    own = []
    for entry in known:
        tensor = tensor_of(entry)
        own.append(None if tensor is None else entry.own_part(tensor))
    ranks = gathered(own, _group(known))
    found: dict[str, Tensor | None] = {}
    for index, entry in enumerate(known):
        pieces = [rank[index] for rank in ranks]
        held = [piece for piece in pieces if piece is not None and piece.values.numel()]
        whole = (
            shaped(joined(held, entry.numel, entry.fqns[0]), entry.shape, entry.stride)
            if held
            else None
        )
        found |= dict.fromkeys(entry.fqns, whole)
    return found


def _group(known: list[Entry]) -> dist.ProcessGroup | None:
    """The group of all flat parameters; one wrapper tree cuts all of them among the same ranks."""
    return next((entry.group for entry in known if entry.group is not None), None)

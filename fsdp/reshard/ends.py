"""The end of a transfer that gives: a model and its optimizers on this rank, read in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp.reshard.side import Local, Side


class Giving:
    """What leaves this rank.

    Args:
        names: the tensors of the plan.
        side: what the ranks of the source have agreed on.
        local: the source on this rank; None if it has no part of it.
    """

    def __init__(self, names: Sequence[str], side: Side, local: Local | None) -> None:
        self.names, self.side = names, side
        self._source = local
        self._dtypes = {told.names[0]: told.dtype for told in side.tensors}

    def keys(self, number: int) -> Sequence[str]:
        """Return the per-element entries of the optimizer state of a tensor."""
        saved = self.side.states.get(self.names[number])
        return tuple(saved.elements) if saved is not None else ()

    def riders(self, number: int) -> Sequence[torch.dtype]:
        """Return the dtypes of a tensor and of these entries."""
        name = self.names[number]
        entries = [self.side.states[name].elements[key] for key in self.keys(number)]
        return [self._dtypes[name], *entries]

    def read(self, number: int) -> Sequence[torch.Tensor]:
        """Return what this rank of the source has of them."""
        assert self._source is not None
        piece = self._source.by_name[self.names[number]]
        entries = self._source.view.per_element(piece)
        dtypes = self.riders(number)
        own = piece.view(piece.holder).reshape(-1).to(dtypes[0])
        found = [own]
        for key, dtype in zip(self.keys(number), dtypes[1:], strict=True):
            entry = entries.get(key)
            # A rank without elements may have no state.
            found.append(
                own.new_zeros(own.numel(), dtype=dtype)
                if entry is None
                else piece.view(entry).reshape(-1)
            )
        return [tensor.contiguous() for tensor in found]

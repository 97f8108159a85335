"""A checkpoint that was read, put into a model and its optimizers.

Everything is compared first; from the first change on nothing can fail that could be foreseen.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp.checkpoint.contents import Staged
from fsdp.reshard.side import Local, put_extra_states


class Commit:
    """A staged checkpoint that fits; nothing is changed before ``run``.

    Args:
        local: the model and its optimizers.
        staged: what was read for them.

    Raises:
        ValueError: the optimizers train other parameters, or have other groups, or are of another
            kind, than those saved.
    """

    def __init__(self, local: Local, staged: Staged) -> None:
        self._local, self._staged = local, staged
        view = local.view
        self._states = view.wanted(staged.saved())
        self._groups = view.matched_groups(staged.groups) if view.optimizers else []
        view.check_kind(self._groups, self._states)

    @torch.no_grad()
    def run(self) -> None:
        """Change the model and its optimizers."""
        local, staged = self._local, self._staged
        for piece in local.pieces:
            _fill(piece.view(piece.holder), staged.tensors[piece.name])
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for piece in local.pieces:
            saved = self._states.get(piece.holder)
            if saved is None:
                continue
            if piece.holder not in states:
                blank = {k: local.view.blank(piece, d) for k, d in saved.elements.items()}
                states[piece.holder] = {**saved.values, **blank}
            for key, held in staged.elements.get(piece.name, {}).items():
                _fill(piece.view(states[piece.holder][key]), held)
        for holder in local.view.holders():
            local.view.put(holder, states.get(holder, {}))
        local.view.put_groups(self._groups)
        put_extra_states(local.model, staged.objects)


def _fill(view: torch.Tensor, held: torch.Tensor) -> None:
    view.copy_(held.view(view.shape))

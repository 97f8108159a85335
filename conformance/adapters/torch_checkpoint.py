"""States of models and optimizers through ``torch.distributed.checkpoint``.

Shared by the adapters of both sharded wrappers, whose checkpoints this package is made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_into
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.optim import Optimizer

from conformance.adapter import Adapter, StateKind, Wrapped


class CheckpointDirectory(Adapter):
    """Mixin: `save` and `load` as the package's own recipe has them."""

    def save(self, w: Wrapped, directory: Path) -> None:
        """Sharded state of both, written by all ranks."""
        model, optimizer = get_state_dict(w.module, w.optimizer)
        write({"model": model, "optimizer": optimizer}, checkpoint_id=directory)

    def load(self, w: Wrapped, directory: Path) -> None:
        """Read into the fresh pair's own state, then set that."""
        model, optimizer = get_state_dict(w.module, w.optimizer)
        content: dict[str, Any] = {"model": model, "optimizer": optimizer}
        read_into(content, checkpoint_id=directory)
        set_state_dict(
            w.module,
            w.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )


def model_state(module: nn.Module, kind: StateKind, *, cpu: bool) -> dict[str, Any]:
    """Model state; full state on CPU is given to rank 0 alone, by the package's design."""
    return dict(get_model_state_dict(module, options=_saving(kind, cpu=cpu)))


def optim_state(
    module: nn.Module, optimizer: Optimizer, kind: StateKind, *, cpu: bool
) -> dict[str, Any]:
    """Optimizer state, keyed by FQN."""
    return dict(get_optimizer_state_dict(module, optimizer, options=_saving(kind, cpu=cpu)))


def load_model_state(module: nn.Module, kind: StateKind, state: Mapping[str, Any]) -> None:
    """Load; a state that rank 0 alone holds is broadcast by the package."""
    set_model_state_dict(module, dict(state), options=_loading(kind, state))


def load_optim_state(
    module: nn.Module, optimizer: Optimizer, kind: StateKind, state: Mapping[str, Any]
) -> None:
    """Load; a state that rank 0 alone holds is broadcast by the package."""
    set_optimizer_state_dict(module, optimizer, dict(state), options=_loading(kind, state))


def _saving(kind: StateKind, *, cpu: bool) -> StateDictOptions:
    return StateDictOptions(full_state_dict=kind == "full", cpu_offload=cpu)


def _loading(kind: StateKind, state: Mapping[str, Any]) -> StateDictOptions:
    full = kind == "full"
    return StateDictOptions(
        full_state_dict=full, broadcast_from_rank0=full and only_rank0_holds(state)
    )


def only_rank0_holds(state: Mapping[str, Any]) -> bool:
    """Whether some rank's state is empty. Collective: one object all-gather, default group."""
    held: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(held, bool(state))
    return not all(held)


def from_rank0(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rank 0's state on every rank, if some rank has none; else each rank's own.

    Collective: one object all-gather, then perhaps one object broadcast, default group.
    """
    if not only_rank0_holds(state):
        return dict(state)
    box: list[Any] = [dict(state)]
    dist.broadcast_object_list(box, src=0)
    sent: dict[str, Any] = box[0]
    return sent

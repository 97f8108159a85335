"""The reference implementation's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as read_into

from conformance.adapter import StateKind, Wrapped
from conformance.adapters.composable import ComposableAdapter
from conformance.adapters.torch_checkpoint import only_rank0_holds
from fsdp import checkpoint, fully_shard


class FullyShardAdapter(ComposableAdapter):
    """The composable face of the reference, with its own functions for optimizer states."""

    shard = staticmethod(fully_shard)

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Parameters without an entry, because they never had a gradient, get no state."""
        self._no_local(kind)
        full = kind == "full"
        options = checkpoint.StateDictOptions(
            full_state_dict=full, broadcast_from_rank0=full and only_rank0_holds(state)
        )
        checkpoint.set_optimizer_state_dict(w.module, w.optimizer, dict(state), options=options)

    def load(self, w: Wrapped, directory: Path) -> None:
        """The package's recipe, with the planner that knows such parameters."""
        model, optimizer = checkpoint.get_state_dict(w.module, w.optimizer)
        content: dict[str, Any] = {"model": model, "optimizer": optimizer}
        read_into(content, checkpoint_id=directory, planner=checkpoint.LoadPlanner())
        checkpoint.set_state_dict(
            w.module,
            w.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )

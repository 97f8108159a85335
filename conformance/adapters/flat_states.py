"""States of a flat-parameter wrapper through its own verbs, kind by kind.

Shared by the adapters of PyTorch's wrapper and of the reference's, which have the same names for
them. Imports no wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from conformance.adapter import StateKind, Wrapped
from conformance.adapters.covering import CoveringAdapter
from conformance.adapters.torch_checkpoint import from_rank0, only_rank0_holds
from conformance.adapters.wrapping import HYBRID, strategy_warnings_ignored

STATES = frozenset(
    {
        "model_state.full",
        "model_state.sharded",
        "model_state.local",
        "optim_state.full",
        "optim_state.sharded",
        "optim_state.local",
        "save",
    }
)
_LOCAL = frozenset({"model_state.local", "optim_state.local"})
# refused by the wrapper without sharding; `save` writes a sharded state
_SHARDED = frozenset({"model_state.sharded", "optim_state.sharded", "save"})
# the wrapper's classes: type of state, options of the model's, options of the optimizer's
StateTypes = Mapping[StateKind, tuple[Any, Any, Any]]


def state_types_of(package: Any) -> StateTypes:
    """The types and options of each kind, by the names that they have in `package`."""
    return {
        "full": (
            package.StateDictType.FULL_STATE_DICT,
            package.FullStateDictConfig,
            package.FullOptimStateDictConfig,
        ),
        "sharded": (
            package.StateDictType.SHARDED_STATE_DICT,
            package.ShardedStateDictConfig,
            package.ShardedOptimStateDictConfig,
        ),
        "local": (
            package.StateDictType.LOCAL_STATE_DICT,
            package.LocalStateDictConfig,
            package.LocalOptimStateDictConfig,
        ),
    }


class FlatStatesAdapter(CoveringAdapter):
    """Saves and loads states of every kind.

    Class attributes:
        state_types: the wrapper's own types and options of each kind.
    """

    state_types: ClassVar[StateTypes]

    def configure(self, options: Mapping[str, Any]) -> None:
        """Claims by strategy and kind of parameters."""
        super().configure(options)
        strategy = options["sharding_strategy"]
        if strategy == "NO_SHARD":
            self.capabilities -= _SHARDED
        # local state exists for flat parameters that are sharded without a device mesh
        if options["use_orig_params"] or strategy in ("NO_SHARD", *HYBRID):
            self.capabilities -= _LOCAL

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Under the state type of that kind."""
        with self._state_type(w.module, kind, cpu=cpu, rank0_only=rank0_only):
            return dict(w.module.state_dict())

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """A full state that rank 0 alone holds is broadcast: the wrapper wants it on all ranks."""
        content = from_rank0(state) if kind == "full" else dict(state)
        with self._state_type(w.module, kind):
            w.module.load_state_dict(content)

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Under the state type of that kind."""
        with self._state_type(w.module, kind, cpu=cpu, rank0_only=rank0_only):
            return dict(self.wrapper.optim_state_dict(w.module, w.optimizer))

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """The wrapper broadcasts a full state that rank 0 alone holds."""
        alone = kind == "full" and only_rank0_holds(state)
        with self._state_type(w.module, kind, cpu=alone, rank0_only=alone):
            mine = self.wrapper.optim_state_dict_to_load(w.module, w.optimizer, dict(state))
        w.optimizer.load_state_dict(mine)

    @contextmanager
    def _state_type(
        self, module: nn.Module, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> Iterator[None]:
        """The state type of `kind` for the body; the wrapper's defaults unless one is set."""
        state_type, model_config, optim_config = self.state_types[kind]
        given: dict[str, bool] = {"offload_to_cpu": True} if cpu else {}
        if rank0_only:
            given["rank0_only"] = True
        with (
            strategy_warnings_ignored(),
            self.wrapper.state_dict_type(
                module, state_type, model_config(**given), optim_config(**given)
            ),
        ):
            yield

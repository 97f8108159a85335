"""One unit: the groups of one call, and what it shares with the other units of its tree.

A unit decides when its groups gather, reshard and reduce: around forward in ``forward.py``, around
backward in ``backward.py``, once at the start in ``lazy_init.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fsdp.api import MixedPrecisionPolicy
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.schedule import FSDPCommContext
from fsdp.engine.state import (
    TRAINING_STATE_CHANGES,
    FSDPStateContext,
    Prefetches,
    TrainingState,
    Wording,
    check_change,
)

_STATE = "_fsdp_state"


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the unit that ``module`` belongs to, if it is a unit."""
    state = module.__dict__.get(_STATE)
    return state if isinstance(state, FSDPState) else None


class FSDPState:
    """The state of one unit.

    Attributes:
        modules: those whose forward the unit surrounds.
        groups: what they gather.
        is_root: None until lazy initialisation.
        context: shared with the units of the tree.
        forward_prefetch: units to gather right after this one in forward.
        backward_prefetch: units to gather right after this one in backward.
        prefetches: whether and when backward gathers by itself the group that ran before.
        to_run_forward: of several ``modules``, those whose forward is still to come.
        wording: how messages speak of it.
        auto_reshard_after_forward: whether the root may keep its parameters after forward.
        model_groups: over which parameters were cut before; their ranks run the same units.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        info: DataParallelMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        *,
        auto_reshard: bool,
        wording: Wording | None = None,
    ) -> None:
        self.modules = modules
        self.mesh_info = info
        self.device = device
        self.mp_policy = mp_policy
        self.wording = wording or Wording()
        self.groups: list[FSDPParamGroup] = []
        self.is_root: bool | None = None
        self.context = FSDPStateContext()
        self.comm_ctx: FSDPCommContext | None = None
        self.training_state = TrainingState.IDLE
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self.prefetches = Prefetches.BEFORE_GRADIENTS
        self.to_run_forward: set[nn.Module] = set()
        self.auto_reshard_after_forward = auto_reshard
        self.model_groups: tuple[dist.ProcessGroup, ...] = ()
        for module in modules:
            module.__dict__[_STATE] = self

    @property
    def all_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups through which every rank that runs this unit is reached."""
        return (*self.mesh_info.groups, *self.model_groups)

    @property
    def name(self) -> str:
        """The unit in error messages."""
        if self.groups and self.groups[0].module_fqn:
            return self.groups[0].module_fqn
        return ", ".join(type(module).__name__ for module in self.modules)

    def enter(self, state: TrainingState) -> None:
        """Change the training state; the table must allow it."""
        change = (self.training_state, state)
        if state is not self.training_state and change not in TRAINING_STATE_CHANGES:
            check_change(self.name, *change)  # a name costs more than the look into the table
        self.training_state = state

    def comm(self) -> FSDPCommContext:
        """Return the communication context, made at first use or shared by the root."""
        if self.comm_ctx is None:
            self.comm_ctx = FSDPCommContext(self.device)
        return self.comm_ctx

    def share_comm(self, comm: FSDPCommContext) -> None:
        """Use ``comm`` from now on."""
        self.comm_ctx = comm
        for group in self.groups:
            group.comm_ctx = comm

    def root_of_iteration(self) -> FSDPState:
        """Return the unit that closes a backward pass through this one."""
        states = self.context.all_states
        return states[0] if states else self

    # Recovery

    def reset_iter_state(self) -> None:
        """Forget the iteration under way, with its gradients, in the whole tree.

        Raises:
            RuntimeError: this is not the root.
        """
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        self.abandon_tree()

    def abandon_tree(self) -> None:
        """Bring every unit of the tree back to idle and sharded; gradients in flight are lost."""
        context = self.context
        self.comm().abandon()
        for state in context.all_states or [self]:
            state.to_run_forward.clear()
            state.training_state = TrainingState.IDLE
            for group in state.groups:
                group.abandon()
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False

    def abandon_forward(self) -> None:
        """Leave a state in which the next forward can begin, after one that raised."""
        self.to_run_forward.clear()
        if self.context.iter_forward_root is self or self.context.iter_forward_root is None:
            self.abandon_tree()
            return
        for group in self.groups:
            group.abandon_forward()
        self.training_state = TrainingState.IDLE

    # Names that users of PyTorch's implementation read

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        return self.groups

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        if len(self.groups) > 1:
            names = [group.module_fqn for group in self.groups]
            raise AssertionError(
                f"Expected at most 1 param group, but got {len(self.groups)} (fqns: {names}). "
                "Use _fsdp_param_groups."
            )
        return self.groups[0] if self.groups else None

    @property
    def _is_root(self) -> bool | None:
        return self.is_root

    @property
    def _state_ctx(self) -> FSDPStateContext:
        return self.context

    @property
    def _comm_ctx(self) -> FSDPCommContext:
        return self.comm()

    @property
    def _training_state(self) -> TrainingState:
        return self.training_state

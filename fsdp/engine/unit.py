"""One unit: what happens around its forward and its backward, and when.

``FSDPState`` belongs to one ``fully_shard`` call or one wrapper. It decides when its groups
gather, reshard and reduce; how they do it is in ``param_group.py``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp.api import MixedPrecisionPolicy
from fsdp.engine.agreement import agree
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.schedule import FSDPCommContext
from fsdp.engine.state import FSDPStateContext, TrainingState, check_change
from fsdp.engine.torch_private import graph_task, queue_callback
from fsdp.engine.trace import logger, trace
from fsdp.engine.tree import cast_floats, grad_tensors, map_tensors, to_device

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_STATE = "_fsdp_state"


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the unit that ``module`` belongs to, if it is a unit."""
    state = module.__dict__.get(_STATE)
    return state if isinstance(state, FSDPState) else None


class FSDPState:
    """The state of one unit."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        info: DataParallelMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        *,
        auto_reshard: bool,
    ) -> None:
        self.modules = modules
        self.mesh_info = info
        self.device = device
        self.mp_policy = mp_policy
        self.groups: list[FSDPParamGroup] = []
        self.is_root: bool | None = None  # None until lazy initialisation
        self.context = FSDPStateContext()
        self.comm_ctx: FSDPCommContext | None = None
        self.training_state = TrainingState.IDLE
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self.to_run_forward: set[nn.Module] = set()
        self.auto_reshard_after_forward = auto_reshard
        for module in modules:
            module.__dict__[_STATE] = self

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

    @property
    def name(self) -> str:
        """The unit in error messages."""
        if self.groups and self.groups[0].module_fqn:
            return self.groups[0].module_fqn
        return ", ".join(type(module).__name__ for module in self.modules)

    def _enter(self, state: TrainingState) -> None:
        if state is not self.training_state:
            check_change(self.name, self.training_state, state)
            self.training_state = state

    # Lazy initialisation

    def lazy_init(self) -> None:
        """Make this unit the root of the units below it; the first forward does so.

        *Collective*: one exchange over the groups of the mesh, on which all ranks raise the
        same error if their models differ or one of them cannot start.

        Raises:
            RuntimeError: several modules as root, or a unit below that ran before.
            ValueError: a parameter in two groups, or ranks with different models.
        """
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        states = self._find_states()
        problem: Exception | None = None
        try:
            self._adopt(states)
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
            problem = error
        try:
            agree(_description(states), problem, self.mesh_info.groups, self.device)
        except BaseException:
            self._disown(states)
            raise
        for state in states:
            state.is_root = state is self

    def _find_states(self) -> list[FSDPState]:
        states: list[FSDPState] = []
        for name, module in self.modules[0].named_modules():
            state = state_of(module)
            if state is None or state in states:
                continue
            if state.is_root is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
            states.append(state)
        return states

    def _adopt(self, states: list[FSDPState]) -> None:
        if self.auto_reshard_after_forward:
            # Backward starts with the root: what it would gather again is there already.
            for group in self.groups:
                group.post_forward_mesh_info = None
        self.context.all_states = states
        comm = self.comm()
        for state in states:
            state.context = self.context
            state.share_comm(comm)
            for index, group in enumerate(state.groups):
                group.index_in_state = index
                group.groups_in_state = len(state.groups)
                comm.max_input_buffers = max(
                    comm.max_input_buffers, group.reduce_scatter_max_input_buffers
                )
        self._name(states)
        _check_not_shared(states)
        for state in states:
            for group in state.groups:
                group.lazy_init()

    def _disown(self, states: list[FSDPState]) -> None:
        """Undo ``_adopt``, so that the caller can repair the model and run again."""
        for state in states:
            state.context = FSDPStateContext()
            for group in state.groups:
                group.module_fqn = ""

    def _name(self, states: list[FSDPState]) -> None:
        by_slot = {
            (param.info.module, param.info.param_name): param
            for state in states
            for group in state.groups
            for param in group.fsdp_params
        }
        by_module: dict[nn.Module, list[FSDPParamGroup]] = {}
        for state in states:
            for group in state.groups:
                group.module_fqn = ""
                for module in group.modules:
                    by_module.setdefault(module, []).append(group)
        for prefix, module in self.modules[0].named_modules():
            for group in by_module.get(module, ()):
                group.module_fqn = ", ".join(filter(None, (group.module_fqn, prefix)))
            for name in module._parameters:
                param = by_slot.get((module, name))
                if param is not None:
                    param.fqn = f"{prefix}.{name}" if prefix else name

    # Forward

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Gather the unit's parameters and watch its inputs, before ``module`` runs."""
        if self.training_state is TrainingState.PRE_BACKWARD and graph_task() != -1:
            # Recomputation: backward has gathered already, unless an earlier run's end
            # of backward has resharded in between.
            for group in self.groups:
                group.unshard()
                group.wait_for_unshard()
            return self._cast_inputs(args, kwargs)
        first = self.training_state is not TrainingState.FORWARD
        if first:
            args, kwargs = self._begin_iteration(args, kwargs)
        if len(self.modules) > 1 and not self.to_run_forward:
            self.to_run_forward.update(self.modules)
        self._enter(TrainingState.FORWARD)
        args, kwargs = self._cast_inputs(args, kwargs)
        for group in self.groups:
            watch = group.training_state is not TrainingState.FORWARD
            group.enter(TrainingState.FORWARD)
            with trace("pre_forward", group.module_fqn):
                group.unshard(async_op=group.unshard_async_op)
                group.wait_for_unshard()
            if watch and torch.is_grad_enabled():
                args, kwargs = _watched(group, args, kwargs)
        if first:
            for state in self.forward_prefetch:
                for group in state.groups:
                    with trace("forward_prefetch", group.module_fqn):
                        group.unshard(async_op=group.unshard_async_op, phase=TrainingState.FORWARD)
        return args, kwargs

    def _begin_iteration(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self.lazy_init()
        self._heal()
        context = self.context
        if context.iter_forward_root is not None:
            return args, kwargs
        context.iter_forward_root = self
        logger.debug("FSDP::root_pre_forward")
        self.comm().wait_for_optimizer(context.post_optim_event)
        context.post_optim_event = None
        if self.device.type != "cpu" and (args or kwargs):
            return to_device(args, self.device), to_device(kwargs, self.device)
        return args, kwargs

    def _heal(self) -> None:
        """Forget an iteration that an exception has ended without a word.

        Backward tells nobody when it fails: its final callback does not run. No forward of a
        tree begins outside backward while that callback is still due.
        """
        context = self.context
        if graph_task() != -1:
            return
        stale = context.post_backward_final_callback_queued
        if context.iter_forward_root is not None:
            stale = stale or context.iter_forward_root is self or self.is_root is True
        if stale:
            self.comm().finish_reductions()
            self._abandon_tree()

    def _cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard as the policy says and hook the outputs, after ``module`` ran."""
        if output is None and sys.exc_info()[0] is not None:
            # Always-called hooks run with no output when forward raised. Recomputation stops
            # itself by an exception once it has what backward needs.
            if graph_task() == -1:
                self._forward_failed()
            return None
        if self.training_state is TrainingState.PRE_BACKWARD and graph_task() != -1:
            return self._cast_output(output)
        if len(self.modules) > 1:
            if module not in self.to_run_forward:
                return self._cast_output(output)
            self.to_run_forward.discard(module)
            if self.to_run_forward:
                return self._cast_output(output)
        output = self._complete_forward(output)
        if self.context.iter_forward_root is self:
            output = self._complete_partial_groups(output)
            self.comm().end_of_forward()
            self.context.iter_forward_root = None
        return self._cast_output(output)

    def _complete_forward(self, output: Any) -> Any:
        recomputing = graph_task() != -1
        for group in self.groups:
            with trace("post_forward", group.module_fqn):
                if not recomputing:
                    group.reshard()
                    order = self.comm().post_forward_order
                    group.post_forward_indices.append(len(order))
                    order.append(group)
            group.enter(TrainingState.IDLE)
        if torch.is_grad_enabled():
            self._hook_outputs(output)
        self._enter(TrainingState.IDLE)
        return output

    def _complete_partial_groups(self, output: Any) -> Any:
        """Complete the units of which some modules did not run in this forward."""
        for state in reversed(self.context.all_states):
            if state is self or not state.to_run_forward:
                continue
            state.to_run_forward.clear()
            output = state._cast_output(state._complete_forward(output))
        return output

    def _forward_failed(self) -> None:
        """Leave a state in which the next forward can begin."""
        self.to_run_forward.clear()
        if self.context.iter_forward_root is self or self.context.iter_forward_root is None:
            self._abandon_tree()
            return
        for group in self.groups:
            group.abandon_forward()
        self.training_state = TrainingState.IDLE

    def _hook_outputs(self, output: Any) -> None:
        for tensor in grad_tensors(output):
            if tensor._base is not None and tensor._is_view():
                self._warn_about_view()
            tensor.register_hook(self.pre_backward)

    def _warn_about_view(self) -> None:
        warnings.warn(
            f"FSDP2-wrapped module ({self.name}) returned a view tensor. An in-place op on it "
            "(x += y) drops the hook that gathers the parameters for backward, which then fails "
            "or gives wrong gradients. Use out = out + y, or return out.clone().",
            UserWarning,
            stacklevel=5,
        )

    def _cast_output(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else cast_floats(output, dtype)

    # Backward

    def pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gather the unit's parameters again; runs when the gradient of an output is there."""
        self._enter(TrainingState.PRE_BACKWARD)
        context = self.context
        if not context.post_backward_final_callback_queued:
            context.post_backward_final_callback_queued = True
            queue_callback(self._root_of_iteration().end_of_backward)
        for group in self.groups:
            if group.training_state is TrainingState.PRE_BACKWARD:
                continue
            group.enter(TrainingState.PRE_BACKWARD)
            with trace("pre_backward", group.module_fqn):
                group.unshard(async_op=group.unshard_async_op)
                group.wait_for_unshard()
            if not self.backward_prefetch:
                self._prefetch_previous(group)
        for state in self.backward_prefetch:
            for group in reversed(state.groups):
                self._prefetch(group)
        return gradient

    def _root_of_iteration(self) -> FSDPState:
        states = self.context.all_states
        return states[0] if states else self

    def _prefetch(self, group: FSDPParamGroup) -> None:
        with trace("backward_prefetch", group.module_fqn):
            group.unshard(async_op=group.unshard_async_op, phase=TrainingState.PRE_BACKWARD)

    def _prefetch_previous(self, group: FSDPParamGroup) -> None:
        """Start to gather what ran before ``group`` in forward."""
        if not group.post_forward_indices:
            return  # a second backward over the same forward
        index = group.post_forward_indices.pop()
        order = self.comm().post_forward_order
        if group.groups_in_state == 1:
            if index > 0:
                self._prefetch(order[index - 1])
            return
        # Backward fires a unit's groups from the last to the first. The last but one prefetches:
        # earlier would keep more whole parameters than needed, later would not overlap.
        if group.index_in_state != 1:
            return
        previous: tuple[nn.Module, ...] | None = None
        for target in reversed(order[:index]):
            if target.modules is group.modules:
                continue
            if previous is not None and target.modules is not previous:
                return
            previous = target.modules
            self._prefetch(target)

    def end_of_backward(self) -> None:
        """Close what backward left open; runs once, when backward is over."""
        logger.debug("FSDP::root_post_backward")
        context = self.context
        for state in context.all_states:
            if state.training_state is TrainingState.FORWARD and not state.to_run_forward:
                # Backward was called inside a forward that still goes on.
                continue
            if context.iter_forward_root is state:
                context.iter_forward_root = None
            state.to_run_forward.clear()
            for group in reversed(state.groups):
                if group.training_state is not TrainingState.POST_BACKWARD:
                    group.post_backward()
                group.enter(TrainingState.IDLE)
            state.training_state = TrainingState.IDLE
        if context.is_last_backward:
            self.comm().end_of_backward()
            for state in context.all_states:
                for group in state.groups:
                    group.finalize_backward()
        context.post_backward_final_callback_queued = False

    # Recovery

    def reset_iter_state(self) -> None:
        """Forget the iteration under way, with its gradients, in the whole tree.

        Raises:
            RuntimeError: this is not the root.
        """
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        self._abandon_tree()

    def _abandon_tree(self) -> None:
        context = self.context
        states = context.all_states or [self]
        self.comm().abandon()
        for state in states:
            state.to_run_forward.clear()
            state.training_state = TrainingState.IDLE
            for group in state.groups:
                group.abandon()
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False


def _watched(group: FSDPParamGroup, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Replace the inputs that require grad by stand-ins that announce the end of backward."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        # By far the most frequent call, and walking containers costs more than the hook.
        return (group.watch(args)[0],) if args[0].requires_grad else args, kwargs
    inputs = grad_tensors((args, kwargs))
    if not inputs:
        return args, kwargs
    stand_ins = iter(group.watch(inputs))

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return next(stand_ins) if tensor.requires_grad else tensor

    args, kwargs = map_tensors(replace, (args, kwargs))
    return args, kwargs


def _check_not_shared(states: list[FSDPState]) -> None:
    seen: set[int] = set()
    for state in states:
        for group in state.groups:
            for param in group.fsdp_params:
                if param.uid in seen:
                    raise ValueError(
                        f"Parameter '{param.fqn}' is shared with a parameter already managed by "
                        "another FSDP group. For shared/tied parameters, use "
                        "fully_shard([module_a, module_b]) to place them in the same FSDP group."
                    )
                seen.add(param.uid)


def _description(states: list[FSDPState]) -> Iterator[str]:
    """Yield one line per parameter: what ranks must agree on before their first collective."""
    for state in states:
        for group in state.groups:
            for param in group.fsdp_params:
                dtype = str(param.dtype).removeprefix("torch.")
                grad = "trainable" if param.sharded.requires_grad else "frozen"
                yield (
                    f"'{param.fqn}' {tuple(param.shape)} {dtype} {grad} "
                    f"in group '{group.module_fqn}'"
                )

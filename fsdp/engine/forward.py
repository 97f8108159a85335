"""What happens around a unit's forward: gather, watch the inputs, reshard, hook the outputs."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from typing import Any

import torch
from torch import nn

from fsdp.engine.backward import pre_backward
from fsdp.engine.grad_mode import without_gradients
from fsdp.engine.lazy_init import lazy_init
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.state import TrainingState
from fsdp.engine.torch_private import graph_task, hook_gradient, untraced
from fsdp.engine.trace import logger, trace
from fsdp.engine.tree import cast_floats, grad_tensors, map_tensors, to_device
from fsdp.engine.unit import FSDPState

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@untraced
def pre_forward(
    state: FSDPState, module: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Gather the unit's parameters and watch its inputs, before ``module`` runs."""
    if state.training_state is TrainingState.PRE_BACKWARD and graph_task() != -1:
        # Recomputation: backward has gathered already, unless an earlier run's end
        # of backward has resharded in between.
        with without_gradients():
            for group in state.groups:
                group.unshard()
                group.wait_for_unshard()
        return _cast_inputs(state, args, kwargs)
    first = state.training_state is not TrainingState.FORWARD
    if first:
        args, kwargs = _begin_iteration(state, args, kwargs)
    if len(state.modules) > 1 and not state.to_run_forward:
        state.to_run_forward.update(state.modules)
    state.enter(TrainingState.FORWARD)
    args, kwargs = _cast_inputs(state, args, kwargs)
    for group in state.groups:
        watch = group.training_state is not TrainingState.FORWARD
        group.enter(TrainingState.FORWARD)
        with trace("pre_forward", group.module_fqn), without_gradients():
            group.unshard(async_op=group.settings.unshard_async_op)
            group.wait_for_unshard()
        if watch and torch.is_grad_enabled():
            args, kwargs = _watched(state, group, args, kwargs)
    if first and state.forward_prefetch:
        with without_gradients():
            _prefetch(state)
    return args, kwargs


def _begin_iteration(state: FSDPState, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    if state.is_root is None:
        lazy_init(state)
    _heal(state)
    context = state.context
    if context.iter_forward_root is not None:
        return args, kwargs
    context.iter_forward_root = state
    if graph_task() == -1:  # else backward runs it again, and needs what forward has left whole
        context.thread = threading.get_ident()
        if context.outdated:
            context.give_up()
    logger.debug("FSDP::root_pre_forward")
    context.order_start = len(state.comm().post_forward_order)
    state.comm().wait_for_optimizer(context.post_optim_event)
    context.post_optim_event = None
    if state.device.type != "cpu" and (args or kwargs):
        return to_device(args, state.device), to_device(kwargs, state.device)
    return args, kwargs


def _heal(state: FSDPState) -> None:
    """Forget an iteration that an exception has ended without a word.

    Backward tells nobody when it fails: its final callback does not run. No forward of a
    tree begins outside backward while that callback is still due.
    """
    context = state.context
    if graph_task() != -1:
        return
    stale = context.post_backward_final_callback_queued
    if context.iter_forward_root is not None:
        stale = stale or context.iter_forward_root is state or state.is_root is True
    if stale:
        state.abandon_tree()


def _prefetch(state: FSDPState) -> None:
    for other in state.forward_prefetch:
        for group in other.groups:
            with trace("forward_prefetch", group.module_fqn):
                group.unshard(async_op=group.settings.unshard_async_op, phase=TrainingState.FORWARD)


def _cast_inputs(state: FSDPState, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    dtype = state.mp_policy.param_dtype
    if dtype is None or not state.mp_policy.cast_forward_inputs:
        return args, kwargs
    return cast_floats(args, dtype), cast_floats(kwargs, dtype) if kwargs else kwargs


def _watched(
    state: FSDPState, group: FSDPParamGroup, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Replace the inputs that require grad by stand-ins that announce the end of backward.

    A backward through their gradients begins as that through the outputs does: it needs the same
    parameters, and keeps them until it comes to the unit's forward.
    """
    again = functools.partial(pre_backward, state)
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        # By far the most frequent call, and walking containers costs more than the hook.
        return (group.watch(args, again)[0],) if args[0].requires_grad else args, kwargs
    inputs = grad_tensors((args, kwargs))
    if not inputs:
        return args, kwargs
    stand_ins = iter(group.watch(inputs, again))

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return next(stand_ins) if tensor.requires_grad else tensor

    args, kwargs = map_tensors(replace, (args, kwargs))
    return args, kwargs


@untraced
def post_forward(state: FSDPState, module: nn.Module, args: Any, output: Any) -> Any:
    """Reshard as the policy says and hook the outputs, after ``module`` ran."""
    if output is None and sys.exc_info()[0] is not None:
        # Always-called hooks run with no output when forward raised. Recomputation stops
        # itself by an exception once it has what backward needs.
        if graph_task() == -1:
            state.abandon_forward()
        return None
    if state.training_state is TrainingState.PRE_BACKWARD and graph_task() != -1:
        return _cast_output(state, output)
    if len(state.modules) > 1:
        if module not in state.to_run_forward:
            return _cast_output(state, output)
        state.to_run_forward.discard(module)
        if state.to_run_forward:
            return _cast_output(state, output)
    output = _complete(state, output)
    if state.context.iter_forward_root is state:
        output = _complete_partial_groups(state, output)
        if not torch.is_grad_enabled():
            _end_of_evaluation(state)
        state.comm().end_of_forward()
        state.context.iter_forward_root = None
    return _cast_output(state, output)


def _complete(state: FSDPState, output: Any) -> Any:
    recomputing = graph_task() != -1
    for group in state.groups:
        with trace("post_forward", group.module_fqn):
            if not recomputing:
                group.reshard()
                order = state.comm().post_forward_order
                group.post_forward_indices.append(len(order))
                order.append(group)
        group.enter(TrainingState.IDLE)
    if torch.is_grad_enabled():
        _hook_outputs(state, output)
    state.enter(TrainingState.IDLE)
    return output


def _complete_partial_groups(root: FSDPState, output: Any) -> Any:
    """Complete the units of which some modules did not run in this forward."""
    for state in reversed(root.context.all_states):
        if state is root or not state.to_run_forward:
            continue
        state.to_run_forward.clear()
        output = _cast_output(state, _complete(state, output))
    return output


def _end_of_evaluation(root: FSDPState) -> None:
    """Close a forward after which no backward comes: its order would only grow."""
    for state in root.context.all_states:
        for group in state.groups:
            group.end_of_evaluation()
    order, start = root.comm().post_forward_order, root.context.order_start
    for group in order[start:]:
        while group.post_forward_indices and group.post_forward_indices[-1] >= start:
            group.post_forward_indices.pop()
    del order[start:]


def _hook_outputs(state: FSDPState, output: Any) -> None:
    hook = functools.partial(pre_backward, state)
    for tensor in grad_tensors(output):
        if tensor._base is not None and tensor._is_view():
            _warn_about_view(state)
        hook_gradient(tensor, hook)


def _warn_about_view(state: FSDPState) -> None:
    warnings.warn(
        f"{state.wording.module} ({state.name}) returned a view tensor. An in-place op on it "
        "(x += y) drops the hook that gathers the parameters for backward, which then fails "
        "or gives wrong gradients. Use out = out + y, or return out.clone().",
        UserWarning,
        stacklevel=5,
    )


def _cast_output(state: FSDPState, output: Any) -> Any:
    dtype = state.mp_policy.output_dtype
    return output if dtype is None else cast_floats(output, dtype)

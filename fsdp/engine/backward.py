"""What happens around a unit's backward: gather again, prefetch, and close what is left open."""

from __future__ import annotations

import functools

import torch
from torch import nn

from fsdp.engine.grad_mode import without_gradients
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.state import Prefetches, TrainingState
from fsdp.engine.torch_private import in_compiled_backward, queue_callback, untraced
from fsdp.engine.trace import logger, trace
from fsdp.engine.unit import FSDPState


@untraced
def pre_backward(state: FSDPState, gradient: torch.Tensor) -> torch.Tensor:
    """Gather the unit's parameters again; runs when the gradient of an output is there.

    Raises:
        RuntimeError: compiled autograd runs this backward.
    """
    context = state.context
    first = not context.post_backward_final_callback_queued
    if first and in_compiled_backward():
        # It drops the callback below, without a word.
        raise RuntimeError(
            f"the backward of '{state.name}' is run by compiled autograd, which does not tell when "
            "it is over: gradients would not be reduced. Call backward without it "
            "(torch._dynamo.config.compiled_autograd = False); what was compiled for forward has a "
            "compiled backward either way."
        )
    state.enter(TrainingState.PRE_BACKWARD)
    if first:
        context.post_backward_final_callback_queued = True
        queue_callback(functools.partial(end_of_backward, state.root_of_iteration()))
    with without_gradients():  # which are on in a backward that is differentiated itself
        for group in state.groups:
            if group.training_state is not TrainingState.PRE_BACKWARD:
                _gather_again(state, group)
        for other in state.backward_prefetch:
            for group in reversed(other.groups):
                _prefetch(group)
    return gradient


def _gather_again(state: FSDPState, group: FSDPParamGroup) -> None:
    group.enter(TrainingState.PRE_BACKWARD)
    if group.reducer.holds_back:
        group.reducer.recall()
    with trace("pre_backward", group.module_fqn):
        group.unshard(async_op=group.settings.unshard_async_op)
        group.wait_for_unshard()
    if group.post_forward_indices:  # none in a second backward over the same forward
        index = group.post_forward_indices.pop()
        if not state.backward_prefetch:
            _prefetch_previous(state, group, index)


def _prefetch(group: FSDPParamGroup) -> None:
    with trace("backward_prefetch", group.module_fqn):
        group.unshard(async_op=group.settings.unshard_async_op, phase=TrainingState.PRE_BACKWARD)


def _prefetch_previous(state: FSDPState, group: FSDPParamGroup, index: int) -> None:
    """Start to gather what ran before ``group``, whose place in the order is ``index``."""
    if state.prefetches is Prefetches.NEVER:
        return
    order = state.comm().post_forward_order
    if state.prefetches is Prefetches.AFTER_GRADIENTS:
        if index > 0:
            group.then_prefetch = functools.partial(_prefetch, order[index - 1])
        return
    if group.groups_in_state == 1:
        if index > 0:
            _prefetch(order[index - 1])
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
        _prefetch(target)


@untraced
def end_of_backward(root: FSDPState) -> None:
    """Close what backward left open; runs once, when backward is over."""
    logger.debug("FSDP::root_post_backward")
    context = root.context
    for state in context.all_states:
        if state.training_state is TrainingState.FORWARD and not state.to_run_forward:
            # Backward was called inside a forward that still goes on.
            continue
        if context.iter_forward_root is state:
            context.iter_forward_root = None
        state.to_run_forward.clear()
        for group in reversed(state.groups):
            group.close_backward()
        state.training_state = TrainingState.IDLE
    if context.is_last_backward:
        root.comm().end_of_backward()
        for state in context.all_states:
            for group in state.groups:
                group.finalize_backward()
    elif root.comm().streams.blocks_host:
        root.comm().finish_reductions()  # elsewhere each is handed over when it is launched
    context.post_backward_final_callback_queued = False
    context.backwards += 1

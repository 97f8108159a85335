"""Whole parameters under their own names for a while, and what becomes of changes to them.

Knows one unit's group and exposure; which units are opened is decided by the caller. Whole
gradients beside them are in ``full_gradients.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from fsdp.engine.grad_mode import without_gradients
from fsdp.engine.param import ShardedState
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.state import TrainingState
from fsdp.engine.torch_private import gather_now
from fsdp.engine.unit import FSDPState
from fsdp.flat_exposure import FlatExposure
from fsdp.flat_parameter import flat_params
from fsdp.full_gradients import WholeGradients
from fsdp.original_exposure import OriginalExposure


def check_idle(states: Sequence[FSDPState]) -> None:
    """Refuse to open units that are in use.

    Raises:
        AssertionError: in forward or backward, or open already.
    """
    for state in states:
        if state.training_state is TrainingState.SUMMON_FULL_PARAMS:
            raise AssertionError(
                "Cannot manually unshard parameters when already unsharding parameters"
            )
        context = state.context
        running = context.iter_forward_root is not None
        if running or context.post_backward_final_callback_queued:
            raise AssertionError("Cannot manually unshard parameters during forward/backward")


@contextmanager
def whole_params(
    state: FSDPState,
    *,
    writeback: bool,
    offload_to_cpu: bool = False,
    show: bool = True,
    with_grads: bool = False,
    in_place: bool = False,
) -> Iterator[torch.Tensor | None]:
    """Register the whole parameters of one unit, in their original dtype.

    Args:
        state: the unit, which must be idle.
        writeback: whether changes reach the shard at the end.
        offload_to_cpu: whether the whole parameters lie in host memory.
        show: False to take part in the gather and leave the sharded parameters registered.
        with_grads: whether whole gradients are shown beside them, if originals are registered.
        in_place: of a unit that nobody shards, show the shard itself: changes stay as they are
            made, and nothing is copied.

    Yields:
        The buffer (W * S,) of which the parameters are views; None for a unit without any.

    *Collective* over the shard group. *Memory*: the whole parameters. *Blocks* the current stream
    until the gather is over (the host, without streams).
    """
    with taken_out(state) as group, ExitStack() as stack:
        if group is None:
            yield None
            return
        full = _gather(group, in_place=in_place)
        # Now: while whole parameters are registered, the gradients are put aside.
        gradients = WholeGradients(group) if with_grads else None
        if show:
            if offload_to_cpu:
                full = full.cpu()
            stack.enter_context(_opened(group, full, gradients, writeback=writeback))
        yield full


@contextmanager
def taken_out(state: FSDPState) -> Iterator[FSDPParamGroup | None]:
    """Take one idle unit out of training for a while; inside, its shard is what was registered.

    Yields:
        The group of the unit, which is sharded; None for a unit without parameters.

    *Collective* over the shard group, if the unit was whole: it is again afterwards, anew.
    """
    if not state.groups:
        state.enter(TrainingState.SUMMON_FULL_PARAMS)
        try:
            yield None
        finally:
            state.enter(TrainingState.IDLE)
        return
    (group,) = state.groups
    before = group.sharded_state
    group.to_sharded()
    group.drop_pending()
    if not _exposure(group).is_bound(flat_params(group.shard.plain), group.shard.data):
        group.relink()
    state.enter(TrainingState.SUMMON_FULL_PARAMS)
    group.enter(TrainingState.SUMMON_FULL_PARAMS)
    try:
        yield group
    finally:
        group.enter(TrainingState.IDLE)
        state.enter(TrainingState.IDLE)
        if before is ShardedState.UNSHARDED:
            with without_gradients():
                group.unshard()
                group.wait_for_unshard()


@contextmanager
def _opened(
    group: FSDPParamGroup,
    full: torch.Tensor,
    gradients: WholeGradients | None,
    *,
    writeback: bool,
) -> Iterator[None]:
    exposure, params = _exposure(group), flat_params(group.shard.plain)
    offsets = group.shard.layout.unsharded_offsets
    wholes = [
        param.restored(full.narrow(0, start, param.shape.numel()))
        for param, start in zip(params, offsets, strict=True)
    ]
    exposure.show_full(params, wholes)
    if gradients is not None:
        gradients.show()
    try:
        yield
        # Not after an exception: the other ranks would wait, or keep half of a change.
        if writeback:
            with torch.no_grad():
                _write_back(group, full, wholes)
                if gradients is not None:
                    gradients.write_back()
    finally:
        exposure.hide_full(params)


@torch.no_grad()
def _gather(group: FSDPParamGroup, *, in_place: bool) -> torch.Tensor:
    """Return the shards of all ranks, (W * S,), in their original dtype on the compute device.

    Memory of its own, unless ``in_place`` and all of it is here already.
    """
    info, shard = group.mesh_info, group.shard.data
    own = shard.to(group.options.device)
    full = gather_now(own, info.shard_group)
    return full.clone() if full is shard and not in_place else full


def _write_back(group: FSDPParamGroup, full: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
    """Copy this rank's elements into the shard; what lies between parameters stays zero.

    Raises:
        RuntimeError: a parameter was replaced by one of another shape.
    """
    exposure, shard = _exposure(group), group.shard
    for param, whole in zip(flat_params(group.shard.plain), wholes, strict=True):
        found = exposure.full(param)
        if found.shape != whole.shape:
            raise RuntimeError(
                "Cannot writeback when the parameter shape changes\n"
                f"'{param.name}' expects {tuple(whole.shape)} but got "
                f"{tuple(found.shape)}"
            )
        if found.data_ptr() != whole.data_ptr() or found.stride() != whole.stride():
            whole.copy_(found)
    if full is shard.data:
        return
    rank = group.mesh_info.shard_rank
    own = full.narrow(0, rank * shard.layout.shard_numel, shard.layout.shard_numel)
    for index in range(len(shard.plain)):
        piece = shard.layout.piece(index, rank)
        target = shard.data.narrow(0, piece.offset, piece.numel)
        target.copy_(own.narrow(0, piece.offset, piece.numel))


def _exposure(group: FSDPParamGroup) -> FlatExposure | OriginalExposure:
    exposure = group.options.exposure
    assert isinstance(exposure, (FlatExposure, OriginalExposure))
    return exposure

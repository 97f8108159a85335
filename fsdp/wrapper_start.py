"""What happens before the first forward of a tree of wrapped units, and when its mode changes.

Settings are compared, parameters looked for, buffers cast; the engine's own start is inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from fsdp.api import MixedPrecisionPolicy
from fsdp.engine.lazy_init import lazy_init
from fsdp.engine.torch_private import graph_task, without_transforms
from fsdp.wrapper_order import ForwardOrder
from fsdp.wrapper_unit import WrappedUnit, units_of

_HOMOGENEOUS: dict[str, Callable[[WrappedUnit], object]] = {
    "_use_orig_params": lambda unit: unit._arguments.use_orig_params,
    "limit_all_gathers": lambda unit: unit._arguments.limit_all_gathers,
    "_use_full_prec_in_eval": lambda unit: unit._environment.full_precision_in_eval,
}


def start(root: WrappedUnit) -> None:
    """Make ``root`` the root of its tree.

    *Collective* over the groups of the mesh.

    Raises:
        ValueError: the units differ in what they must have in common.
        RuntimeError: parameters are not where a unit needs them, or an optimizer is to step inside
            backward on a flat parameter.
    """
    units = units_of(root)
    lazy_init(root._state, functools.partial(_check, units))
    if root._arguments.mixed_precision.cast_root_forward_inputs:
        root._state.mp_policy = root._arguments.policy(cast_forward_inputs=True)
    with without_transforms():
        for unit in units:
            _cast_buffers(unit)
    order = ForwardOrder(root)
    for unit in units:
        unit._order = order if order.needed else None


def _check(units: Sequence[WrappedUnit]) -> None:
    for name, value_of in _HOMOGENEOUS.items():
        values = {value_of(unit) for unit in units}
        if len(values) > 1:
            raise ValueError(f"Expects one homogeneous value for {name} but got {values}")
    for unit in units:
        _check_device(unit)
        if hasattr(unit._flat_param, "_in_backward_optimizers"):
            raise RuntimeError(
                "FSDP optimizer in backward only supported with use_orig_params=True!"
            )


def is_root(unit: WrappedUnit) -> bool:
    """Return whether ``unit`` is the outermost of its tree, which starts now if it is.

    *Collective* at the first call on the root, as the first forward is.
    """
    if unit._state.is_root is None and not unit._nested:
        start(unit)
    return bool(unit._state.is_root)


def _check_device(unit: WrappedUnit) -> None:
    """Refuse parameters that are not where the unit needs them, before anything is sent."""
    for group in unit._state.groups:
        group.relink()
        found, wanted = group.shard.data.device, unit._state.device
        if group.options.offload and found.type != "cpu":
            raise RuntimeError(
                "An FSDP-managed module with parameter CPU offloading enabled has parameters "
                f"on {found}. Make sure to not move the module from CPU when offloading."
            )
        if not group.options.offload and found != wanted:
            raise RuntimeError(
                f"An FSDP-managed module unexpectedly has parameters on {found}. Make sure to "
                f"move the module to {wanted} before training."
            )


def follow_mode(unit: WrappedUnit) -> None:
    """Compute in full precision in eval mode, and as the user said in training mode.

    For FSDP_USE_FULL_PREC_IN_EVAL. Plans and buffers of the other mode are given up.
    """
    mixed = unit._arguments.mixed_precision
    if graph_task() != -1:
        return  # a recomputation sees what forward saw
    at_root = bool(unit._is_root) and mixed.cast_root_forward_inputs
    policy = (
        unit._arguments.policy(cast_forward_inputs=at_root)
        if unit.training
        else MixedPrecisionPolicy(cast_forward_inputs=False)
    )
    if policy == unit._state.mp_policy:
        return
    unit._state.mp_policy = policy
    for group in unit._state.groups:
        group.use_policy(policy)
    if unit.training:
        _cast_buffers(unit)
    else:
        _restore_buffers(unit)


def _cast_buffers(unit: WrappedUnit) -> None:
    dtype, device = unit._arguments.mixed_precision.buffer_dtype, unit._state.device
    for module, name in unit._buffers_owned:
        buffer = module._buffers.get(name)
        if buffer is None:
            continue
        floating = dtype is not None and buffer.is_floating_point()
        cast = buffer.to(device, dtype if floating else buffer.dtype)
        if cast is not buffer:
            module._buffers[name] = cast
            unit._buffer_dtypes[cast] = buffer.dtype


def _restore_buffers(unit: WrappedUnit) -> None:
    for module, name in unit._buffers_owned:
        buffer = module._buffers.get(name)
        dtype = None if buffer is None else unit._buffer_dtypes.pop(buffer, None)
        if buffer is not None and dtype is not None:
            module._buffers[name] = buffer.to(dtype)

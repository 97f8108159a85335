"""From a module to a unit: the modules below that a policy names, then the module itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import CPUOffloadPolicy, OffloadPolicy
from fsdp.engine.group_options import GroupOptions, Kept
from fsdp.engine.managed import managed_states, move_to
from fsdp.engine.param import find_owners
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.state import Prefetches, Wording
from fsdp.engine.unit import FSDPState
from fsdp.flat_exposure import FlatExposure
from fsdp.flat_parameter import (
    EndToEnd,
    FlatParam,
    check_flattenable,
    flatten,
)
from fsdp.optim_state.refusal import expect_elementwise
from fsdp.original_exposure import OriginalExposure, original_of
from fsdp.plain_names import CHECKPOINTED, clean
from fsdp.wrap import Policy, PolicyFn, choose_targets, one_of, post_order, replace_targets
from fsdp.wrapper_checks import Arguments
from fsdp.wrapper_mesh import mesh_info
from fsdp.wrapper_options import STRATEGIES, BackwardPrefetch, ShardingStrategy
from fsdp.wrapper_owned import owned_modules
from fsdp.wrapper_setup import broadcast_states, check_units, keep_precise, materialize
from fsdp.wrapper_unit import WrappedUnit

_PREFETCHES = {
    BackwardPrefetch.BACKWARD_PRE: Prefetches.BEFORE_GRADIENTS,
    BackwardPrefetch.BACKWARD_POST: Prefetches.AFTER_GRADIENTS,
    None: Prefetches.NEVER,
}

_WORDING = Wording(
    module="FSDP-wrapped module",
    sharing="Wrap the smallest module that holds all uses of it as one unit.",
    names_agree=False,  # what a rank ignores may lie between what it does not
    clean=clean,
)


def wrap_children(
    root: WrappedUnit,
    module: nn.Module,
    policy: Policy | PolicyFn,
    given: Arguments,
    mesh: DeviceMesh,
) -> None:
    """Make units of the modules below ``module`` that ``policy`` names, as ``root`` is one.

    Raises:
        ValueError: the policy, or the division into units, is not what it must be.
    """
    ignored_modules, ignored_params = root._ignored_modules, root._ignored_params
    kwargs = {**given.for_children(), "device_mesh": mesh}
    kwargs["ignored_states"] = ignored_params or None
    precise = tuple(given.mixed_precision._module_classes_to_ignore)
    apart: set[nn.Module] = set()
    if given.mixed_precision.lowers and precise:
        apart = {m for m in module.modules() if isinstance(m, precise)}
        apart -= {module, *ignored_modules}
    if apart and not isinstance(policy, Policy):
        policy = one_of([policy, _is_one_of(precise)])
    targets = choose_targets(
        module, policy, kwargs, ignored_modules=ignored_modules, ignored_params=ignored_params
    )
    for each in apart:
        targets.setdefault(each, dict(kwargs))["mixed_precision"] = None
    for target in targets.values():
        if target.get("process_group") is not None:
            target["device_mesh"] = None
    check_units(
        module, targets, ignored_modules, ignored_params, use_orig_params=given.use_orig_params
    )
    if apart:
        keep_precise(apart)
    ordered = {m: targets[m] for m in post_order(module) if m in targets}
    replace_targets(module, ordered, type(root))


def make_unit(unit: WrappedUnit, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Flatten what ``unit`` owns below ``module``, and give it its state and its group.

    *Collective*: broadcasts, if states are to be synchronised. *Memory*: one shard beside the
    parameters.
    """
    given = unit._arguments
    owned = owned_modules(module, unit._ignored_modules)
    materialize(owned, device, given.param_init_fn)
    params, buffers = managed_states(owned, frozenset(unit._ignored_params))
    check_flattenable(params, use_orig_params=given.use_orig_params)
    unit._buffers_owned = [(m, name) for m in owned for name in m._buffers]
    if given.device_id is not None:
        move_to([*params, *buffers], device)
    info = mesh_info(mesh, given.sharding_strategy)
    if given.sync_module_states:
        broadcast_states([*params, *buffers], info, device)
    policy = given.policy()
    shards = STRATEGIES[given.sharding_strategy].shards
    state = FSDPState((unit,), info, device, policy, auto_reshard=shards, wording=_WORDING)
    state.prefetches = _PREFETCHES[given.backward_prefetch]
    unit._exposure = _exposure(unit, module, params)
    if not params:
        return
    keeps = given.use_orig_params
    lay_out = EndToEnd.of(policy.param_dtype or params[0].dtype, use_orig_params=keeps)
    owners = find_owners(params, (module,))
    pieces = flatten(params, owners, info, lay_out, use_orig_params=keeps)
    options = GroupOptions(
        device=device,
        exposure=unit._exposure,
        lay_out=lay_out,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy() if given.cpu_offload.offload_params else OffloadPolicy(),
        whole_reductions=True,
        kept=_kept(given),
        held=unit._exposure,
    )
    low = policy.param_dtype is not None and any(p.dtype != policy.param_dtype for p in params)
    after = info if _reshards(given.sharding_strategy, low=low) else None
    state.groups.append(FSDPParamGroup(pieces, (unit,), info, after, options))
    outer = [piece.outer for piece in pieces if piece.outer is not None]
    state.model_groups = tuple(dict.fromkeys(each.group for each in outer))
    _refuse_optimizers(unit, pieces, is_part=info.shard_size > 1)


def _reshards(strategy: ShardingStrategy, *, low: bool) -> bool:
    """Return whether a unit gives up between forward and backward what it computes with.

    Without sharding that is a copy in a ``low`` dtype, if there is one; casting again is cheap.
    """
    row = STRATEGIES[strategy]
    return row.reshards or (low and not row.shards)


def _refuse_optimizers(unit: WrappedUnit, pieces: Sequence[FlatParam], *, is_part: bool) -> None:
    """Let optimizers that need whole tensors raise, unless they get them."""
    names = [f"{type(p.info.module).__name__}.{p.info.param_name}" for p in pieces]
    flat = unit._flat_param
    cut = [piece.outer is not None and piece.outer.is_cut for piece in pieces]
    if flat is not None:
        expect_elementwise(flat, names[0], is_part=is_part or any(cut))
        return
    for piece, name, was_cut in zip(pieces, names, cut, strict=True):
        if is_part or was_cut:
            expect_elementwise(original_of(piece), name, is_part=True)


def _exposure(
    unit: WrappedUnit, module: nn.Module, params: Sequence[nn.Parameter]
) -> FlatExposure | OriginalExposure:
    given, watches = unit._arguments, not unit._environment.skip_writeback_check
    low = given.gradient_dtype()
    if params and not given.use_orig_params:
        grad = params[0].requires_grad
        owner = getattr(module, CHECKPOINTED, module)
        return FlatExposure(owner, requires_grad=grad, low_dtype=low, watches=watches)
    keeps_shape = not STRATEGIES[given.sharding_strategy].shards
    return OriginalExposure(keeps_shape=keeps_shape, low_dtype=low, watches=watches)


def _kept(given: Arguments) -> Kept:
    """Return what users see between forward and backward of parameters that stay whole.

    Whole ones where the strategy says that they stay; else their own, although the root's stay.
    """
    row = STRATEGIES[given.sharding_strategy]
    stays = row.shards and not row.reshards
    return Kept.UNTIL_BACKWARD if stays or not given.use_orig_params else Kept.HIDDEN


def own_tensors(module: nn.Module, ignored: set[nn.Parameter]) -> list[torch.Tensor]:
    """Return the parameters and buffers of ``module`` itself that are not ``ignored``."""
    params = [p for p in module.parameters(recurse=False) if p not in ignored]
    return [*params, *module.buffers(recurse=False)]


def _is_one_of(classes: tuple[type[nn.Module], ...]) -> PolicyFn:
    def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:  # noqa: FBT001
        return recurse or isinstance(module, classes)

    return policy

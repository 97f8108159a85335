"""The composable face: ``fully_shard`` cuts parameters, hooks the forward and swaps the class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from fsdp.composable_checks import (
    check_mesh,
    check_not_sharded,
    check_options,
    ignored_of,
    modules_of,
)
from fsdp.dtensor import Cut, DTensorExposure, cut_of, shard_parameter
from fsdp.engine.group_options import GroupOptions
from fsdp.engine.hooks import install_forward_hooks, install_state_dict_hooks
from fsdp.engine.layout import side_by_side
from fsdp.engine.managed import (
    managed_modules,
    managed_states,
    move_to,
)
from fsdp.engine.mesh import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    check_reshard,
    default_mesh,
    device_of,
    mesh_info_of,
    reshard_mesh_info,
)
from fsdp.engine.optimizer_guard import refuse_in_optimizers
from fsdp.engine.param import find_owners
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.sharing import let_sharing_be_refused
from fsdp.engine.state import Wording
from fsdp.engine.unit import FSDPState, state_of
from fsdp.module import fsdp_class
from fsdp.placement import ShardPlacementFnResult, resolve_placement

ShardPlacementFn = Callable[[nn.Parameter], ShardPlacementFnResult]

_FULL_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()
_WORDING = Wording(
    module="FSDP2-wrapped module",
    sharing=(
        "For shared/tied parameters, use fully_shard([module_a, module_b]) to place them in the "
        "same FSDP group."
    ),
)


def fully_shard(  # noqa: PLR0913 - torch's interface
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module`` over the data-parallel ranks, in place.

    The parameters that no inner call owns become one group, gathered by one all-gather before
    forward and backward and reduced by one reduce-scatter after backward. Call it bottom-up:
    first on the blocks, then on the root.

    Args:
        module: the module, or a sequence of modules that form one group.
        mesh: 1-D to shard over; 2-D with names to replicate over dim 0 and shard over dim 1.
            Default: all ranks.
        reshard_after_forward: True to shard again after forward; False to keep the whole
            parameters until backward; k to shard over k ranks. None: True, but False for the
            root.
        shard_placement_fn: for a parameter, the dim to cut and, if other, the mesh.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: where shards live between uses.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: which dims of ``mesh`` are data parallel, if the parameters are DTensors
            on a larger mesh.

    Returns:
        ``module``, whose class is now a subclass of ``FSDPModule`` as well.

    Raises:
        TypeError: an argument is of another type than it must be.
        ValueError: the module, the mesh or an option is not what it must be.
        AssertionError: the module was sharded before, or a 2-D mesh has no names.
        NotImplementedError: a parameter that cannot be cut as asked.

    Where it raises, nothing has changed.

    *Collective*: no, save the making of a default mesh or of the mesh of k ranks.
    *Memory*: the shards of one group beside its whole parameters.
    """
    modules = modules_of(module)
    check_options(mp_policy, offload_policy, shard_placement_fn, dp_mesh_dims)
    ignored = ignored_of(ignored_params)
    mesh = default_mesh() if mesh is None else mesh
    check_mesh(mesh)
    info = mesh_info_of(mesh, dp_mesh_dims, "fully_shard")
    if reshard_after_forward is not None and info.shard_group is not None:
        check_reshard(reshard_after_forward, info)
    managed = managed_modules(modules, ignored)
    check_not_sharded(managed, ignored, _unit_of)
    params, buffers = managed_states(managed, ignored, "fully_shard")
    owners = dict(zip(params, find_owners(params, modules), strict=True))
    plans = [
        _GroupPlan(
            info=mesh_info,
            after=reshard_mesh_info(reshard_after_forward, mesh_info),
            cuts={p: cut_of(p, owners[p].param_name, mesh_info, at) for p, at in members},
        )
        for mesh_info, members in _by_mesh(params, shard_placement_fn, info)
    ]
    device = device_of(mesh)
    move_to([*params, *buffers], device)
    state = FSDPState(
        modules,
        info,
        device,
        mp_policy,
        auto_reshard=reshard_after_forward is None,
        wording=_WORDING,
    )
    options = GroupOptions(
        device=device,
        exposure=DTensorExposure(),
        lay_out=side_by_side,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
    )
    for plan in plans:
        sharded = [
            shard_parameter(p, owners[p], plan.info, cut, offload=options.offload)
            for p, cut in plan.cuts.items()
        ]
        group = FSDPParamGroup(sharded, modules, plan.info, plan.after, options)
        install_state_dict_hooks(group)
        state.groups.append(group)
    for param in params:
        refuse_in_optimizers(param, owners[param].param_name, "were sharded after it was made")
    _install(state, managed)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class _GroupPlan:
    """What a group will be: over which mesh, during and after forward, and its parameters."""

    info: DataParallelMeshInfo
    after: DataParallelMeshInfo | None
    cuts: dict[nn.Parameter, Cut]


_units: WeakKeyDictionary[nn.Module, ref[FSDPState]] = WeakKeyDictionary()


def _unit_of(module: nn.Module) -> FSDPState | None:
    """Return the unit that manages ``module``, itself or as a part of it."""
    found = _units.get(module)
    return None if found is None else found()


def _install(state: FSDPState, managed: Sequence[nn.Module]) -> None:
    install_forward_hooks(state)
    for each in managed:
        # The compiler reads these two; without them it would lift parameters out of the module.
        each._is_fsdp_managed_module = True  # type: ignore[assignment]
        each._fsdp_use_orig_params = True  # type: ignore[assignment]
        _units[each] = ref(state)
        let_sharing_be_refused(each)
    for each in state.modules:
        each.__class__ = fsdp_class(type(each))


def _by_mesh(
    params: Sequence[nn.Parameter], choose: ShardPlacementFn | None, info: DataParallelMeshInfo
) -> list[tuple[DataParallelMeshInfo, list[tuple[nn.Parameter, Any]]]]:
    """Return the parameters of each mesh with their placements, in order of first use."""
    if choose is not None and isinstance(info, DDPMeshInfo):
        raise ValueError(
            "Per-param mesh via shard_placement_fn is not supported with "
            f"{type(info).__name__}; it requires FSDPMeshInfo (or subclass)"
        )
    found: dict[Any, tuple[DataParallelMeshInfo, list[tuple[nn.Parameter, Any]]]] = {}
    for param in params:
        placement, mesh_info = resolve_placement(choose(param) if choose else None, info)
        if mesh_info.shard_group is None and choose is not None:
            raise ValueError(
                f"shard_placement_fn chose {mesh_info} for a parameter: it shards over nothing"
            )
        key = (mesh_info.shard_group, mesh_info.replicate_group)
        chosen = found.setdefault(key, (mesh_info, []))
        if chosen[0] is not mesh_info:
            raise ValueError(
                "Params sharing the same process group must use the same FSDPMeshInfo object, "
                f"but got different objects: {chosen[0]} vs {mesh_info}"
            )
        chosen[1].append((param, placement))
    return list(found.values())

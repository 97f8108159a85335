"""The composable face: ``fully_shard`` swaps a module's class and hooks its forward.

Every method here checks its arguments and hands them to the engine.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import deprecated

from fsdp.api import (
    AllGather,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from fsdp.comms import GroupAllocatedAllGather, GroupAllocatedReduceScatter
from fsdp.dtensor import (
    DTensorExposure,
    ShardPlacementFnResult,
    resolve_placement,
    shard_parameter,
)
from fsdp.engine.hooks import (
    install_forward_hooks,
    install_state_dict_hooks,
    untraced,
)
from fsdp.engine.layout import side_by_side
from fsdp.engine.managed import (
    check_module,
    managed_modules,
    managed_states,
    move_to,
    outermost,
)
from fsdp.engine.mesh import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    default_mesh,
    device_of,
    mesh_info_of,
    post_forward_mesh_info,
)
from fsdp.engine.optimizer_guard import refuse_in_optimizers
from fsdp.engine.param import find_owners
from fsdp.engine.param_group import FSDPParamGroup, GroupOptions
from fsdp.engine.unit import FSDPState, state_of

ShardPlacementFn = Callable[[nn.Parameter], ShardPlacementFnResult]

_cls_to_fsdp_cls: dict[type, type] = {}
_new_init_enabled = True
_FULL_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return the cache of swapped classes: original class to FSDP class."""
    return _cls_to_fsdp_cls


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Let a swapped class be instantiated without running the original ``__init__``."""
    global _new_init_enabled
    before, _new_init_enabled = _new_init_enabled, False
    try:
        yield
    finally:
        _new_init_enabled = before


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
        ValueError: the module, the mesh or an option is not what it must be.
        AssertionError: the module was sharded before, or a 2-D mesh has no names.
        NotImplementedError: a parameter that cannot be cut as asked.

    *Collective*: no, save the making of a default mesh or of the mesh of k ranks.
    *Memory*: the shards of one group beside its whole parameters.
    """
    modules = (module,) if isinstance(module, nn.Module) else outermost(module)
    for each in modules:
        check_module(each, "fully_shard")
        if state_of(each) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard has already been applied to the following module:\n{each}"
            )
    if not modules:
        raise ValueError("fully_shard got an empty sequence of modules")
    mesh = default_mesh() if mesh is None else mesh
    info = mesh_info_of(mesh, dp_mesh_dims)
    device = device_of(mesh)
    after = _after_forward(reshard_after_forward, info)
    ignored = frozenset(ignored_params or ())
    managed = managed_modules(modules, ignored)
    params, buffers = managed_states(managed, ignored)
    move_to([*params, *buffers], device)
    state = FSDPState(modules, info, device, mp_policy, auto_reshard=reshard_after_forward is None)
    options = GroupOptions(
        device=device,
        exposure=DTensorExposure(),
        lay_out=side_by_side,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
    )
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    placements = _by_mesh(params, shard_placement_fn, info)
    owners = dict(zip(params, find_owners(params, modules), strict=True))
    for mesh_info, members in placements:
        group = FSDPParamGroup(
            [
                shard_parameter(p, owners[p], mesh_info, placement, offload=offload)
                for p, placement in members
            ],
            modules,
            mesh_info,
            after if mesh_info is info else _after_forward(reshard_after_forward, mesh_info),
            options,
        )
        install_state_dict_hooks(group)
        state.groups.append(group)
    for param in params:
        refuse_in_optimizers(param, owners[param].param_name, "were sharded after it was made")
    install_forward_hooks(state)
    for each in managed:
        # The compiler reads these two; without them it would lift parameters out of the module.
        each._is_fsdp_managed_module = True  # type: ignore[assignment]
        each._fsdp_use_orig_params = True  # type: ignore[assignment]
    for each in modules:
        each.__class__ = _fsdp_class(type(each))
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _after_forward(
    reshard: bool | int | None,  # noqa: FBT001 - what the user passed
    info: DataParallelMeshInfo,
) -> DataParallelMeshInfo | None:
    if info.shard_group is None:
        return None  # nothing is sharded, before forward or after
    if info.dp_mesh_dims is not None and isinstance(reshard, int) and reshard not in (True, False):
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    return post_forward_mesh_info(True if reshard is None else reshard, info)


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


def _fsdp_class(cls: type) -> type:
    swapped = _cls_to_fsdp_cls.get(cls)
    if swapped is None:
        swapped = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy})
        _cls_to_fsdp_cls[cls] = swapped
    return swapped


def _no_deepcopy(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


class FSDPModule:
    """The methods that a sharded module gains."""

    _orig_cls_mro_index = 2  # [FSDPLinear, FSDPModule, Linear, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class, as slicing a sharded ``Sequential`` does."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)
        if _new_init_enabled:
            made.__init__(*args, **kwargs)
        return made

    def _state(self) -> FSDPState:
        state = state_of(cast("nn.Module", self))
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state

    _get_fsdp_state = _state

    def _states(self, *, recurse: bool) -> list[FSDPState]:
        if not recurse:
            return [self._state()]
        inner = cast("nn.Module", self).modules()
        states = [state_of(m) for m in inner if isinstance(m, FSDPModule)]
        return list(dict.fromkeys(state for state in states if state is not None))

    def _groups(self, *, recurse: bool = False) -> list[FSDPParamGroup]:
        return [group for state in self._states(recurse=recurse) for group in state.groups]

    def reshard(self) -> None:
        """Free this module's whole parameters and register the sharded ones. Not recursive."""
        for group in self._groups():
            group.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # noqa: FBT001, FBT002
        """Gather this module's parameters. Not recursive.

        *Collective* over the shard group. *Blocks* the current stream, unless ``async_op``.

        Returns:
            None, or with ``async_op`` a handle; the next forward waits for it by itself.
        """
        groups = self._groups()
        for group in groups:
            group.lazy_init()
            group.unshard(async_op=async_op)
        handle = _PendingUnshard(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Forget an iteration that an exception ended; its gradients are lost. Root only.

        Raises:
            RuntimeError: this module is not the root.
        """
        self._state().reset_iter_state()

    def set_is_last_backward(self, is_last_backward: bool) -> None:  # noqa: FBT001
        """Say whether the next backward is the last of the iteration."""
        self._state().context.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self,
        requires_gradient_sync: bool,  # noqa: FBT001
        *,
        recurse: bool = True,
    ) -> None:
        """Say whether backward reduces gradients; if not, they accumulate whole."""
        for group in self._groups(recurse=recurse):
            group.reduce_grads = requires_gradient_sync
            group.all_reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(
        self,
        requires_all_reduce: bool,  # noqa: FBT001
        *,
        recurse: bool = True,
    ) -> None:
        """Say whether backward reduces over replicas; if not, partial shards accumulate."""
        for group in self._groups(recurse=recurse):
            group.all_reduce_grads = requires_all_reduce

    def set_reshard_after_forward(
        self,
        reshard_after_forward: bool,  # noqa: FBT001
        recurse: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        """Change ``reshard_after_forward``, for the root as well.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for state in self._states(recurse=recurse):
            state.auto_reshard_after_forward = False
            for group in state.groups:
                group.post_forward_mesh_info = _after_forward(
                    reshard_after_forward, group.mesh_info
                )

    def set_reshard_after_backward(
        self,
        reshard_after_backward: bool,  # noqa: FBT001
        *,
        recurse: bool = True,
    ) -> None:
        """Say whether backward frees the whole parameters; if not, the next forward has them."""
        for group in self._groups(recurse=recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules`` right after this one in forward.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules`` right after this one in backward, instead of the previous one.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._state().backward_prefetch = _states_of(modules)

    def _only_group(self, method: str) -> FSDPParamGroup | None:
        groups = self._groups()
        if len(groups) > 1:
            raise ValueError(
                f"{method} is not supported with multiple param groups (from per-param mesh via "
                "shard_placement_fn): it would be ambiguous which one is meant"
            )
        return groups[0] if groups else None

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Use ``comm`` for this module's all-gathers.

        Raises:
            ValueError: the module has several groups.
        """
        group = self._only_group("set_custom_all_gather")
        if group is not None:
            group.all_gather_comm = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Use ``comm`` for this module's reduce-scatters.

        Raises:
            ValueError: the module has several groups.
        """
        group = self._only_group("set_custom_reduce_scatter")
        if group is not None:
            group.reduce_scatter_comm = comm

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Run ``hook`` on each reduced shard, before the division that follows the reduction.

        Raises:
            ValueError: the module has several groups, or a stream is given on a 2-D mesh.
        """
        group = self._only_group("set_all_reduce_hook")
        if group is None:
            return
        if stream is not None:
            if group.mesh_info.replicate_group is not None:
                raise ValueError("stream cannot be set when using native HSDP")
            group.all_reduce_hook_stream = stream
        group.all_reduce_hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next iteration's gathers wait for ``event`` only, not for all work so far."""
        self._state().context.post_optim_event = event

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks."""
        for group in self._groups():
            group.gradient_divide_factor = factor

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what ``set_gradient_divide_factor`` does."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:  # noqa: FBT001
        """Reduce by sums only, and divide apart."""
        for group in self._groups():
            group.force_sum_reduction = enable

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:  # noqa: FBT001
        """Take the buffers of this module's collectives from the process group's allocator.

        Raises:
            AssertionError: a custom collective is set, which allocates for itself.
        """
        for group in self._groups():
            _check_no_custom_comm(group, "set_allocate_memory_from_process_group_for_comm")
            shard_group = group.mesh_info.shard_group
            if shard_group is None or not enable:
                group.all_gather_comm = group.reduce_scatter_comm = None
                continue
            group.all_gather_comm = GroupAllocatedAllGather(shard_group)
            group.reduce_scatter_comm = GroupAllocatedReduceScatter(
                group.reduce_scatter_group or shard_group
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse: symmetric memory is not supported.

        Raises:
            AssertionError: a custom collective is set.
            NotImplementedError: always, otherwise.
        """
        for group in self._groups():
            _check_no_custom_comm(group, "set_symm_mem_for_comm")
        raise NotImplementedError(
            f"symmetric memory ({backend}) is not supported; "
            "set_allocate_memory_from_process_group_for_comm(True) or a custom collective "
            "(set_custom_all_gather) can take buffers from another allocator"
        )

    def set_reduce_scatter_unused_params(
        self,
        reduce_scatter_unused_params: bool,  # noqa: FBT001
        *,
        recurse: bool = True,
    ) -> None:
        """Count a trainable parameter without a gradient as one with a zero gradient."""
        for group in self._groups(recurse=recurse):
            group.reduce_scatter_unused_params = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Let so many packed gradients be in flight; the largest value in the tree applies.

        Raises:
            TypeError: not an int.
            ValueError: less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for group in self._groups(recurse=recurse):
            group.reduce_scatter_max_input_buffers = max_input_buffers

    def set_separate_reduce_scatter_group(
        self,
        enable: bool = True,  # noqa: FBT001, FBT002
        *,
        recurse: bool = True,
    ) -> None:
        """Run reduce-scatters on a process group of their own, or on the shared one again.

        *Collective* over each shard group, if ``enable``.
        """
        for group in self._groups(recurse=recurse):
            shard_group = group.mesh_info.shard_group
            if shard_group is None:
                raise AssertionError(f"group '{group.module_fqn}' shards over nothing")
            group.reduce_scatter_group = _separate_group(shard_group) if enable else None

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:  # noqa: FBT001
        """Say whether backward needs this module's parameters; an embedding's does not."""
        for group in self._groups():
            group.unshard_in_backward = unshard_in_backward

    def _set_unshard_async_op(self, async_op: bool) -> None:  # noqa: FBT001
        for group in self._groups(recurse=True):
            group.unshard_async_op = async_op

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the sharded parameters, then bring them back into the shards."""
        for group in self._groups():
            group.to_sharded()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self._groups():
            group.relink()
        return result


class UnshardHandle:
    """Waits for a ``FSDPModule.unshard``."""

    def wait(self) -> None:
        """Register the whole parameters; the current stream may use them from now on."""


class _PendingUnshard(UnshardHandle):
    def __init__(self, groups: list[FSDPParamGroup]) -> None:
        self._groups = groups

    def wait(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            group.wait_for_unshard()


def _check_no_custom_comm(group: FSDPParamGroup, method: str) -> None:
    own = (GroupAllocatedAllGather, GroupAllocatedReduceScatter)
    for comm in (group.all_gather_comm, group.reduce_scatter_comm):
        if comm is not None and not isinstance(comm, own):
            raise AssertionError(
                f"cannot call {method}() when a collective is custom: {type(comm).__name__}"
            )


def _states_of(modules: Iterable[Any]) -> list[FSDPState]:
    states = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        states.append(module._state())
    return states


_separate_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def _separate_group(shard_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group over the same ranks that is kept for reduce-scatters."""
    separate = _separate_groups.get(shard_group)
    if separate is None:
        separate = dist.new_group(
            dist.get_process_group_ranks(shard_group),
            use_local_synchronization=True,
            group_desc="fsdp_reduce_scatter",
        )
        _separate_groups[shard_group] = separate
    return separate


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Run ``module``'s hooks around another method than ``forward``; no-op if not sharded.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        state = module._state()
        args, kwargs = untraced(state.pre_forward)(module, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except Exception:
            state.post_forward(module, args, None)
            raise
        return untraced(state.post_forward)(module, args, output)

    setattr(module, method_name, wrapped)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots use the same streams, buffers and order, as pipeline stages should.

    Raises:
        ValueError: one of ``modules`` is not sharded.
    """
    states = _states_of(modules)
    for state in states[1:]:
        for inner in state.context.all_states or [state]:
            inner.share_comm(states[0].comm())

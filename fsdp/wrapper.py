"""The wrapper face: ``FullyShardedDataParallel`` cuts a module's parameters, put end to end.

The constructor makes the module a unit of the engine (``wrapper_making.py``); ``forward`` runs it
inside that unit. The verbs come from ``wrapper_gradients.py``, ``wrapper_params.py`` and
``state_dict/face.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.engine.forward import post_forward, pre_forward
from fsdp.engine.torch_private import untraced, untraced_frame
from fsdp.optim_state.face import OptimizerStates
from fsdp.outer_form import check_outer_forms
from fsdp.plain_names import WRAPPED
from fsdp.state_dict.face import States
from fsdp.wrap import Policy, PolicyFn
from fsdp.wrapper_checks import Arguments
from fsdp.wrapper_environment import Environment
from fsdp.wrapper_gradients import Gradients
from fsdp.wrapper_making import make_unit, own_tensors, wrap_children
from fsdp.wrapper_mesh import (
    ProcessGroups,
    compute_device,
    make_mesh,
    settle_strategy,
    warn_about_cpu,
)
from fsdp.wrapper_options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
)
from fsdp.wrapper_owned import owned_modules, resolve_ignored
from fsdp.wrapper_params import WholeParameters
from fsdp.wrapper_start import follow_mode, is_root, start
from fsdp.wrapper_unit import units_of


class FullyShardedDataParallel(Gradients, WholeParameters, States, OptimizerStates):
    """Shards the parameters of ``module`` over ranks, end to end in one flat parameter.

    Args:
        module: the module to wrap. Parameters of wrapped modules below it stay theirs.
        process_group: the ranks; (shard group, replicate group) for the hybrid strategies.
            Default: all ranks.
        sharding_strategy: default FULL_SHARD.
        cpu_offload: where shards live between uses.
        auto_wrap_policy: which modules below become units of their own; see ``fsdp.wrap``.
        backward_prefetch: when backward gathers the next unit; None: not before it is needed.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules: modules to leave alone.
        param_init_fn: called on each module with parameters on meta; default: the module's own
            ``reset_parameters``.
        device_id: where to compute; modules on the CPU are moved there.
        sync_module_states: whether all ranks start with the first rank's values.
        forward_prefetch: gather the unit that came next in the first forward one ahead.
        limit_all_gathers: accepted for compatibility. At most two units are in flight either way:
            the limit lies on the streams and never stops the host.
        use_orig_params: keep the user's parameters registered, instead of a flat one.
        ignored_states: parameters, or modules, to leave alone.
        device_mesh: instead of ``process_group``: 1-D, or (replicate, shard). Beside tensor
            parallelism, those dims of the common mesh; parameters that it has cut (DTensors on
            another dim of that mesh) are cut once more.

    Raises:
        ValueError: an argument, or the module, is not what it must be; nothing has changed then.
        NotImplementedError: an argument that is not supported.
        RuntimeError: parameters on several devices.

    *Collective*: broadcasts with ``sync_module_states``; making groups for a hybrid strategy.
    *Memory*: the shards of one unit beside its whole parameters.
    """

    def __init__(  # noqa: PLR0913 - torch's interface
        self,
        module: nn.Module,
        process_group: ProcessGroups = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | PolicyFn | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,  # noqa: FBT001, FBT002
        forward_prefetch: bool = False,  # noqa: FBT001, FBT002
        limit_all_gathers: bool = True,  # noqa: FBT001, FBT002
        use_orig_params: bool = False,  # noqa: FBT001, FBT002
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        given = Arguments(
            sharding_strategy=sharding_strategy or ShardingStrategy.FULL_SHARD,
            cpu_offload=cpu_offload or CPUOffload(),
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision or MixedPrecision(),
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
        )
        given.check(module, process_group, device_mesh, has_policy=auto_wrap_policy is not None)
        modules, params = resolve_ignored(module, ignored_modules, ignored_states)
        inner = units_of(module)
        for unit in inner:
            modules |= unit._ignored_modules
            params |= unit._ignored_params
        super().__init__()
        self._ignored_modules, self._ignored_params = modules, params
        tensors = [t for m in owned_modules(module, modules) for t in own_tensors(m, params)]
        device = compute_device(device_id, tensors, dist.get_rank())
        if device_id is None:
            warn_about_cpu(tensors, device)
        mesh = make_mesh(process_group, device_mesh, given.sharding_strategy, device)
        check_outer_forms((t for t in tensors if isinstance(t, nn.Parameter)), mesh, device_mesh)
        if auto_wrap_policy is not None:
            wrap_children(self, module, auto_wrap_policy, given, mesh)
        self._arguments = given.settled(settle_strategy(given.sharding_strategy, mesh))
        self._environment = Environment.read()
        self._state_dict_settings = StateDictSettings()
        self._nested = False
        self._buffer_dtypes = {}
        self._loading = self._finish_save = self._order = None
        self._saving = False
        self._device_mesh = device_mesh
        make_unit(self, module, mesh, device)
        for unit in units_of(module):
            unit._nested = True
            if unit._state.mesh_info.mesh is mesh:  # the policy's units got it from here
                unit._device_mesh = device_mesh
        self._fsdp_wrapped_module = module
        self._install_state_hooks()

    @untraced_frame
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with whole parameters.

        *Collective* over the shard group, unless the parameters are whole already.
        """
        args, kwargs = _begin(self, args, kwargs)
        try:
            # As an attribute it is looked for in three places.
            output = self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            _fail(self, args)
            raise
        return _end(self, args, output)

    def check_is_root(self) -> bool:
        """Return whether this unit is the outermost; initialises the tree if it is.

        *Collective* at the first call on the root, as the first forward is.
        """
        return is_root(self)

    # In the class: ``copy`` would else find a ``__deepcopy__`` of the wrapped module, silently.
    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would share this unit's hooks and groups."""
        _refuse_copy()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied."""
        _refuse_copy()

    @staticmethod
    def fsdp_modules(
        module: nn.Module,
        root_only: bool = False,  # noqa: FBT001, FBT002
    ) -> list[FullyShardedDataParallel]:
        """Return the units from ``module`` down, it included; with ``root_only`` the roots."""
        units = cast("list[FullyShardedDataParallel]", units_of(module))
        return [unit for unit in units if not root_only or unit._state.is_root]


def _refuse_copy() -> NoReturn:
    raise TypeError(
        "FullyShardedDataParallel cannot be copied or pickled: it belongs to process groups. Copy "
        "the module before it is wrapped; to save it, use state_dict()."
    )


@untraced
def _begin(
    unit: FullyShardedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Do what is due before the wrapped module runs."""
    state = unit._state
    if state.is_root is None:
        start(unit)
    if unit._environment.full_precision_in_eval:
        follow_mode(unit)
    if unit._order is not None:
        unit._order.before_forward(unit)
    return pre_forward(state, unit, args, kwargs)


@untraced
def _end(unit: FullyShardedDataParallel, args: tuple[Any, ...], output: Any) -> Any:
    """Do what is due after it has run."""
    output = post_forward(unit._state, unit, args, output)
    if unit._order is not None and unit._is_root:
        unit._order.after_forward()
    return output


@untraced
def _fail(unit: FullyShardedDataParallel, args: tuple[Any, ...]) -> None:
    """Do what is due after it has raised, inside the handler."""
    post_forward(unit._state, unit, args, None)

"""The wrapper face: ``FullyShardedDataParallel`` cuts a module's parameters, put end to end.

The constructor prepares the module (``wrapper_setup.py``), flattens it (``flat_parameter.py``) and
makes it a unit of the engine; ``forward`` runs the module inside that unit.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import CPUOffloadPolicy, OffloadPolicy
from fsdp.clip import clip_sharded
from fsdp.engine.forward import post_forward, pre_forward
from fsdp.engine.group_options import GroupOptions
from fsdp.engine.hooks import untraced
from fsdp.engine.lazy_init import lazy_init
from fsdp.engine.managed import move_to
from fsdp.engine.param import find_owners
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.state import Prefetches, TrainingState
from fsdp.engine.unit import FSDPState
from fsdp.flat_parameter import (
    EndToEnd,
    FlatExposure,
    OriginalExposure,
    check_flattenable,
    flatten,
    original_of,
)
from fsdp.full_params import check_idle, whole_params
from fsdp.wrap import Policy, PolicyFn, choose_targets, one_of, replace_targets
from fsdp.wrapper_checks import Arguments
from fsdp.wrapper_mesh import ProcessGroups, compute_device, make_mesh, mesh_info, settle_strategy
from fsdp.wrapper_options import (
    STRATEGIES,
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp.wrapper_setup import (
    broadcast_states,
    check_units,
    keep_precise,
    materialize,
    owned_modules,
    owned_params,
    resolve_ignored,
)
from fsdp.wrapper_state_dict import (
    PREFIX,
    WRAPPED,
    clean,
    detach_unit,
    full_settings,
    insert_prefix,
    new_destination,
    not_yet,
)

_before, _after = untraced(pre_forward), untraced(post_forward)

_PREFETCHES = {
    BackwardPrefetch.BACKWARD_PRE: Prefetches.BEFORE_GRADIENTS,
    BackwardPrefetch.BACKWARD_POST: Prefetches.AFTER_GRADIENTS,
    None: Prefetches.NEVER,
}


class FullyShardedDataParallel(nn.Module):
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
        device_mesh: instead of ``process_group``: 1-D, or (replicate, shard).

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
        for unit in _units(module):
            modules |= unit._ignored_modules
            params |= unit._ignored_params
        super().__init__()
        self._ignored_modules: set[nn.Module]
        self._ignored_params: set[nn.Parameter]
        self._ignored_modules, self._ignored_params = modules, params
        tensors = [t for m in owned_modules(module, modules) for t in _own_tensors(m, params)]
        device = compute_device(device_id, tensors, dist.get_rank())
        mesh = make_mesh(process_group, device_mesh, given.sharding_strategy, device)
        if auto_wrap_policy is not None:
            self._wrap_children(module, auto_wrap_policy, given, mesh)
        self._arguments = given.settled(settle_strategy(given.sharding_strategy, mesh))
        self._state_dict_settings = StateDictSettings()
        self._nested = False
        self._buffer_dtypes: dict[torch.Tensor, torch.dtype] = {}
        self._loading: ExitStack | None = None
        self._order: list[FSDPState] | None = None
        self._make_unit(module, mesh, device)
        for unit in _units(module):
            unit._nested = True
        self._fsdp_wrapped_module = module
        self.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]

    # Construction

    def _wrap_children(
        self, module: nn.Module, policy: Policy | PolicyFn, given: Arguments, mesh: DeviceMesh
    ) -> None:
        ignored_modules, ignored_params = self._ignored_modules, self._ignored_params
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
        ordered = {m: targets[m] for m in reversed(list(module.modules())) if m in targets}
        replace_targets(module, ordered, FullyShardedDataParallel)

    def _make_unit(self, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        given = self._arguments
        owned = owned_modules(module, self._ignored_modules)
        materialize(owned, device, given.param_init_fn)
        originals = owned_params(owned, self._ignored_params)
        params = list(originals)
        check_flattenable(params, use_orig_params=given.use_orig_params)
        buffers = list({b: None for m in owned for b in m.buffers(recurse=False)})
        self._buffers_owned = [(m, name) for m in owned for name in m._buffers]
        if given.device_id is not None:
            move_to([*params, *buffers], device)
        info = mesh_info(mesh, given.sharding_strategy)
        if given.sync_module_states:
            broadcast_states([*params, *buffers], info, device)
        policy = given.policy()
        state = FSDPState((self,), info, device, policy, auto_reshard=True)
        state.prefetches = _PREFETCHES[given.backward_prefetch]
        keeps_shape = not STRATEGIES[given.sharding_strategy].shards
        self._exposure: FlatExposure | OriginalExposure = OriginalExposure(keeps_shape=keeps_shape)
        if not params:
            return
        if not given.use_orig_params:
            self._exposure = FlatExposure(module, requires_grad=params[0].requires_grad)
        lay_out = EndToEnd.of(
            policy.param_dtype or params[0].dtype, use_orig_params=given.use_orig_params
        )
        owners = find_owners(params, (module,))
        keeps = given.use_orig_params
        pieces = flatten(params, owners, info, lay_out, use_orig_params=keeps)
        offload = given.cpu_offload.offload_params
        options = GroupOptions(
            device=device,
            exposure=self._exposure,
            lay_out=lay_out,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            whole_reductions=True,
        )
        after = info if STRATEGIES[given.sharding_strategy].reshards else None
        state.groups.append(FSDPParamGroup(pieces, (self,), info, after, options))

    # Running

    @property
    def _state(self) -> FSDPState:
        state: FSDPState = self.__dict__["_fsdp_state"]
        return state

    @property
    def _is_root(self) -> bool | None:
        return self._state.is_root

    @property
    def training_state(self) -> TrainingState:
        """Where this unit is in an iteration."""
        return self._state.training_state

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy, after a single rank was found to have nothing to shard."""
        return self._arguments.sharding_strategy

    @property
    def module(self) -> nn.Module:
        """The user's module, without a wrapper for activation checkpointing around it."""
        inner = self._fsdp_wrapped_module
        seen: nn.Module = getattr(inner, "_checkpoint_wrapped_module", inner)
        return seen

    @property
    def _flat_param(self) -> nn.Parameter | None:
        exposure = self._exposure
        return exposure.flat if isinstance(exposure, FlatExposure) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with whole parameters.

        *Collective* over the shard group, unless the parameters are whole already.
        """
        state = self._state
        if state.is_root is None:
            self._lazy_init()
        if self._order is not None:
            self._order.append(state)
        args, kwargs = _before(state, self, args, kwargs)
        try:
            output = self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException:
            _after(state, self, args, None)
            raise
        output = _after(state, self, args, output)
        if state.is_root and self._order is not None:
            self._set_forward_prefetch()
        return output

    def _lazy_init(self) -> None:
        units = self.fsdp_modules(self)
        for name in ("use_orig_params", "limit_all_gathers"):
            values = {getattr(unit._arguments, name) for unit in units}
            if len(values) > 1:
                raise ValueError(f"Expects one homogeneous value for {name} but got {values}")
        for unit in units:
            unit._check_device()
        lazy_init(self._state)
        mixed = self._arguments.mixed_precision
        if mixed.cast_root_forward_inputs:
            self._state.mp_policy = self._arguments.policy(cast_forward_inputs=True)
        for unit in units:
            unit._cast_buffers()
        if any(unit._arguments.forward_prefetch for unit in units):
            order: list[FSDPState] = []
            for unit in units:
                unit._order = order

    def _check_device(self) -> None:
        """Refuse parameters that are not where this unit needs them, before anything is sent."""
        for group in self._state.groups:
            group.relink()
            found, wanted = group.shard.data.device, self._state.device
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

    def _cast_buffers(self) -> None:
        dtype, device = self._arguments.mixed_precision.buffer_dtype, self._state.device
        for module, name in self._buffers_owned:
            buffer = module._buffers.get(name)
            if buffer is None:
                continue
            floating = dtype is not None and buffer.is_floating_point()
            cast = buffer.to(device, dtype if floating else buffer.dtype)
            if cast is not buffer:
                module._buffers[name] = cast
                self._buffer_dtypes[cast] = buffer.dtype

    def _set_forward_prefetch(self) -> None:
        """Let each unit gather the one that came next in the first forward."""
        assert self._order is not None
        order = list(dict.fromkeys(self._order))
        units = {unit._state: unit for unit in self.fsdp_modules(self)}
        for unit in units.values():
            unit._order = None
        for state, following in itertools.pairwise(order):
            if units[state]._arguments.forward_prefetch:
                state.forward_prefetch = [following]

    def check_is_root(self) -> bool:
        """Return whether this unit is the outermost; initialises the tree if it is.

        *Collective* at the first call on the root, as the first forward is.
        """
        if self._state.is_root is None and not self._nested:
            self._lazy_init()
        return bool(self._state.is_root)

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Let backward keep whole gradients on every rank instead of reducing them.

        *Memory*: the whole gradients, in the reduce dtype.

        Raises:
            RuntimeError: not the root.
        """
        if not self.check_is_root():
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        changed = []
        for unit in self.fsdp_modules(self):
            keeps = not STRATEGIES[unit.sharding_strategy].reshards
            for group in unit._state.groups:
                settings = group.settings
                changed.append((settings, settings.reduce_grads, settings.reshard_after_backward))
                settings.reduce_grads = False
                settings.reshard_after_backward = settings.reshard_after_backward and not keeps
        try:
            yield
        finally:
            for settings, reduces, reshards in changed:
                settings.reduce_grads, settings.reshard_after_backward = reduces, reshards

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of the whole tree to a total norm of at most ``max_norm``.

        *Collective* over the shard group, also on ranks without gradients.

        Returns:
            The norm before, 0-dim.

        Raises:
            RuntimeError: not the root.
        """
        if not self.check_is_root():
            raise RuntimeError(
                "`clip_grad_norm_()` should only be called on the root FSDP instance"
            )
        sharded: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        taken: set[nn.Parameter] = set()
        replicated: list[nn.Parameter] = []
        for unit in self.fsdp_modules(self):
            for group in unit._state.groups:
                shards, seen = group.mesh_info.shard_group, unit._seen_params()
                (replicated if shards is None else sharded.setdefault(shards, [])).extend(seen)
                taken.update(
                    seen, (p.unsharded for p in group.fsdp_params if p.unsharded is not None)
                )
        replicated += [p for p in self.parameters() if p not in taken]
        order = {param: index for index, param in enumerate(self.parameters())}
        replicated.sort(key=lambda param: order.get(param, len(order)))
        total = clip_sharded(
            sharded, replicated, float(max_norm), float(norm_type), self._state.device
        )
        offloads = any(unit._arguments.cpu_offload.offload_params for unit in _units(self))
        return total.cpu() if offloads else total

    def _seen_params(self) -> list[nn.Parameter]:
        """Return what the optimizer steps on, whatever is registered at the moment."""
        exposure = self._exposure
        if isinstance(exposure, FlatExposure):
            return [exposure.flat]
        params = [param for group in self._state.groups for param in group.fsdp_params]
        return [original_of(param) for param in params]

    # Whole parameters

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,  # noqa: FBT001, FBT002
        writeback: bool = True,  # noqa: FBT001, FBT002
        rank0_only: bool = False,  # noqa: FBT001, FBT002
        offload_to_cpu: bool = False,  # noqa: FBT001, FBT002
        with_grads: bool = False,  # noqa: FBT001, FBT002
    ) -> Generator[None, None, None]:
        """Show the whole parameters under their own names, outside of forward and backward.

        Args:
            module: a unit, or with ``recurse`` a module above or below units.
            recurse: whether the units below are opened too.
            writeback: whether this rank's part of changes stays.
            rank0_only: whether the first rank alone sees them.
            offload_to_cpu: whether they lie in host memory.
            with_grads: not supported.

        *Collective* over the shard groups. *Memory*: all whole parameters of the opened units.

        Raises:
            NotImplementedError: a combination that is not supported.
            AssertionError: in forward or backward, or inside another summon.
        """
        if with_grads:
            raise NotImplementedError("with_grads=True is not supported yet in summon_full_params")
        if writeback and rank0_only:
            raise NotImplementedError("writeback=True and rank0_only=True is not supported yet")
        if recurse:
            units = FullyShardedDataParallel.fsdp_modules(module)
        else:
            units = [module] if isinstance(module, FullyShardedDataParallel) else []
        if offload_to_cpu and any(not STRATEGIES[u.sharding_strategy].shards for u in units):
            raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "offload_to_cpu=True and rank0_only=False may result in redundant copies of the "
                "whole parameters in host memory; use rank0_only=True to avoid them",
                stacklevel=3,
            )
        check_idle([unit._state for unit in units])
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(
                    whole_params(
                        unit._state,
                        # A replica has no shard that would bring the old values back.
                        writeback=writeback or not STRATEGIES[unit.sharding_strategy].shards,
                        offload_to_cpu=offload_to_cpu,
                        show=unit._is_first_rank() or not rank0_only,
                    )
                )
            yield

    def _is_first_rank(self) -> bool:
        mesh = self._state.mesh_info.mesh
        return mesh.get_rank() == int(mesh.mesh.flatten()[0])

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every module below, with its whole parameters; changes stay.

        *Collective* over the shard groups.

        Raises:
            ValueError: inside a summon, forward or backward.
        """
        if self.training_state is not TrainingState.IDLE:
            raise ValueError(
                f"expected to be in states [{TrainingState.IDLE}] but current state is "
                f"{self.training_state}"
            )
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield as any module does; inside a summon without the wrapper's part of the names."""
        opened = self.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, param in super().named_parameters(*args, **kwargs):
            yield name.replace(PREFIX, "") if opened else name, param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield as any module does; inside a summon without the wrapper's part of the names."""
        opened = self.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(PREFIX, "") if opened else name, buffer

    # State dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the whole parameters and the buffers under the names of the plain model.

        *Collective* over the shard groups. *Memory*: the result, and the whole parameters of the
        units from this one down to the one being saved.
        """
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        destination = given.get("destination")
        config = self._state_dict_settings.state_dict_config
        assert isinstance(config, FullStateDictConfig)
        check_idle([self._state] if not self._is_open() else [])
        with ExitStack() as stack:
            full = None
            if not self._is_open():
                full = stack.enter_context(whole_params(self._state, writeback=False))
            found: dict[str, Any] = new_destination() if destination is None else destination
            before = set(found)
            self._fsdp_wrapped_module.state_dict(
                destination=found,
                prefix=given.get("prefix", ""),
                keep_vars=given.get("keep_vars", False),
            )
            keys = [key for key in found if key not in before]
            if config.rank0_only and not self._is_first_rank():
                for key in keys:
                    del found[key]
            else:
                detach_unit(found, keys, full, self._buffer_dtypes, config)
            return found

    def _is_open(self) -> bool:
        return self.training_state is TrainingState.SUMMON_FULL_PARAMS

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the form of ``state_dict`` on all units below ``module``; return what it was.

        Raises:
            NotImplementedError: another form than the full one.
            RuntimeError: a config of another form.
        """
        settings = full_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = FullyShardedDataParallel.get_state_dict_type(module)
        for unit in _units(module):
            unit._state_dict_settings = settings
        return before if before is not None else StateDictSettings()

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of the units below ``module``; None if there are none.

        Raises:
            AssertionError: they differ.
        """
        found = [unit._state_dict_settings for unit in _units(module)]
        if any(settings != found[0] for settings in found):
            raise AssertionError(f"All FSDP modules must have the same settings, got {found}")
        return found[0] if found else None

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """Set the form of ``state_dict`` for the body; it is restored after an exception too."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for unit in _units(module):
                unit._state_dict_settings = before

    @staticmethod
    def optim_state_dict(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Refuse: optimizer states are not supported yet."""
        not_yet("optim_state_dict")

    @staticmethod
    def optim_state_dict_to_load(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Refuse: optimizer states are not supported yet."""
        not_yet("optim_state_dict_to_load")

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refuse: communication hooks are not supported yet."""
        not_yet("register_comm_hook")

    # Like the wrapped module

    @staticmethod
    def fsdp_modules(
        module: nn.Module,
        root_only: bool = False,  # noqa: FBT001, FBT002
    ) -> list[FullyShardedDataParallel]:
        """Return the units from ``module`` down, it included; with ``root_only`` the roots."""
        return [unit for unit in _units(module) if not root_only or unit._state.is_root]

    def __getattr__(self, name: str) -> Any:
        """Look into the wrapped module for what the wrapper does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]


def _units(module: nn.Module) -> list[FullyShardedDataParallel]:
    return [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]


def _own_tensors(module: nn.Module, ignored: set[nn.Parameter]) -> list[torch.Tensor]:
    params = [p for p in module.parameters(recurse=False) if p not in ignored]
    return [*params, *module.buffers(recurse=False)]


def _is_one_of(classes: tuple[type[nn.Module], ...]) -> PolicyFn:
    def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:  # noqa: FBT001
        return recurse or isinstance(module, classes)

    return policy


def _before_load(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    check_idle([module._state])
    module._loading = ExitStack()
    module._loading.enter_context(whole_params(module._state, writeback=True))
    insert_prefix(state_dict, prefix)


def _after_load(module: Any, incompatible: Any) -> None:
    stack, module._loading = module._loading, None
    if stack is not None:
        stack.close()
    clean(incompatible.missing_keys)
    clean(incompatible.unexpected_keys)

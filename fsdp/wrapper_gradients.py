"""What users say about the gradients of a tree: when to reduce them, and how large they may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp.clip import Groups, clip_sharded
from fsdp.comm_hooks import compresses
from fsdp.engine.group_options import OwnReduction
from fsdp.engine.param import ShardedState
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.flat_exposure import FlatExposure
from fsdp.flat_parameter import flat_params
from fsdp.original_exposure import original_of
from fsdp.wrapper_options import STRATEGIES
from fsdp.wrapper_start import is_root
from fsdp.wrapper_unit import WrappedUnit, units_of


class Gradients(WrappedUnit):
    """The verbs about gradients; each is for the root of a tree."""

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Let backward keep whole gradients on every rank instead of reducing them.

        *Memory*: the whole gradients, in the reduce dtype.

        Raises:
            RuntimeError: not the root.
            ValueError: inside a summon, forward or backward.
        """
        self._check_idle()
        if not is_root(self):
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        changed = []
        for unit in units_of(self):
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

        Every element counts once, also one that ranks of tensor parallelism have alike.

        *Collective* over the shard group and over those of tensor parallelism, also on ranks
        without gradients.

        Returns:
            The norm before, 0-dim.

        Raises:
            RuntimeError: not the root.
        """
        if not is_root(self):
            raise RuntimeError(
                "`clip_grad_norm_()` should only be called on the root FSDP instance"
            )
        units = _units_of_tree(self)
        sharded: dict[Groups, list[torch.Tensor]] = {}
        taken: set[nn.Parameter] = set()
        replicated: list[nn.Parameter] = []
        for unit in units:
            state = unit._state
            for group in state.groups:
                seen, shard_group = _seen_params(unit), group.mesh_info.shard_group
                if state.model_groups:
                    for groups, gradients in _spread(unit, group):
                        sharded.setdefault(groups, []).extend(gradients)
                elif shard_group is None:
                    replicated += seen
                else:
                    there = [param.grad for param in seen if param.grad is not None]
                    sharded.setdefault((shard_group,), []).extend(there)
                taken.update(seen)
                if group.sharded_state is ShardedState.UNSHARDED:  # they may be registered
                    taken.update(p.unsharded for p in group.fsdp_params if p.unsharded is not None)
        everything = _registered(self)
        replicated += [param for param in everything if param not in taken]
        if replicated:
            order = {param: index for index, param in enumerate(everything)}
            replicated.sort(key=lambda param: order.get(param, len(order)))
        double = any(param.dtype == torch.float64 for param in (*taken, *everything))
        total = clip_sharded(
            sharded,
            replicated,
            float(max_norm),
            float(norm_type),
            self._state.device,
            torch.float64 if double else torch.float32,
        )
        offloads = any(unit._arguments.cpu_offload.offload_params for unit in units)
        return total.cpu() if offloads else total

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce the gradients of the whole tree; it divides them as well.

        Args:
            state: passed to every call; see ``fsdp.comm_hooks`` for those of the ready-made hooks.
            hook: called as ``hook(state, gradient, output)`` with the packed gradients (W * S,) of
                a unit and the shard (S,) to fill, or as ``hook(state, gradient)`` to reduce in
                place where nothing is sharded. It may use any group of ranks; it runs on the
                stream of the reductions, in the same order on all ranks.

        *Collective* at the first call on the root, as the first forward is.

        Raises:
            AssertionError: not the root, a hybrid strategy, or there is a hook already.
            ValueError: not callable.
        """
        if not is_root(self):
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        units = units_of(self)
        for unit in units:
            row = STRATEGIES[unit.sharding_strategy]
            if row.shards and row.replicates:
                raise AssertionError(
                    "Communication hook is not supported for hybrid strategies: "
                    f"{unit.sharding_strategy}"
                )
        if self._comm_hook is not None:
            raise AssertionError("A communication hook is already registered")
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook}")
        own = OwnReduction(run=functools.partial(_run_hook, hook, state), casts=compresses(hook))
        for unit in units:
            unit._comm_hook, unit._comm_hook_state = hook, state
            for group in unit._state.groups:
                group.settings.own_reduction = own


def _units_of_tree(root: WrappedUnit) -> list[WrappedUnit]:
    """Return the units of a tree that has started, without a walk through all of its modules."""
    modules = (module for state in root._state.context.all_states for module in state.modules)
    return [module for module in modules if isinstance(module, WrappedUnit)]


def _registered(root: nn.Module) -> list[nn.Parameter]:
    """Return what ``root.parameters()`` does, without the names of modules and parameters."""
    params: dict[nn.Parameter, None] = {}
    modules: set[nn.Module] = set()
    ahead: list[nn.Module | None] = [root]
    while ahead:
        module = ahead.pop()
        if module is None or module in modules:
            continue
        modules.add(module)
        for param in module._parameters.values():
            if param is not None:
                params[param] = None
        if module._modules:
            ahead.extend(reversed(module._modules.values()))
    return list(params)


def _run_hook(
    hook: Callable[..., Any], state: object, packed: torch.Tensor, output: torch.Tensor | None
) -> None:
    if output is None:
        hook(state, packed)
    else:
        hook(state, packed, output)


def _spread(
    unit: WrappedUnit, group: FSDPParamGroup
) -> Iterator[tuple[Groups, list[torch.Tensor]]]:
    """Yield the gradients of ``unit`` with the groups over which their elements are spread.

    A flat parameter holds both: what tensor parallelism has cut, and what it has not.
    """
    shards = () if group.mesh_info.shard_group is None else (group.mesh_info.shard_group,)
    params = flat_params(group.fsdp_params)
    for param, gradient in zip(params, unit._exposure.gradients(params), strict=True):
        cut = param.outer is not None and param.outer.is_cut
        own = (param.outer.group,) if param.outer is not None and cut else ()
        yield (*shards, *own), [] if gradient is None else [gradient]


def _seen_params(unit: WrappedUnit) -> list[nn.Parameter]:
    """Return what the optimizer steps on, whatever is registered at the moment."""
    exposure = unit._exposure
    if isinstance(exposure, FlatExposure):
        return [exposure.flat]
    params = [param for group in unit._state.groups for param in group.fsdp_params]
    return [original_of(param) for param in params]

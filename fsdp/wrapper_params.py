"""Whole parameters of a tree: in a context, for ``apply``, and how they are called."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp.engine.unshard_handle import UnshardHandle, start_unshard
from fsdp.full_params import check_idle, whole_params
from fsdp.plain_names import WRAPPED, clean
from fsdp.wrapper_options import STRATEGIES
from fsdp.wrapper_unit import WrappedUnit, units_of

Self = TypeVar("Self", bound="WholeParameters")


class WholeParameters(WrappedUnit):
    """The verbs that open units outside of forward and backward."""

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
            rank0_only: whether the first rank of each shard group alone sees them.
            offload_to_cpu: whether they lie in host memory.
            with_grads: whether whole gradients are shown beside them. A parameter that has no
                gradient on any rank has none; one that has none here alone shows zeros.

        A unit that nobody shards shows its own memory: changes stay as they are made.

        *Collective* over the shard groups. *Memory*: all whole parameters of the sharded units.

        Raises:
            NotImplementedError: a combination that is not supported.
            RuntimeError: with ``with_grads``, gradients that wait for their reduction.
            AssertionError: in forward or backward, or inside another summon.
        """
        units = [unit for unit in units_of(module) if recurse or unit is module]
        originals = all(unit._arguments.use_orig_params for unit in units)
        if with_grads and (offload_to_cpu or not originals):
            raise NotImplementedError(
                f"with_grads={with_grads}, use_orig_params={originals}, "
                f"offload_to_cpu={offload_to_cpu} is not supported yet"
            )
        if writeback and rank0_only:
            raise NotImplementedError("writeback=True and rank0_only=True is not supported yet")
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
                replica = not STRATEGIES[unit.sharding_strategy].shards
                stack.enter_context(
                    whole_params(
                        unit._state,
                        # A replica has no shard that would bring the old values back.
                        writeback=writeback or replica,
                        in_place=replica,
                        offload_to_cpu=offload_to_cpu,
                        show=not rank0_only or unit._is_first_of_shards(),
                        with_grads=with_grads,
                    )
                )
            yield

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:  # noqa: FBT001, FBT002
        """Gather this unit's parameters ahead of its forward. Not recursive.

        *Collective* over the shard group. *Blocks* the current stream, unless ``async_op``.

        Returns:
            None, or with ``async_op`` a handle; the next forward waits for it by itself.
        """
        return start_unshard(self._state.groups, async_op=async_op)

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Let gathers from now on wait for what the current stream was given so far."""
        streams = self._state.comm().streams
        streams.wait_stream(streams.gather, streams.current())

    def apply(self: Self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply ``fn`` to every module below, with its whole parameters; changes stay.

        *Collective* over the shard groups.

        Raises:
            ValueError: inside a summon, forward or backward.
        """
        self._check_idle()
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield as any module does; inside a summon without the wrapper's part of the names."""
        opened = self._is_open()
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean(name, (WRAPPED,)) if opened else name, param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield as any module does; inside a summon without the wrapper's part of the names."""
        opened = self._is_open()
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean(name, (WRAPPED,)) if opened else name, buffer

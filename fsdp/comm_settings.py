"""What a user may say about the collectives of a sharded module: how they run and divide.

Every method checks its arguments and writes into the settings of the module's groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from typing_extensions import deprecated

from fsdp.api import AllGather, ReduceScatter
from fsdp.comms import GroupAllocatedAllGather, GroupAllocatedReduceScatter
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.pass_settings import Unit


class CommSettings(Unit):
    """Setters about all-gathers, reduce-scatters and all-reduces."""

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
            group.settings.all_gather_comm = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Use ``comm`` for this module's reduce-scatters.

        Raises:
            ValueError: the module has several groups.
        """
        group = self._only_group("set_custom_reduce_scatter")
        if group is not None:
            group.settings.reduce_scatter_comm = comm

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
            group.settings.all_reduce_hook_stream = stream
        group.settings.all_reduce_hook = hook

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks."""
        for group in self._groups():
            group.settings.gradient_divide_factor = factor

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what ``set_gradient_divide_factor`` does."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:  # noqa: FBT001
        """Reduce by sums only, and divide apart."""
        for group in self._groups():
            group.settings.force_sum_reduction = enable

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:  # noqa: FBT001
        """Take the buffers of this module's collectives from the process group's allocator.

        Raises:
            AssertionError: a custom collective is set, which allocates for itself.
        """
        for group in self._groups():
            _check_no_custom_comm(group, "set_allocate_memory_from_process_group_for_comm")
            shard_group = group.mesh_info.shard_group
            if shard_group is None or not enable:
                group.settings.all_gather_comm = group.settings.reduce_scatter_comm = None
                continue
            group.settings.all_gather_comm = GroupAllocatedAllGather(shard_group)
            group.settings.reduce_scatter_comm = GroupAllocatedReduceScatter(
                group.settings.reduce_scatter_group or shard_group
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
            group.settings.reduce_scatter_unused_params = reduce_scatter_unused_params

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
            group.settings.max_input_buffers = max_input_buffers

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
            group.settings.reduce_scatter_group = _separate_group(shard_group) if enable else None


def _check_no_custom_comm(group: FSDPParamGroup, method: str) -> None:
    own = (GroupAllocatedAllGather, GroupAllocatedReduceScatter)
    for comm in (group.settings.all_gather_comm, group.settings.reduce_scatter_comm):
        if comm is not None and not isinstance(comm, own):
            raise AssertionError(
                f"cannot call {method}() when a collective is custom: {type(comm).__name__}"
            )


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

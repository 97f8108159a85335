"""What becomes of a group's gradients: taken off the leaves, kept or reduced, handed over.

Knows one group's gradients at a time; when it is called is decided in ``param_group.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp.engine.division import UNDIVIDED, Division, choose_division
from fsdp.engine.group_options import GroupOptions, GroupSettings
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.packing import ReducePlan
from fsdp.engine.param import FSDPParam
from fsdp.engine.readiness import check_originals
from fsdp.engine.reduction import ReduceSettings, Reduction, uniform_dtype
from fsdp.engine.shard import ALIGN
from fsdp.engine.streams import Streams
from fsdp.engine.trace import say_where


class Reducer:
    """The gradients of one group.

    Attributes:
        holds_back: whether gradients of earlier backward passes wait for a reduction.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        info: DataParallelMeshInfo,
        options: GroupOptions,
        settings: GroupSettings,
    ) -> None:
        self._params = params
        self._all = tuple(range(len(params)))
        self._info = info
        self._options = options
        self._settings = settings
        self._offloads = options.offload
        self.holds_back = False
        self._partial: torch.Tensor | None = None  # (S,), reduced over the shard group only
        self._offload_event: Any = None
        self.forget_plans()

    def forget_plans(self) -> None:
        """Make the plans again when they are next needed: parameters have changed."""
        self._plans: dict[tuple[int, ...], ReducePlan] = {}
        self._divisions: dict[Any, Division] = {}
        self._made: tuple[Any, ReduceSettings] | None = None

    def accumulate(self) -> None:
        """Keep the gradients whole, in the reduce dtype, for a later backward to reduce.

        Raises:
            NotImplementedError: one is sparse.
        """
        held = self._options.held
        self._check_dense()
        if held is not None:
            self.holds_back |= held.show_held(self._params)
            return
        for param in self._params:
            whole = param.unsharded
            if whole is None or whole.grad is None:
                continue
            self.holds_back = True
            if param.accumulated_grad is not None:
                param.accumulated_grad += whole.grad
                whole.grad = None
            elif param.reduce_dtype is not None and whole.grad.dtype != param.reduce_dtype:
                param.accumulated_grad = whole.grad.to(param.reduce_dtype)
                whole.grad = None

    def recall(self) -> None:
        """Bring the gradients that wait for a reduction back, where users could see them."""
        held = self._options.held
        if self.holds_back and held is not None:
            held.recall_held(self._params)

    def take(self) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        """Return whose gradients there are, and the whole gradients; the leaves lose them.

        *Collective* over the tensor-parallel mesh, for a gradient that is a partial sum there.

        Raises:
            NotImplementedError: one is sparse.
        """
        if not self.holds_back:
            gradients = self._take_all()
            if gradients is not None:
                return self._all, gradients
        self._check_dense()
        self.recall()
        self.holds_back = False
        return self._take_those_there()

    def _take_all(self) -> list[torch.Tensor] | None:
        """Take the gradients of a group in which every leaf has one: nearly always."""
        leaves: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for param in self._params:
            whole = param.unsharded
            gradient = None if whole is None else whole.grad
            if whole is None or gradient is None or gradient.is_sparse:
                return None
            leaves.append(whole)
            gradients.append(gradient)
        for leaf in leaves:
            leaf.grad = None
        return self._options.exposure.plain_gradients(self._params, gradients)

    def _check_dense(self) -> None:
        for param in self._params:
            whole = param.unsharded
            if whole is not None and whole.grad is not None and whole.grad.is_sparse:
                raise NotImplementedError(
                    f"FSDP does not reduce sparse gradients, such as that of '{param.name}': build "
                    "the module that has it with sparse=False."
                )

    def _take_those_there(self) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        indices: list[int] = []
        gradients: list[torch.Tensor] = []
        params: list[FSDPParam] = []
        zeros = self._settings.reduce_scatter_unused_params
        for index, param in enumerate(self._params):
            whole = param.unsharded
            if whole is None:
                continue
            gradient = whole.grad
            if gradient is not None:
                whole.grad = None
            if param.accumulated_grad is not None:
                if gradient is not None:
                    param.accumulated_grad += gradient
                gradient = param.accumulated_grad
                param.accumulated_grad = None
            if gradient is None:
                if not (zeros and whole.requires_grad):
                    continue
                gradient = torch.zeros_like(whole)
            indices.append(index)
            params.append(param)
            gradients.append(gradient)
        gradients = self._options.exposure.plain_gradients(params, gradients)
        if self._options.whole_reductions and 0 < len(indices) < len(self._params):
            return self._all, self._completed(indices, gradients)
        return tuple(indices), gradients

    def _completed(self, indices: list[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add zeros for the parameters that have no gradient."""
        found = dict(zip(indices, gradients, strict=True))
        for index, param in enumerate(self._params):
            if index not in found:
                like = gradients[0]
                found[index] = torch.zeros(param.shape, dtype=like.dtype, device=like.device)
        return [found[index] for index in self._all]

    def launch(
        self, indices: tuple[int, ...], gradients: list[torch.Tensor], streams: Streams, name: str
    ) -> Reduction:
        """Start to reduce ``gradients`` of the parameters at ``indices``; the list is emptied.

        *Collective* over the shard group. *Memory*: one copy of the gradients in the reduce dtype
        until the reduction is dropped. *Blocks*: nothing.
        """
        dtype = uniform_dtype(gradients, name)
        own = self._settings.own_reduction
        wanted = self._params[indices[0]].reduce_dtype
        reduce_dtype = dtype if wanted is None or (own is not None and own.casts) else wanted
        return Reduction(
            self._plan(indices, name),
            gradients,
            reduce_dtype,
            UNDIVIDED if own is not None else self._division(reduce_dtype),
            self._reduce_settings(self._params[indices[0]].dtype),
            streams,
        )

    def complete(self, reduction: Reduction) -> None:
        """Finish a reduction of this group, in the order in which they were started.

        Gradients are off. *Collective* over the replicate group, if there is one and it is due.
        """
        try:
            reduction.complete(self._partial)
        except RuntimeError as error:
            say_where(error, "reduction", self._params[0].name, "in backward")
            raise
        self._partial = reduction.partial
        if self._offloads and reduction.end is not None:
            self._offload_event = reduction.end[1]

    def wait_for_offload(self) -> None:
        """Let the host go on once gradients are there: the optimizer reads them on the host."""
        if self._offload_event is not None:
            self._offload_event.synchronize()
            self._offload_event = None

    def abandon(self) -> None:
        """Lose every gradient that has not been handed over."""
        self.drop_waiting()
        self._offload_event = None

    def drop_waiting(self) -> None:
        """Lose the gradients that wait for a reduction, or for that over the replicas."""
        self.recall()
        self._partial = None
        self.holds_back = False
        for param in self._params:
            param.accumulated_grad = None
            if param.unsharded is not None:
                param.unsharded.grad = None

    def _plan(self, indices: tuple[int, ...], name: str) -> ReducePlan:
        plan = self._plans.get(indices)
        if plan is None:
            params = [self._params[index] for index in indices]
            check_originals(params, name)  # some may have been frozen at first
            info = self._info
            extents = [param.extent for param in params]
            layout = self._options.lay_out(extents, info.shard_size, align=ALIGN)
            plan = self._plans[indices] = ReducePlan(params, layout, info.shard_rank)
        return plan

    def _division(self, dtype: torch.dtype) -> Division:
        settings = self._settings
        key = (dtype, settings.gradient_divide_factor, settings.force_sum_reduction)
        division = self._divisions.get(key)
        if division is None:
            division = self._divisions[key] = choose_division(
                self._info,
                dtype,
                factor=settings.gradient_divide_factor,
                force_sum=settings.force_sum_reduction,
                premultiplies=self._options.device.type != "cpu",
            )
        return division

    def _reduce_settings(self, original_dtype: torch.dtype) -> ReduceSettings:
        """Return what holds for a reduction launched now; made again only if that has changed.

        ``original_dtype`` is that of the parameters, which their gradients get.
        """
        settings = self._settings
        facts = (
            settings.reduce_scatter_group,
            settings.reduce_scatter_comm,
            settings.own_reduction,
            settings.all_reduce_hook,
            settings.all_reduce_hook_stream,
            settings.all_reduce_grads,
            original_dtype,
        )
        if self._made is None or self._made[0] != facts:
            self._made = facts, self._make_reduce_settings(original_dtype)
        return self._made[1]

    def _make_reduce_settings(self, original_dtype: torch.dtype) -> ReduceSettings:
        info, settings = self._info, self._settings
        group = settings.reduce_scatter_group or info.shard_group
        own = settings.own_reduction
        return ReduceSettings(
            replicate_group=info.replicate_group if own is None else None,
            scatter_group=group if info.shard_size > 1 else None,
            comm=settings.reduce_scatter_comm,
            own=own,
            allocate=self._allocate,
            hook=settings.all_reduce_hook,
            hook_stream=settings.all_reduce_hook_stream,
            in_place=self._scatters_in_place(),
            all_reduce=settings.all_reduce_grads,
            offload=self._offloads,
            pin_memory=self._options.pin_memory,
            direct=self._hands_over_directly(),
            exposure=self._options.exposure,
            original_dtype=original_dtype,
        )

    def _hands_over_directly(self) -> bool:
        """Whether one stream does all of it: no replicas, no hook of users, no host memory."""
        info, settings = self._info, self._settings
        # A rank that is its only replica has nothing to ask for, unless the all-reduce is put off.
        put_off = not settings.all_reduce_grads or self._partial is not None
        waits = info.replicate_size > 1 or (info.replicate_group is not None and put_off)
        return not waits and not self._offloads and settings.all_reduce_hook is None

    def _scatters_in_place(self) -> bool:
        """Whether this rank's row of the packed gradients may take the reduced shard.

        Nobody else may get hold of it, and ranks must be those of the layout.
        """
        settings = self._settings
        other_ways = (
            settings.reduce_scatter_group,
            settings.reduce_scatter_comm,
            settings.own_reduction,
            settings.all_reduce_hook,
            self._info.replicate_group,
        )
        return not self._offloads and all(way is None for way in other_ways)

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        comm = self._settings.reduce_scatter_comm
        if comm is not None:
            return comm.allocate((numel,), dtype=dtype, device=device)
        return torch.empty(numel, dtype=dtype, device=device)

"""Parameters that travel in one collective: those of a unit that no inner unit owns.

Says what one group does when it is told to gather, to give up its whole parameters, or to
reduce its gradients. When it is told so is the business of the unit (``unit.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp.api import AllGather, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
from fsdp.engine.collectives import Gathering, GatherPlan, ReducePlan, WholeBuffer, param_view
from fsdp.engine.extension import ExtendedGathering, ExtendedParams, extends
from fsdp.engine.gradient import (
    Division,
    ReduceSettings,
    Reduction,
    choose_division,
    uniform_dtype,
    watch_inputs,
)
from fsdp.engine.layout import Extent, Layout
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.optimizer_guard import refuse_in_optimizers
from fsdp.engine.param import SHARDED_STATE_CHANGES, Exposure, FSDPParam, ShardedState
from fsdp.engine.schedule import FSDPCommContext
from fsdp.engine.state import TrainingState, check_change
from fsdp.engine.trace import trace

LayOut = Callable[..., Layout]

# Elements, or bytes where dtypes differ, at whose multiples pieces start: 16 bytes in float32 and 8
# in a 16-bit dtype, so that vectorised kernels accept them without much padding.
_ALIGN = 4
_ALIGN_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """What the groups of one call have in common: the face's two axes and the user's policies."""

    device: torch.device
    exposure: Exposure
    lay_out: LayOut
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy


class FSDPParamGroup:
    """One group: its layout, its shard, its whole buffer, and what is in flight for it."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        modules: tuple[nn.Module, ...],
        info: DataParallelMeshInfo,
        post_forward: DataParallelMeshInfo | None,
        options: GroupOptions,
    ) -> None:
        self.fsdp_params = list(params)
        self.modules = modules
        self.mesh_info = info
        self.post_forward_mesh_info = post_forward
        self.device = options.device
        self.exposure = options.exposure
        self.mp_policy = options.mp_policy
        policy = options.offload_policy
        self.offload = isinstance(policy, CPUOffloadPolicy)
        self.pin_memory = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        self.comm_ctx: FSDPCommContext | None = None
        self.module_fqn = ""
        self.index_in_state = 0
        self.groups_in_state = 1
        self._lay_out = options.lay_out
        self._training_state = TrainingState.IDLE
        self._sharded_state = ShardedState.SHARDED

        # Chosen by the user
        self.reduce_grads = True
        self.all_reduce_grads = True
        self.reshard_after_backward = True
        self.reduce_scatter_unused_params = False
        self.unshard_in_backward = True
        self.unshard_async_op = False
        self.reduce_scatter_max_input_buffers = 1
        self.gradient_divide_factor: float | None = None
        self.force_sum_reduction = False
        self.all_gather_comm: AllGather | None = None
        self.reduce_scatter_comm: ReduceScatter | None = None
        self.reduce_scatter_group: dist.ProcessGroup | None = None
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.all_reduce_hook_stream: Any = None

        # Made from the parameters as they are; made again when they change
        self._flat: list[FSDPParam] = []  # those that lie in the shard
        self._extended: ExtendedParams | None = None  # those that see to themselves
        self._sort_params()
        self.shard_layout = self._shard_layout()
        self.shard = self._new_shard()
        self._ready = False
        self._forget_plans()

        # In flight
        self.post_forward_indices: list[int] = []
        self._gathering: Gathering | ExtendedGathering | None = None
        self._post_forward_shard: torch.Tensor | None = None
        self._reshard_event: Any = None
        self._partial: torch.Tensor | None = None
        self._offload_event: Any = None
        self._link()

    def __repr__(self) -> str:
        return f"FSDPParamGroup(fqn={self.module_fqn})"

    # Layouts and memory

    def _sort_params(self) -> bool:
        """Tell plain parameters from extended ones; return whether anything has changed."""
        extended = [p for p in self.fsdp_params if extends(self.exposure.local(p))]
        flat = [param for param in self.fsdp_params if param not in extended]
        if flat == self._flat:
            return False
        self._flat = flat
        self._extended = (
            ExtendedParams(extended, self.exposure, self.mesh_info, self.device, self.mp_policy)
            if extended
            else None
        )
        return True

    def _extents(self, dtypes: Sequence[torch.dtype]) -> tuple[list[Extent], torch.dtype]:
        """Return extents in one unit for all: elements, or bytes if ``dtypes`` differ."""
        if len(set(dtypes)) <= 1:
            return [param.extent for param in self._flat], (*dtypes, torch.float32)[0]
        sized = zip(self._flat, dtypes, strict=True)
        return [p.extent.in_bytes(dtype.itemsize) for p, dtype in sized], torch.uint8

    def _make_layout(self, dtypes: Sequence[torch.dtype], world: int) -> tuple[Layout, torch.dtype]:
        extents, unit = self._extents(dtypes)
        align = _ALIGN_BYTES if unit.itemsize == 1 else _ALIGN
        return self._lay_out(extents, world, align=align), unit

    def _shard_layout(self) -> Layout:
        layout, self._shard_dtype = self._make_layout(
            [param.dtype for param in self._flat], self.mesh_info.shard_size
        )
        return layout

    def _new_shard(self) -> torch.Tensor:
        """Return zeroed memory for this rank's shard (S,), where the parameters are now."""
        device = self.exposure.local((self._flat or self.fsdp_params)[0]).device
        if self.offload and device.type != "meta":
            device = torch.device("cpu")
        pin = self.pin_memory and device.type == "cpu" and torch.accelerator.is_available()
        return torch.zeros(
            self.shard_layout.shard_numel, dtype=self._shard_dtype, device=device, pin_memory=pin
        )

    def _piece_views(self, buffer: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
        views = []
        for index, param in enumerate(self._flat):
            piece = layout.piece(index, rank)
            rows = piece.stop - piece.start
            views.append(param_view(buffer, piece.offset, param, param.dtype, rows))
        return views

    def _link(self) -> None:
        """Move the local tensors of the sharded parameters into the shard."""
        views = self._piece_views(self.shard, self.shard_layout, self.mesh_info.shard_rank)
        with torch.no_grad():
            for param, view in zip(self._flat, views, strict=True):
                local = self.exposure.local(param)
                if local.device.type != "meta" and view.device.type != "meta":
                    view.copy_(local)
                self.exposure.bind(param, view)

    def relink(self) -> None:
        """Adopt what is registered on the modules now, and bring it back into the shard.

        Parameters may have been replaced, moved, cast or materialised since.
        """
        for param in self.fsdp_params:
            self.exposure.reread(param)
        regrouped = self._sort_params()
        if regrouped:
            self.shard_layout = self._shard_layout()
            self.shard = self._new_shard()
            self._forget_plans()
        views = self._piece_views(self.shard, self.shard_layout, self.mesh_info.shard_rank)
        locals_ = [self.exposure.local(param) for param in self._flat]
        if all(map(_same_memory, locals_, views)):
            return
        changed = any(
            local.dtype != view.dtype or local.device != view.device
            for local, view in zip(locals_, views, strict=True)
        )
        if changed or not self._is_whole(locals_):
            for param, local in zip(self._flat, locals_, strict=True):
                param.dtype = local.dtype
            if self._is_whole(locals_):
                self.shard_layout = self._shard_layout()
                self.shard = self._new_shard()
            self._forget_plans()
            self._ready = False
        if self._is_whole(locals_):
            with torch.inference_mode(False):
                self._link()

    def _is_whole(self, locals_: Sequence[torch.Tensor]) -> bool:
        """Whether all parameters are on one device, so that a shard can hold them."""
        return len({local.device for local in locals_}) <= 1

    def _forget_plans(self) -> None:
        for param in self.fsdp_params:
            param.unsharded = None
        self._sent = self.shard  # what the last extended gather took from it
        self._buffer: WholeBuffer | None = None
        self._plan: GatherPlan | None = None
        self._small_plan: tuple[DataParallelMeshInfo, GatherPlan, Layout] | None = None
        self._recast: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._reduce_plans: dict[tuple[int, ...], ReducePlan] = {}
        self._divisions: dict[Any, Division] = {}

    # Initialisation

    def lazy_init(self) -> None:
        """Look at the parameters as they are before the first pass; idempotent.

        Raises:
            RuntimeError: parameters on meta, or off the CPU although offloaded to it.
            AssertionError: trainable parameters of several dtypes.
        """
        if self._ready:
            return
        if self._sharded_state is ShardedState.SHARDED:
            self.relink()
        self._check_meta()
        self._check_offload()
        for param in self.fsdp_params:
            param.choose_dtypes(self.mp_policy.param_dtype, self.mp_policy.reduce_dtype)
        trainable = [param for param in self.fsdp_params if param.sharded.requires_grad]
        originals = {param.dtype for param in trainable}
        if len(originals) > 1:
            raise AssertionError(
                f"FSDP expects uniform original parameter dtype but got {originals} in "
                f"'{self.module_fqn}'"
            )
        if len({param.reduce_dtype for param in trainable}) > 1:
            raise AssertionError(f"FSDP expects uniform reduce dtype in '{self.module_fqn}'")
        self._original_dtype = trainable[0].dtype if trainable else self.fsdp_params[0].dtype
        self._ready = True

    def _check_meta(self) -> None:
        names = [
            param.fqn or param.info.param_name
            for param in self.fsdp_params
            if self.exposure.local(param).device.type == "meta"
        ]
        if names:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but "
                f"the following were still on meta device: {names}\nFor example, call "
                "module.to_empty(device) and then initialise the values."
            )

    def _check_offload(self) -> None:
        if not self.offload:
            return
        found = [
            (param.fqn, local.device)
            for param in self.fsdp_params
            if (local := self.exposure.local(param)).device.type != "cpu"
        ]
        if found:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
                f"Found following parameters on non-CPU device: {found}"
            )

    def _comm(self) -> FSDPCommContext:
        if self.comm_ctx is None:
            self.comm_ctx = FSDPCommContext(self.device)
        return self.comm_ctx

    # The gather

    def _make_plan(self) -> GatherPlan:
        """Make the whole buffer, its leaves, and the plan that fills it."""
        info = self.mesh_info
        dtypes = [param.compute_dtype for param in self._flat]
        layout, unit = self._make_layout(dtypes, info.shard_size)
        with torch.inference_mode(False), torch.no_grad():
            buffer = WholeBuffer(layout.total_numel, unit, self.device)
            for param, start in zip(self._flat, layout.unsharded_offsets, strict=True):
                whole = param_view(buffer.data, start, param, param.compute_dtype)
                # ``.data`` has a version counter of its own: refilling the buffer leaves the
                # counters alone that autograd compares with those of saved tensors.
                param.unsharded = self.exposure.leaf(param, whole.data)
                name = param.fqn or param.info.param_name
                refuse_in_optimizers(param.unsharded, name, "were whole when it was made")
            world = info.shard_size
            blocks = (
                []
                if layout.is_view
                else [(world * column.offset, column.width) for column in layout.columns]
            )
            group = info.shard_group if world > 1 else None
            plan = GatherPlan(
                layout, info.shard_rank, group, buffer, blocks=blocks, in_place=layout.is_view
            )
        if unit is torch.uint8 and layout != self.shard_layout:
            self._recast = self._recast_mixed
        self._buffer = buffer
        self._plan = plan
        return plan

    def _recast_mixed(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a shard of bytes with every piece in its compute dtype."""
        assert self._plan is not None
        layout, rank = self._plan.layout, self.mesh_info.shard_rank
        recast = torch.zeros(layout.shard_numel, dtype=torch.uint8, device=self.device)
        for index, param in enumerate(self._flat):
            piece = layout.piece(index, rank)
            rows = piece.stop - piece.start
            target = param_view(recast, piece.offset, param, param.compute_dtype, rows)
            source = self.shard_layout.piece(index, rank)
            target.copy_(param_view(shard, source.offset, param, param.dtype, rows))
        return recast

    def unshard(self, *, async_op: bool = False, phase: TrainingState | None = None) -> None:
        """Start to gather the whole parameters, unless they are whole or on their way.

        *Collective* over the shard group. *Memory*: the whole parameters, and until they are
        copied out the gathered shards. *Blocks*: nothing; ``wait_for_unshard`` does.

        Args:
            async_op: stay on the current stream.
            phase: for whose sake it is gathered; default, the group's own state.
        """
        if self._gathering is not None or self._sharded_state is ShardedState.UNSHARDED:
            return
        phase = self._training_state if phase is None else phase
        if phase is TrainingState.PRE_BACKWARD and not self.unshard_in_backward:
            return
        if not self._ready:
            self.lazy_init()
        plan = self._plan or self._make_plan()
        comm = self._comm()
        recast = self._recast
        shard = self.shard
        if self._sharded_state is ShardedState.SHARDED_POST_FORWARD:
            assert self._small_plan is not None
            assert self._post_forward_shard is not None
            plan, shard, recast = self._small_plan[1], self._post_forward_shard, None
            streams = comm.streams
            streams.wait(streams.gather, self._reshard_event)
        sided = not async_op and phase in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
        if self._extended is not None:
            self._start_extended(shard, async_op=async_op)
            return
        comm.reclaim(plan.buffer)
        with torch.no_grad():
            self._gathering = plan.start(
                shard,
                comm.streams,
                sided=sided,
                async_op=async_op,
                comm=self.all_gather_comm,
                recast=recast,
            )

    def _start_extended(self, shard: torch.Tensor, *, async_op: bool) -> None:
        assert self._extended is not None
        assert self._plan is not None
        with torch.no_grad():
            if self._recast is not None:
                shard = self._recast(shard)
            self._sent = shard.to(device=self.device, dtype=self._plan.buffer.data.dtype)
            streams = self._comm().streams
            self._gathering = self._extended.start(self._sent, streams, async_op=async_op)

    def _finish_extended(self, gathering: ExtendedGathering) -> None:
        plan = self._plan
        assert self._extended is not None
        assert plan is not None
        with torch.inference_mode(False), torch.no_grad():
            self._extended.finish(gathering, self._sent, plan.copy_out)
        self._sent = self.shard

    def wait_for_unshard(self) -> None:
        """Wait for the gather, copy it out, and register the whole parameters.

        *Blocks* the current stream until the gather is over (the host, without streams).
        """
        gathering = self._gathering
        if gathering is None:
            return
        comm = self._comm()
        forward = self._training_state is TrainingState.FORWARD
        if forward:
            comm.before_copy_out()
        if isinstance(gathering, ExtendedGathering):
            self._finish_extended(gathering)
        else:
            with torch.no_grad():
                gathering.plan.finish(gathering)
            comm.after_copy_out(gathering, overlap=forward and gathering.sided)
        self._gathering = None
        self._post_forward_shard = None
        self._enter_sharded(ShardedState.UNSHARDED)
        if self._training_state is not TrainingState.PRE_BACKWARD:
            self._follow_freezing()
        for param in self.fsdp_params:
            param.install(param.unsharded)

    def _follow_freezing(self) -> None:
        """Copy ``requires_grad`` to the leaves: users freeze what is registered, the shards."""
        for param in self.fsdp_params:
            whole, wanted = param.unsharded, param.sharded.requires_grad
            assert whole is not None
            if whole.requires_grad != wanted:
                whole.requires_grad_(wanted)

    def drop_pending(self) -> None:
        """Wait for a gather that nobody asked to see, and forget it."""
        gathering = self._gathering
        if gathering is None:
            return
        if gathering.done is not None:
            gathering.done.wait()
        self._gathering = None
        if isinstance(gathering, ExtendedGathering):
            return
        if gathering.plan.in_place and self._sharded_state is not ShardedState.UNSHARDED:
            self._comm().free(gathering.plan.buffer, gathered_in_place=True)

    # Giving up the whole parameters

    def reshard(self) -> None:
        """Free the whole parameters, as far as the policy of the present state says."""
        if self._training_state is TrainingState.FORWARD:
            info = self.post_forward_mesh_info
            if info is None:
                return
            if info is not self.mesh_info:
                self._to_post_forward(info)
                return
        self.to_sharded()

    def to_sharded(self) -> None:
        """Register the sharded parameters and free the whole ones."""
        if self._sharded_state is ShardedState.SHARDED:
            return
        was = self._sharded_state
        self._enter_sharded(ShardedState.SHARDED)
        for param in self.fsdp_params:
            param.install(param.sharded)
        self._post_forward_shard = None
        if was is ShardedState.UNSHARDED:
            self._free_whole()

    def _free_whole(self) -> None:
        assert self._plan is not None
        if self._extended is not None:
            self._extended.free()
            self._plan.buffer.free()
            return
        in_place = self._plan.in_place and self._plan.group is not None
        self._comm().free(self._plan.buffer, gathered_in_place=in_place)

    def _to_post_forward(self, info: DataParallelMeshInfo) -> None:
        """Keep this rank's part over the smaller mesh ``info`` and free the rest."""
        if self._sharded_state is not ShardedState.UNSHARDED:
            return
        if self._extended is not None:
            raise NotImplementedError(
                f"Resharding '{self.module_fqn}' to a smaller mesh is not supported for "
                "parameters with all-gather extensions yet"
            )
        plan = self._smaller_plan(info)
        layout = plan.layout
        assert self._plan is not None
        with torch.no_grad():
            kept = torch.zeros(
                layout.shard_numel, dtype=plan.buffer.data.dtype, device=self.device
            )  # (S of the smaller mesh,)
            for index, param in enumerate(self.fsdp_params):
                piece = layout.piece(index, info.shard_rank)
                rows = piece.stop - piece.start
                start = self._plan.layout.unsharded_offsets[index]
                whole = param_view(plan.buffer.data, start, param, param.compute_dtype)
                part = param_view(kept, piece.offset, param, param.compute_dtype, rows)
                part.copy_(whole.narrow(param.dim, piece.start, rows))
                param.post_forward = self.exposure.post_forward(param, part, info)
        self._post_forward_shard = kept
        self._reshard_event = self._comm().streams.record()
        self._enter_sharded(ShardedState.SHARDED_POST_FORWARD)
        for param in self.fsdp_params:
            assert param.post_forward is not None
            param.install(param.post_forward)
            param.post_forward = None
        self._free_whole()

    def _smaller_plan(self, info: DataParallelMeshInfo) -> GatherPlan:
        if self._small_plan is not None and self._small_plan[0] is info:
            return self._small_plan[1]
        assert self._plan is not None
        dtypes = [param.compute_dtype for param in self.fsdp_params]
        layout, _ = self._make_layout(dtypes, info.shard_size)
        starts = self._plan.layout.unsharded_offsets
        blocks = []
        for column in layout.columns:
            # A gap has no place among the whole parameters; its units go where padding is.
            start = starts[column.param] if column.param is not None else None
            blocks.append((start, column.width))
        plan = GatherPlan(
            layout,
            info.shard_rank,
            info.shard_group,
            self._plan.buffer,
            blocks=blocks,
            in_place=False,
        )
        self._small_plan = (info, plan, layout)
        return plan

    # The passes

    @property
    def training_state(self) -> TrainingState:
        """Where this group is in an iteration."""
        return self._training_state

    @property
    def sharded_state(self) -> ShardedState:
        """Which representation is registered."""
        return self._sharded_state

    def enter(self, state: TrainingState) -> None:
        """Change the training state; the table must allow it."""
        check_change(self.module_fqn, self._training_state, state)
        self._training_state = state

    def _enter_sharded(self, state: ShardedState) -> None:
        change = (self._sharded_state, state)
        assert change in SHARDED_STATE_CHANGES, f"{self}: illegal change {change}"
        self._sharded_state = state

    def watch(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return stand-ins for a unit's inputs that announce the end of its backward."""
        return watch_inputs(inputs, self.post_backward)

    def post_backward(self) -> None:
        """Take the gradients that are there, reshard, and start to reduce. Idempotent.

        *Collective* over the shard group, if there are gradients and they are to be reduced.
        """
        with trace("post_backward", self.module_fqn):
            self._post_backward()

    def _post_backward(self) -> None:
        partial_forward = len(self.modules) > 1 and self._training_state is TrainingState.FORWARD
        self.enter(TrainingState.POST_BACKWARD)
        if not self.reduce_grads:
            self._accumulate()
            return
        params, gradients = self._take_gradients()
        if self.reshard_after_backward:
            self.to_sharded()
        comm = self._comm()
        if self.index_in_state == self.groups_in_state - 1:
            comm.make_room()
        if not gradients:
            return
        dtype = uniform_dtype(gradients, self.module_fqn)
        reduce_dtype = self.fsdp_params[params[0]].reduce_dtype or dtype
        with torch.no_grad():
            reduction = Reduction(
                self._reduce_plan(tuple(params)),
                gradients,
                reduce_dtype,
                self._division(reduce_dtype),
                self._settings(),
                comm.streams,
            )
            comm.add_reduction(self, reduction)
        if partial_forward:
            # No end of backward may follow, and the kernels of the next call of the module
            # would take over memory that this hand-over still reads.
            comm.finish_reductions()
            assert reduction.end is not None
            comm.streams.wait(comm.streams.current(), reduction.end[1])

    def complete(self, reduction: Reduction) -> None:
        """Finish a reduction of this group, in the order in which they were started."""
        with torch.no_grad():
            reduction.complete(self._partial)
        self._partial = reduction.partial
        if self.offload and reduction.end is not None:
            self._offload_event = reduction.end[1]

    def _accumulate(self) -> None:
        """Keep the gradients whole, in the reduce dtype, for a later backward to reduce."""
        if self.reshard_after_backward:
            self.to_sharded()
        for param in self.fsdp_params:
            whole = param.unsharded
            if whole is None or whole.grad is None:
                continue
            if param.accumulated_grad is not None:
                param.accumulated_grad += whole.grad
                whole.grad = None
            elif param.reduce_dtype is not None and whole.grad.dtype != param.reduce_dtype:
                param.accumulated_grad = whole.grad.to(param.reduce_dtype)
                whole.grad = None

    def _take_gradients(self) -> tuple[list[int], list[torch.Tensor]]:
        """Return the whole gradients as plain memory and whose they are; the leaves lose them."""
        indices: list[int] = []
        gradients: list[torch.Tensor] = []
        plain = self.exposure.plain_gradient
        for index, param in enumerate(self.fsdp_params):
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
                if not (self.reduce_scatter_unused_params and whole.requires_grad):
                    continue
                gradient = torch.zeros_like(whole)
            indices.append(index)
            gradients.append(plain(param, gradient))
        return indices, gradients

    def _reduce_plan(self, indices: tuple[int, ...]) -> ReducePlan:
        plan = self._reduce_plans.get(indices)
        if plan is None:
            params = [self.fsdp_params[index] for index in indices]
            info = self.mesh_info
            layout = self._lay_out([p.extent for p in params], info.shard_size, align=_ALIGN)
            plan = self._reduce_plans[indices] = ReducePlan(params, layout, info.shard_rank)
        return plan

    def _division(self, dtype: torch.dtype) -> Division:
        key = (dtype, self.gradient_divide_factor, self.force_sum_reduction)
        division = self._divisions.get(key)
        if division is None:
            division = self._divisions[key] = choose_division(
                self.mesh_info,
                dtype,
                factor=self.gradient_divide_factor,
                force_sum=self.force_sum_reduction,
                premultiplies=self.device.type != "cpu",
            )
        return division

    def _settings(self) -> ReduceSettings:
        info = self.mesh_info
        group = self.reduce_scatter_group or info.shard_group
        return ReduceSettings(
            info=info,
            scatter_group=group if info.shard_size > 1 else None,
            comm=self.reduce_scatter_comm,
            allocate=self._allocate_for_reduce,
            hook=self.all_reduce_hook,
            hook_stream=self.all_reduce_hook_stream,
            all_reduce=self.all_reduce_grads,
            offload=self.offload,
            pin_memory=self.pin_memory and self.device.type != "cpu",
            exposure=self.exposure,
            original_dtype=self._original_dtype,
        )

    def _allocate_for_reduce(
        self, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self.reduce_scatter_comm is not None:
            return self.reduce_scatter_comm.allocate((numel,), dtype=dtype, device=device)
        return torch.empty(numel, dtype=dtype, device=device)

    def finalize_backward(self) -> None:
        """Leave nothing in flight behind the last backward of an iteration."""
        if self._offload_event is not None:
            # The optimizer reads the gradients on the host.
            self._offload_event.synchronize()
            self._offload_event = None
        self.drop_pending()
        self.post_forward_indices.clear()

    def abandon_forward(self) -> None:
        """Return to the idle, sharded state after a forward that raised."""
        self._training_state = TrainingState.IDLE
        self.to_sharded()

    def abandon(self) -> None:
        """Return to the idle, sharded state; whatever was accumulated or in flight is lost."""
        self.drop_pending()
        self._partial = None
        self._offload_event = None
        self.post_forward_indices.clear()
        for param in self.fsdp_params:
            param.accumulated_grad = None
            if param.unsharded is not None:
                param.unsharded.grad = None
        self._training_state = TrainingState.IDLE
        self.to_sharded()


def _same_memory(local: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether ``local`` is the piece of the shard that ``view`` shows."""
    return (
        local.device == view.device
        and local.dtype == view.dtype
        and local.shape == view.shape
        and local.device.type != "meta"
        and local.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        and local.storage_offset() == view.storage_offset()
    )

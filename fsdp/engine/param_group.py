"""Parameters that travel in one collective: those of a unit that no inner unit owns.

Says what one group does when it is told to gather, to give up its whole parameters, or to
reduce its gradients. When it is told so is the business of the unit (``forward.py``,
``backward.py``); memory is in ``shard.py`` and ``whole.py``, gradients in ``reducer.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fsdp.api import MixedPrecisionPolicy
from fsdp.engine.collectives import Gathering
from fsdp.engine.extension import ExtendedGathering
from fsdp.engine.grad_mode import without_gradients
from fsdp.engine.group_options import GroupOptions, GroupSettings, Kept
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param import SHARDED_STATE_CHANGES, FSDPParam, ShardedState
from fsdp.engine.readiness import check_ready
from fsdp.engine.reducer import Reducer
from fsdp.engine.schedule import FSDPCommContext
from fsdp.engine.shard import Shard
from fsdp.engine.state import TRAINING_STATE_CHANGES, TrainingState, check_change
from fsdp.engine.trace import say_where, trace
from fsdp.engine.watch import Again, watch_inputs
from fsdp.engine.whole import WholeParams

_WHOLE_TRAINS = attrgetter("unsharded.requires_grad")
_DOING = {
    TrainingState.IDLE: "outside of forward and backward",
    TrainingState.FORWARD: "in forward",
    TrainingState.PRE_BACKWARD: "gathering for backward",
    TrainingState.POST_BACKWARD: "in backward",
    TrainingState.SUMMON_FULL_PARAMS: "summoning whole parameters",
}
_SIDED = frozenset({TrainingState.FORWARD, TrainingState.PRE_BACKWARD})


class FSDPParamGroup:
    """One group: its shard, its whole parameters, its gradients, and where it is in a pass."""

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
        self.options = options
        self.settings = GroupSettings()
        self.module_fqn = ""
        self.index_in_state = 0
        self.groups_in_state = 1
        self.comm_ctx: FSDPCommContext | None = None
        self.post_forward_indices: list[int] = []  # where forward left it in the order
        self.then_prefetch: Callable[[], None] | None = None  # due once this backward is through
        self.shard = Shard(self.fsdp_params, info, options)
        self.reducer = Reducer(self.fsdp_params, info, options, self.settings)
        self._exposure = options.exposure
        self._training_state = TrainingState.IDLE
        self._sharded_state = ShardedState.SHARDED
        self._ready = False
        self._outdated = False  # whether an optimizer stepped while parameters were in use
        self._whole: WholeParams | None = None
        self._gathering: Gathering | ExtendedGathering | None = None
        self._kept: torch.Tensor | None = None  # what remains after forward on a smaller mesh
        self._kept_event: Any = None

    def __repr__(self) -> str:
        return f"FSDPParamGroup(fqn={self.module_fqn})"

    # States

    @property
    def training_state(self) -> TrainingState:
        """Where this group is in an iteration."""
        return self._training_state

    @property
    def sharded_state(self) -> ShardedState:
        """Which representation is registered."""
        return self._sharded_state

    @property
    def pending(self) -> bool:
        """Whether a gather is in flight."""
        return self._gathering is not None

    def enter(self, state: TrainingState) -> None:
        """Change the training state; the table must allow it."""
        if (self._training_state, state) not in TRAINING_STATE_CHANGES:
            check_change(self.module_fqn, self._training_state, state)
        self._training_state = state

    def _enter_sharded(self, state: ShardedState) -> None:
        change = (self._sharded_state, state)
        assert change in SHARDED_STATE_CHANGES, f"{self}: illegal change {change}"
        self._sharded_state = state

    # Initialisation

    def lazy_init(self) -> None:
        """Look at the parameters as they are before the first pass; idempotent.

        Raises:
            RuntimeError: parameters on meta, or off the CPU although offloaded to it.
            AssertionError: trainable parameters of several dtypes.
        """
        if self._ready:
            return
        self.relink()
        check_ready(self.fsdp_params, self.options, self.module_fqn)
        self._ready = True

    def relink(self) -> None:
        """Adopt what is registered on the modules now; see ``Shard.relink``.

        A gather in flight is dropped: it shows the values of before.
        """
        self.drop_pending()
        if self.shard.relink():
            if self._sharded_state is ShardedState.KEPT:
                self.to_sharded()
            self._forget_plans()

    def follow(self, params: Sequence[FSDPParam] | None = None) -> None:
        """Adopt what is registered on the modules now if ``params`` are not what was there.

        Default: any of the group. See ``relink``.
        """
        if self._exposure.changed(self.fsdp_params if params is None else params):
            self.relink()

    def use_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Compute and reduce in the dtypes of ``policy`` from the next gather on."""
        if policy == self.options.mp_policy:
            return
        self.drop_pending()
        self.to_sharded()
        self.options = dataclasses.replace(self.options, mp_policy=policy)
        self._forget_plans()

    def _forget_plans(self) -> None:
        for param in self.fsdp_params:
            param.unsharded = None
        self._whole = None
        self.reducer.forget_plans()
        self._ready = False

    def comm(self) -> FSDPCommContext:
        """Return the communication context: the root's, or before there is one its own."""
        if self.comm_ctx is None:
            self.comm_ctx = FSDPCommContext(self.options.device)
        return self.comm_ctx

    # Gathering

    def unshard(self, *, async_op: bool = False, phase: TrainingState | None = None) -> None:
        """Start to gather the whole parameters, unless they are whole or on their way.

        Called without gradients, as ``wait_for_unshard`` is. *Collective* over the shard group.
        *Memory*: the whole parameters, and until they are copied out the gathered shards.
        *Blocks*: nothing; ``wait_for_unshard`` does.

        Args:
            async_op: stay on the current stream.
            phase: for whose sake it is gathered; default, the group's own state.
        """
        if self._gathering is not None:
            backward = self._training_state is TrainingState.PRE_BACKWARD
            # A part that was kept after forward is gathered, whatever has become of the shard.
            if backward or self._kept is not None or not self._exposure.changed(self.fsdp_params):
                return
            self.relink()  # which drops it
        if phase is None:
            phase = self._training_state
        if self._outdated and phase is TrainingState.FORWARD:
            self.to_sharded()
        if self._sharded_state is ShardedState.UNSHARDED:
            if self._training_state is TrainingState.PRE_BACKWARD:
                self._exposure.check_whole(self.fsdp_params)
            return
        if self._kept is None and self._exposure.changed(self.fsdp_params):
            self.relink()
        if self._sharded_state is ShardedState.KEPT:
            return
        if phase is TrainingState.PRE_BACKWARD and not self.settings.unshard_in_backward:
            return
        if not self._ready:
            self.lazy_init()
        whole = self._whole
        if whole is None:
            whole = self._whole = WholeParams(self.shard, self.mesh_info, self.options)
        comm = self.comm_ctx or self.comm()
        if self._kept is not None:
            comm.streams.wait(comm.streams.gather, self._kept_event)
        self._outdated = False
        self._gathering = whole.gather(
            comm,
            sided=not async_op and phase in _SIDED,
            async_op=async_op,
            custom=self.settings.all_gather_comm,
            kept=self._kept,
        )

    def wait_for_unshard(self) -> None:
        """Wait for the gather, copy it out, and register the whole parameters.

        *Blocks* the current stream until the gather is over (the host, without streams).
        """
        gathering = self._gathering
        if gathering is None:
            if self._sharded_state is ShardedState.KEPT:
                self._show_whole()
            return
        assert self._whole is not None
        comm = self.comm_ctx or self.comm()
        forward = self._training_state is TrainingState.FORWARD
        if forward:
            comm.before_copy_out()
        try:
            self._whole.finish(gathering, comm, forward=forward)
        except RuntimeError as error:
            say_where(error, "all-gather", self.fsdp_params[0].name, _DOING[self._training_state])
            raise
        self._gathering = None
        self._kept = None
        self._show_whole()

    def _show_whole(self) -> None:
        self._enter_sharded(ShardedState.UNSHARDED)
        if self._training_state is not TrainingState.PRE_BACKWARD:
            self._follow_freezing()
        self._exposure.show_whole(self.fsdp_params)

    def _follow_freezing(self) -> None:
        """Copy ``requires_grad`` to the leaves: users freeze what is registered, the shards."""
        found = self._exposure.requires_grad(self.fsdp_params)
        if found == list(map(_WHOLE_TRAINS, self.fsdp_params)):
            return  # nearly always, and a loop over them costs more than the comparison
        for param, wanted in zip(self.fsdp_params, found, strict=True):
            whole = param.unsharded
            assert whole is not None
            if whole.requires_grad != wanted:
                whole.requires_grad = wanted  # functions of torch.func refuse the method

    def drop_pending(self) -> None:
        """Wait for a gather that nobody asked to see, and forget it."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            assert self._whole is not None
            in_use = self._sharded_state is ShardedState.UNSHARDED
            self._whole.drop(gathering, self.comm(), in_use=in_use)

    # Giving up the whole parameters

    def reshard(self) -> None:
        """Free the whole parameters, as far as the policy of the present state says."""
        if self._training_state is TrainingState.FORWARD:
            info = self.post_forward_mesh_info
            if info is None:
                if self.options.kept is Kept.HIDDEN:
                    self.hide()
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
        self._exposure.show_sharded(self.fsdp_params)
        self._kept = None
        if was in (ShardedState.UNSHARDED, ShardedState.KEPT):
            assert self._whole is not None
            self._whole.free(self.comm_ctx or self.comm())

    def hide(self) -> None:
        """Register the sharded parameters and keep the whole ones in memory."""
        if self._sharded_state is ShardedState.UNSHARDED:
            self._enter_sharded(ShardedState.KEPT)
            self._exposure.show_sharded(self.fsdp_params)

    def end_of_evaluation(self) -> None:
        """Give up what a forward without gradients has left whole, unless it is to stay.

        It cannot stay where gradients are, for nothing would give it up before they are used: who
        clips or zeroes what is registered would not find them.
        """
        if self._sharded_state is ShardedState.SHARDED:
            return  # most units, after every evaluation
        if self.options.kept is not Kept.SHOWN or self._exposure.accumulates(self.fsdp_params):
            self.to_sharded()

    def after_step(self) -> None:
        """Give up what was gathered before an optimizer's step, be it whole, kept or on its way.

        No backward may have come since a forward left it: that of another loss, of a metric.
        """
        if self._training_state is TrainingState.IDLE:
            self.drop_pending()
            self.to_sharded()
        else:
            # In use, or an interrupt has left it so; in any case until the next forward only.
            self._outdated = True

    def _to_post_forward(self, info: DataParallelMeshInfo) -> None:
        """Keep this rank's part over the smaller mesh ``info`` and free the rest."""
        if self._sharded_state is not ShardedState.UNSHARDED:
            return
        assert self._whole is not None
        kept, parts = self._whole.keep_part(info, self.module_fqn)
        self._exposure.show_post_forward(self.fsdp_params, parts, info)
        self._enter_sharded(ShardedState.SHARDED_POST_FORWARD)
        self._kept, self._kept_event = kept, self.comm().streams.record()
        self._whole.free(self.comm())

    # Backward

    def watch(self, inputs: Sequence[torch.Tensor], again: Again) -> list[torch.Tensor]:
        """Return stand-ins for a unit's inputs that announce the end of its backward.

        ``again`` is called before that backward is differentiated itself.
        """
        return watch_inputs(inputs, self.post_backward, again)

    def post_backward(self, *, final: bool = False) -> None:
        """Take the gradients that are there, reshard, and start to reduce. Idempotent.

        ``final``: no later pass of this backward comes to the group.

        *Collective* over the shard group, if there are gradients and they are to be reduced.
        """
        with trace("post_backward", self.module_fqn):
            partial = len(self.modules) > 1 and self._training_state is TrainingState.FORWARD
            self.enter(TrainingState.POST_BACKWARD)
            if self.settings.reduce_grads and (final or not self._more_to_come()):
                self._reduce(alone=partial)
            else:
                if self.settings.reshard_after_backward:
                    self.to_sharded()
                if not self.settings.reduce_grads:
                    self.reducer.accumulate()
                    if self.options.kept is not Kept.SHOWN:
                        self.hide()
        prefetch, self.then_prefetch = self.then_prefetch, None
        if prefetch is not None and not final:
            with without_gradients():
                prefetch()

    def _more_to_come(self) -> bool:
        """Whether a reduction now would send older gradients alone, and another one the new ones.

        A leaf gets its gradient when the last of its uses is through. If the unit ran several
        times, its backward passes before the last find what earlier iterations left.
        """
        return self.reducer.holds_back and bool(self.post_forward_indices)

    def close_backward(self) -> None:
        """Do what backward did not come to, at its end; every reduction is started after it."""
        if self._training_state is not TrainingState.POST_BACKWARD or (
            self.settings.reduce_grads and self.reducer.holds_back
        ):
            self.post_backward(final=True)
        self.enter(TrainingState.IDLE)

    def _reduce(self, *, alone: bool) -> None:
        indices, gradients = self.reducer.take()
        if self.settings.reshard_after_backward:
            self.to_sharded()
        comm = self.comm_ctx or self.comm()
        if self.index_in_state == self.groups_in_state - 1:
            comm.make_room()
        if not gradients:
            return
        with without_gradients():
            reduction = self.reducer.launch(indices, gradients, comm.streams, self.module_fqn)
            comm.add_reduction(self.reducer, reduction)
        if alone:
            # No end of backward may follow, and the kernels of the next call of the module
            # would take over memory that this hand-over still reads.
            comm.finish_reductions()
            assert reduction.end is not None
            comm.streams.wait(comm.streams.current(), reduction.end[1])

    def finalize_backward(self) -> None:
        """Leave nothing in flight behind the last backward of an iteration."""
        self.then_prefetch = None
        self.reducer.wait_for_offload()
        if self._gathering is not None:
            self.drop_pending()
        self.post_forward_indices.clear()

    # Recovery

    def abandon_forward(self) -> None:
        """Return to the idle, sharded state after a forward that raised."""
        self._training_state = TrainingState.IDLE
        self.to_sharded()

    def abandon(self) -> None:
        """Return to the idle, sharded state; whatever was accumulated or in flight is lost."""
        self.then_prefetch = None
        self.drop_pending()
        self.reducer.abandon()
        self.post_forward_indices.clear()
        self.abandon_forward()

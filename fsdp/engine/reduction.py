"""One reduction in flight: whole gradients packed, scattered, all-reduced, divided, handed over.

Knows plain memory and streams; whose gradients they are and when is decided in ``reducer.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp.api import ReduceScatter
from fsdp.engine.division import Division
from fsdp.engine.exposure import AnyExposure
from fsdp.engine.group_options import OwnReduction
from fsdp.engine.packing import Packed, ReducePlan
from fsdp.engine.streams import Done, Streams
from fsdp.engine.torch_private import reduce_scatter


@dataclass(eq=False, kw_only=True, slots=True)
class ReduceSettings:
    """What a group's owner has chosen for its reductions; shared by all of its reductions."""

    replicate_group: dist.ProcessGroup | None
    scatter_group: dist.ProcessGroup | None
    comm: ReduceScatter | None
    own: OwnReduction | None
    allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor]
    hook: Callable[[torch.Tensor], None] | None
    hook_stream: Any
    in_place: bool  # whether nobody but the cast to the original dtype reads what is scattered
    all_reduce: bool
    offload: bool
    pin_memory: bool
    direct: bool  # whether what is scattered is handed over by the same stream, with no way between
    exposure: AnyExposure
    original_dtype: torch.dtype


class Reduction:
    """One group's reduction in flight.

    ``__init__`` packs and launches; ``complete`` does the rest once, on the stream of the
    reduction, or after the host has waited for it where there are no streams. Where nothing can
    come between it is done already, as ``end`` tells.
    """

    def __init__(
        self,
        plan: ReducePlan,
        gradients: list[torch.Tensor],
        dtype: torch.dtype,
        division: Division,
        settings: ReduceSettings,
        streams: Streams,
    ) -> None:
        """Launch the reduce-scatter of whole ``gradients``; the list is emptied.

        *Collective* over the shard group. *Memory*: one copy of the gradients in ``dtype``,
        until this object is dropped, and one shard. *Blocks*: nothing.
        """
        self.plan = plan
        self._division = division
        self._settings = settings
        self._streams = streams
        self.partial: torch.Tensor | None = None  # (S,), reduced over the shard group only
        self.end: tuple[Any, Any] | None = None  # (stream, event) after the hand-over
        self._lent: torch.Tensor | None = None
        self._earlier: torch.Tensor | None = None
        memory = self._memory(dtype, gradients[0].device)
        self._borrowed: Packed | None = memory
        plan.pack(gradients, memory)
        gradients.clear()
        self._packed = memory.data  # (W * S,)
        streams.wait_stream(streams.reduce, streams.current())
        late = streams.blocks_host
        with streams.on(streams.reduce):
            if division.before != 1:
                self._packed.div_(division.before)
            self._output, work = self._scatter(late=late)
            complete = settings.direct and not late
            if complete:
                self._divide_and_hand_over()  # entering a stream again would cost as much
        if complete:
            self._close(streams.reduce)
        else:
            self.scattered = Done(streams, work, None)  # with streams, ``complete`` has the event

    def _memory(self, dtype: torch.dtype, device: torch.device) -> Packed:
        """Return where to pack: the plan's memory, unless others may keep or replace it."""
        plan, settings = self.plan, self._settings
        # Nothing scattered: what is packed is handed over, unless a cast makes other memory of it.
        stays = settings.scatter_group is not None or (
            settings.direct and dtype != settings.original_dtype
        )
        if stays and settings.comm is None and settings.own is None:
            return plan.borrow(dtype, device)
        numel = plan.layout.total_numel
        return plan.around(settings.allocate(numel, dtype, device))

    def _reduce_as_told(self, own: OwnReduction) -> torch.Tensor:
        """Let the user's function reduce; it may put other memory behind what it is given."""
        # The first memory belongs to the computing stream, which must not have it back yet.
        self._lent = self._packed.detach()
        if self._settings.scatter_group is None:
            own.run(self._packed, None)
            return self._packed
        output = self._allocate_shard()
        own.run(self._packed, output)
        return output

    def _allocate_shard(self) -> torch.Tensor:
        packed, settings, lent = self._packed, self._settings, self._borrowed
        in_place = settings.in_place and not self._streams.blocks_host
        if in_place and lent is not None and packed.dtype != settings.original_dtype:
            return lent.own
        numel = self.plan.layout.shard_numel
        return settings.allocate(numel, packed.dtype, packed.device)  # (S,)

    def _scatter(self, *, late: bool) -> tuple[torch.Tensor, dist.Work | None]:
        settings, group = self._settings, self._settings.scatter_group
        if settings.own is not None:
            return self._reduce_as_told(settings.own), None
        if group is None:
            return self._packed, None
        output = self._allocate_shard()
        op = self._division.scatter_op
        if settings.comm is None:
            work = reduce_scatter(output, self._packed, group, op, async_op=late)
        else:
            work = settings.comm(
                output_tensor=output,
                input_tensor=self._packed,
                group=group,
                op=op,
                async_op=late,
            )
        return output, work if late else None

    @property
    def outlives_scatter(self) -> bool:
        """Whether another stream than the reducing one may still read the reduced shard."""
        return self.end is not None and self.end[0] is not self._streams.reduce

    def drop_packed(self) -> None:
        """Let go of the packed gradients; the reduce-scatter must be over. Idempotent."""
        if self._borrowed is not None:
            self.plan.give_back(self._borrowed)
            self._borrowed = None
        self._packed = self._output
        self._lent = None

    def complete(self, earlier: torch.Tensor | None) -> None:
        """All-reduce over replicas if due, divide, cast, hand over. Call once, if ``end`` is None.

        ``earlier`` is the group's ``partial`` of earlier reductions without an all-reduce.
        *Collective* over the replicate group, if there is one and it is due.
        """
        settings, streams = self._settings, self._streams
        if streams.blocks_host:
            self.scattered.wait()
        stream = streams.reduce
        output = self._output
        self._earlier = earlier  # as long as a stream may read it that did not allocate it
        if earlier is not None:
            with streams.on(stream):
                output += earlier
        group = settings.replicate_group
        if group is not None and not settings.all_reduce:
            self.partial = output
            self._close(stream)
            return
        if group is not None or settings.hook is not None:
            stream = streams.all_reduce
            if group is None and settings.hook_stream is not None:
                stream = settings.hook_stream
            scattered = streams.record(streams.reduce)
            streams.wait(stream, scattered)
            self.scattered = Done(streams, None, scattered)
        elif settings.offload:
            self.scattered = Done(streams, None, streams.record(stream))
        with streams.on(stream):
            if group is not None and group.size() > 1:
                dist.all_reduce(output, op=self._division.all_reduce_op, group=group)
            if settings.hook is not None:
                settings.hook(output)
            self._divide_and_hand_over()
        self._close(stream)

    def _close(self, stream: Any) -> None:
        """Remember where the last work on the gradients ends, which was given to ``stream``."""
        ends = self.plan.ends
        event = ends[stream] = self._streams.record(stream, ends.get(stream))
        self.end = (stream, event)
        handed_over = self._output is self._packed  # nothing was scattered
        if stream is self._streams.reduce and (handed_over or not self._settings.offload):
            # What was handed over may go back to the stream that it belongs to only now. Else the
            # packed gradients could go earlier, but are not asked for before the next reduction:
            # a second event would only cost, unless a copy to the host lies between.
            self.scattered = Done(self._streams, None, event)

    def _divide_and_hand_over(self) -> None:
        settings, params, output = self._settings, self.plan.params, self._output
        if self._division.after != 1:
            output.div_(self._division.after)
        shard = output.to(settings.original_dtype)
        if settings.offload:
            shard = self._offloaded(shard)
        settings.exposure.hand_over(params, shard, functools.partial(self.plan.pieces, shard))

    def _offloaded(self, shard: torch.Tensor) -> torch.Tensor:
        settings = self._settings
        # An addition or a user's hook reads the copy at once on the host; else it may overlap.
        late = settings.pin_memory and not settings.exposure.accumulates(self.plan.params)
        on_host = torch.empty(
            shard.shape, dtype=shard.dtype, device="cpu", pin_memory=settings.pin_memory
        )
        return on_host.copy_(shard, non_blocking=late)


def uniform_dtype(gradients: Sequence[torch.Tensor], group: str) -> torch.dtype:
    """Return the dtype of all ``gradients``.

    Raises:
        AssertionError: they have several.
    """
    dtype = gradients[0].dtype
    for gradient in gradients:
        if gradient.dtype != dtype:
            found = sorted({str(gradient.dtype) for gradient in gradients})
            raise AssertionError(
                "FSDP reduce-scatter expects uniform gradient dtype but got "
                f"{', '.join(found)} in group '{group}'. Put parameters of other dtypes in "
                "a group of their own."
            )
    return dtype

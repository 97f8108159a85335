"""What one root has in flight, and in which order its groups ran. No parameters, no modules.

Holds the streams, the buffers that a side stream may still read, the reductions that are not
over, and the order of forward that backward walks back.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from fsdp.engine.buffer import Buffer
from fsdp.engine.collectives import Gathering, GatherPlan
from fsdp.engine.grad_mode import without_gradients
from fsdp.engine.streams import Streams, make_streams

if TYPE_CHECKING:
    from fsdp.engine.param_group import FSDPParamGroup
    from fsdp.engine.reducer import Reducer
    from fsdp.engine.reduction import Reduction

# Whole buffers that are views of a gather may be freed only after the kernels that read them;
# two of them in flight let the next gather run beside the present computation.
_MAX_RETIRED = 2


class FSDPCommContext:
    """Streams, buffers in flight and order, shared by all groups of one root."""

    def __init__(self, device: torch.device) -> None:
        self.streams: Streams = make_streams(device)
        self.post_forward_order: list[FSDPParamGroup] = []
        self.max_input_buffers = 1
        self._held: tuple[Gathering, Any] | None = None
        self._copied: Any = None  # behind the last copy-out of what was held; moved every time
        self._retired: deque[Buffer] = deque()
        self._reductions: deque[tuple[Reducer, Reduction]] = deque()
        self._ends: dict[Any, Any] = {}
        self._kept_outputs: list[Reduction] = []

    # Gathers

    def wait_for_optimizer(self, event: Any) -> None:
        """Keep gathers behind the last optimizer step: ``event``, or all work given so far."""
        streams = self.streams
        if event is None:
            event = streams.record()
        streams.wait(streams.gather, event)

    def before_copy_out(self) -> None:
        """Let the buffer that the previous copy-out read be used again."""
        if self._held is not None:
            gathering, event = self._held
            self._held = None
            self._after(event)
            gathering.release()

    def after_copy_out(self, gathering: Gathering, *, overlap: bool) -> None:
        """Drop the gathered shards; with ``overlap``, only at the next copy-out.

        Until then the next gather writes to other memory and need not wait for this copy-out.
        """
        if gathering.plan.in_place or gathering.done is None:
            return
        streams = self.streams
        if overlap and not streams.blocks_host:
            self._copied = streams.record(event=self._copied)
            self._held = (gathering, self._copied)
        else:
            streams.wait_stream(streams.gather, streams.current())
            gathering.release()

    def free(self, buffer: Buffer, *, gathered_in_place: bool) -> None:
        """Free whole parameters after the kernels given so far."""
        if self.streams.blocks_host or not gathered_in_place:
            # Without side streams, or if it belongs to the computing stream, order is enough.
            buffer.free()
            return
        buffer.read = self.streams.record(event=buffer.read)
        self._retired.append(buffer)
        if len(self._retired) >= _MAX_RETIRED:
            self._free_oldest()

    def reclaim(self, plan: GatherPlan) -> None:
        """Make sure that memory of ``plan`` is neither read nor freed while it is filled again."""
        if self._held is not None and self._held[0].plan is plan:
            self.before_copy_out()
        if plan.buffer in self._retired:
            self._retired.remove(plan.buffer)
            self._after(plan.buffer.read)

    def _free_oldest(self) -> None:
        buffer, streams = self._retired.popleft(), self.streams
        streams.wait(streams.gather, buffer.read)
        buffer.free()

    def _after(self, event: Any) -> None:
        streams = self.streams
        streams.wait(streams.gather, event)

    def end_of_forward(self) -> None:
        """Drop what was kept for overlap."""
        self.before_copy_out()
        while self._retired:
            self._free_oldest()

    # Reductions

    def make_room(self) -> None:
        """Finish old reductions until one more may be in flight."""
        while len(self._reductions) >= self.max_input_buffers:
            self._finish_oldest()

    def add_reduction(self, reducer: Reducer, reduction: Reduction) -> None:
        """Take over a launched reduction; it is completed at once where that stops nobody.

        Gradients are off.
        """
        if not self.streams.blocks_host:
            self._complete(reducer, reduction)
        self._reductions.append((reducer, reduction))

    def _complete(self, reducer: Reducer, reduction: Reduction) -> None:
        if reduction.end is None:
            reducer.complete(reduction)
        assert reduction.end is not None, "a complete reduction has an end"
        stream, event = reduction.end
        self._ends[stream] = event

    def _finish_oldest(self) -> None:
        reducer, reduction = self._reductions.popleft()
        if self.streams.blocks_host:
            with without_gradients():
                self._complete(reducer, reduction)
            reduction.drop_packed()
            return
        # The packed gradients return to the computing stream that allocated them.
        reduction.scattered.wait()
        if reduction.outlives_scatter:
            self._kept_outputs.append(reduction)
        reduction.drop_packed()

    def finish_reductions(self) -> None:
        """Hand over every gradient that is on its way."""
        while self._reductions:
            self._finish_oldest()

    def end_of_backward(self) -> None:
        """Finish all reductions and let the current stream go on after them."""
        self.finish_reductions()
        current = self.streams.current()
        for event in self._ends.values():
            self.streams.wait(current, event)
        self._ends.clear()
        self._kept_outputs.clear()
        self.post_forward_order.clear()
        self.end_of_forward()

    def abandon(self) -> None:
        """Wait for everything in flight and forget it; gradients not handed over are lost."""
        current = self.streams.current()
        while self._reductions:
            self._reductions.popleft()[1].scattered.wait()
        for event in self._ends.values():
            self.streams.wait(current, event)
        self._ends.clear()
        self._kept_outputs.clear()
        self.post_forward_order.clear()
        self.end_of_forward()

"""Which stream waits for whom; the one module that touches streams and events.

On a device without streams the same calls do nothing, and a collective is waited for through
its work handle instead (``Done``). Nothing here knows what the work is about.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from fsdp.engine.torch_private import current_stream

# Copies in and out are short and others wait for them: they go before the compute kernels.
_HIGH_PRIORITY = -1


class Streams(Protocol):
    """The side streams of one root, and how they wait for each other."""

    blocks_host: bool
    """Whether waiting for a collective stops the host, so that it pays to wait late."""

    gather: Any
    reduce: Any
    all_reduce: Any

    def current(self) -> Any:
        """Return the stream that the caller computes on."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run the body on ``stream``."""

    def record(self, stream: Any = None, event: Any = None) -> Any:
        """Return an event at the present end of ``stream`` (default: the current one).

        It is ``event``, moved there, if one is given that every wait for its earlier place has
        been asked for: to make one and to drop it costs as much as to record it.
        """

    def wait(self, stream: Any, event: Any) -> None:
        """Make ``stream`` wait for ``event``; a None event is over already."""

    def wait_stream(self, stream: Any, other: Any) -> None:
        """Make ``stream`` wait for all that ``other`` has been given so far."""


class NullStreams:
    """Streams of a device that has none: the host runs everything in order."""

    blocks_host = True
    gather = reduce = all_reduce = None

    def current(self) -> None:
        """Return the only stream there is."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run the body."""
        return nullcontext()

    def record(self, stream: Any = None, event: Any = None) -> None:
        """Return an event that is over."""

    def wait(self, stream: Any, event: Any) -> None:
        """Do nothing: the host has passed the event already."""

    def wait_stream(self, stream: Any, other: Any) -> None:
        """Do nothing: the host runs both in order."""


class AcceleratorStreams:
    """Side streams on an accelerator.

    Goes through what all accelerators share (``torch.Stream``, ``torch.Event``): its calls end in C
    at once, and cost a third of those of a device's own module. The side streams are the module's
    own kind all the same, because events that users hand over can wait on no other.
    """

    blocks_host = False

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self._device = device
        index = device.index
        self._index = torch.accelerator.current_device_index() if index is None else index
        self.gather = module.Stream(device, priority=_HIGH_PRIORITY)
        self.reduce = module.Stream(device, priority=_HIGH_PRIORITY)
        self.all_reduce = module.Stream(device)

    def current(self) -> Any:
        """Return the stream that the caller computes on."""
        return current_stream(self._index)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run the body on ``stream``; may be nested, also with the same stream.

        A stream is such a context itself. It makes its device the current one as well, and gives
        both back.
        """
        return cast("AbstractContextManager[Any]", stream)

    def record(self, stream: Any = None, event: Any = None) -> Any:
        """Return an event at the present end of ``stream`` (default: the current one)."""
        if event is None:
            event = torch.Event(self._device)
        event.record(current_stream(self._index) if stream is None else stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Make ``stream`` wait for ``event``; a None event is over already."""
        if event is not None:
            event.wait(stream)

    def wait_stream(self, stream: Any, other: Any) -> None:
        """Make ``stream`` wait for all that ``other`` has been given so far."""
        # In C; a device's own kind of stream makes events of its own kind here.
        torch.Stream.wait_stream(stream, other)


class Done:
    """The end of one collective: an event on a stream, or a handle that stops the host."""

    __slots__ = ("_event", "_streams", "_work")

    def __init__(self, streams: Streams, work: dist.Work | None, event: Any) -> None:
        self._streams = streams
        self._work = work
        self._event = event

    def wait(self) -> None:
        """Let the current stream, or the host where there is none, go on after the collective."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._event is not None:
            self._streams.wait(self._streams.current(), self._event)


def make_streams(device: torch.device) -> Streams:
    """Return the streams of ``device``."""
    return NullStreams() if device.type == "cpu" else AcceleratorStreams(device)

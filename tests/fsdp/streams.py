"""Streams on which nothing overlaps and everything is remembered: a missing wait is a race.

On the CPU the work of all streams runs in the order in which it is given, so a wait that is not
there changes no result. `OrderedStreams` therefore keep a vector clock per stream, and `Races` asks
at every kernel whether the waits put it behind what it conflicts with: a reader behind the last
writer, a writer behind all readers, and an allocation behind everything that was done to the memory
which its stream has been given back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.engine.buffer import Buffer

COMPUTE = "compute"


@dataclass
class Event:
    """How far every stream had come, as its own stream knew."""

    clock: dict[str, int]
    seen_by_host: bool = False

    def synchronize(self) -> None:
        self.seen_by_host = True


class OrderedStreams:
    """Side streams in name only: the host runs everything, in the order in which it is given."""

    blocks_host = False
    gather, reduce, all_reduce = "gather", "reduce", "all-reduce"

    def __init__(self) -> None:
        self._running = [COMPUTE]
        self.clocks: dict[str, dict[str, int]] = defaultdict(dict)
        self.events: list[Event] = []  # every time that one is recorded
        self.made = 0

    def current(self) -> str:
        return self._running[-1]

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        self._running.append(stream)
        try:
            yield
        finally:
            self._running.pop()

    def record(self, stream: str | None = None, event: Event | None = None) -> Event:
        if event is None:
            event = Event({})
            self.made += 1
        event.clock = dict(self.clocks[stream or self.current()])
        self.events.append(event)
        return event

    def wait(self, stream: str, event: Event | None) -> None:
        if event is not None:
            mine = self.clocks[stream]
            for other, time in event.clock.items():
                mine[other] = max(mine.get(other, 0), time)

    def wait_stream(self, stream: str, other: str) -> None:
        self.wait(stream, self.record(other, Event({})))

    def tick(self) -> int:
        """Let the current stream do one more thing, and return its number."""
        mine = self.clocks[self.current()]
        mine[self.current()] = mine.get(self.current(), 0) + 1
        return mine[self.current()]

    def behind(self, stream: str, time: int) -> bool:
        """Whether the current stream is behind what ``stream`` did at ``time``."""
        return self.clocks[self.current()].get(stream, 0) >= time


@dataclass
class _Memory:
    home: str  # the stream that it was allocated on, and returns to
    alive: StorageWeakRef
    written: tuple[str, int, str] | None = None  # stream, time, what
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)


class Races(TorchDispatchMode):
    """Names every access that no wait orders; ``found`` is empty if there is none."""

    def __init__(self, streams: OrderedStreams) -> None:
        super().__init__()
        self.streams = streams
        self.found: list[str] = []
        self.kernels: list[tuple[str, str]] = []  # (operator, stream)
        self._memory: dict[int, _Memory] = {}
        self._given_back: dict[str, list[_Memory]] = defaultdict(list)
        self._usual = Buffer.allocate, Buffer.free

    def __enter__(self) -> Races:
        races, (allocate, free) = self, self._usual

        def watched_allocate(buffer: Buffer) -> None:
            fresh = buffer.data.untyped_storage().nbytes() == 0
            allocate(buffer)
            if fresh:
                races._allocated(buffer.data)

        def watched_free(buffer: Buffer) -> None:
            memory = races._memory.get(buffer.data.untyped_storage()._cdata)
            if memory is not None:
                races._give_back(memory)
            free(buffer)

        Buffer.allocate, Buffer.free = watched_allocate, watched_free
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Buffer.allocate, Buffer.free = self._usual
        super().__exit__(*error)
        self._collect()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with its local tensors
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return func(*args, **(kwargs or {}))  # shapes without memory
        self._collect()
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name.startswith("c10d::"):
            out[-1].wait()  # a group on the CPU does not know that it runs on a stream
        views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if views or not isinstance(out, torch.Tensor | tuple | list | type(None)):
            return out  # no kernel: another look at the same memory, or a number
        self.kernels.append((schema.name, self.streams.current()))
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | (kwargs or {})
        self.streams.tick()
        if "empty" not in schema.name:
            for argument in schema.arguments:
                for tensor in _tensors(given.get(argument.name)):
                    self._access(tensor, schema.name, writes=_is_written(schema.name, argument))
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in self._memory:
                self._allocated(tensor, schema.name)
        return out

    def _allocated(self, tensor: torch.Tensor, what: str = "the allocation") -> None:
        storage, home = tensor.untyped_storage(), self.streams.current()
        for memory in self._given_back.pop(home, ()):  # any of these may be handed out again
            if memory.written is not None:
                self._check(*memory.written, f"{what} in its old memory")
            for reader, (time, other) in memory.reads.items():
                self._check(reader, time, other, f"{what} in its old memory")
        # Kernels given before on this stream may still use what is handed out again.
        made = (home, self.streams.tick(), what)
        self._memory[storage._cdata] = _Memory(home, StorageWeakRef(storage), made)

    def _access(self, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is None:
            self._allocated(tensor, "something before")
            memory = self._memory[tensor.untyped_storage()._cdata]
            memory.written = None
        stream = self.streams.current()
        time = self.streams.clocks[stream][stream]
        if memory.written is not None:
            self._check(*memory.written, what)
        if writes:
            for reader, (when, other) in memory.reads.items():
                self._check(reader, when, other, what)
            memory.written, memory.reads = (stream, time, what), {}
        else:
            memory.reads[stream] = (time, what)

    def _check(self, stream: str, time: int, what: str, now: str) -> None:
        if not self.streams.behind(stream, time):
            self.found.append(f"{now} on {self.streams.current()} beside {what} on {stream}")

    def _give_back(self, memory: _Memory) -> None:
        self._given_back[memory.home].append(replace(memory))
        memory.written, memory.reads = None, {}

    def _collect(self) -> None:
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                self._give_back(memory)
                del self._memory[key]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_written(name: str, argument: Any) -> bool:
    if name.startswith("c10d::"):
        return not argument.name.startswith("input")
    return argument.alias_info is not None and argument.alias_info.is_write

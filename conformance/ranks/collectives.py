"""Record every collective before it is issued, whoever issues it: DDP, FSDP, DTensor or the user.

Those of the thread that installed the recorder and of threads that run a backward are seen.
Collectives of other threads, and those that a backend issues below the dispatcher, are not.

Knows operators and process groups. Must not know verdicts, processes or files (the ring is given).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from conformance.ranks.kernels import Issue, unwatch, watch
from conformance.ranks.modules import ModuleTracker, in_backward
from conformance.ranks.operators import Call, parse
from conformance.ranks.records import CollectiveRecord, Ring
from conformance.ranks.signature import signature

__all__ = ["CollectiveRecorder"]

StreamEnd = tuple[int, int, tuple[int, ...]]
"""How many collectives were entered, a checksum over their signatures, and the member ranks."""


class CollectiveRecorder:
    """A context manager that records the collectives issued inside it.

    Recording changes no result: arguments and results pass through untouched. It costs host time on
    every collective and on every call of a module, and none on other operators.

    Attributes:
        records: all collectives so far, in the order in which this rank issued them.
    """

    def __init__(self, ring: Ring | None = None, *, first_group: int = 0) -> None:
        """Make a recorder that is not active yet.

        Args:
            ring: shared memory in which the controller can read the records; None keeps them here.
            first_group: how many process groups existed before; unnamed ones count from there.
        """
        self.records: list[CollectiveRecord] = []
        self._ring = ring
        self._modules = ModuleTracker()
        self._phase = ""
        self._judged = True
        self._first_group = first_group
        self._streams: dict[str, StreamEnd] = {}
        self._thread = 0

    def __enter__(self) -> CollectiveRecorder:
        self._thread = threading.get_ident()
        self._modules.install()
        watch(self._issue)
        return self

    def __exit__(self, *exc: object) -> None:
        unwatch(self._issue)
        self._modules.remove()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Record nothing inside; operators then cost what they cost without a recorder."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    @property
    def streams(self) -> dict[str, StreamEnd]:
        """Where each stream of collectives stands."""
        return dict(self._streams)

    def name_modules(self, root: nn.Module) -> None:
        """Name modules by their fully qualified names under `root`; later names win."""
        self._modules.name_modules(root)

    def mark(self, phase: str) -> None:
        """Label the collectives from here on."""
        self._phase = phase

    @contextmanager
    def unjudged(self) -> Iterator[None]:
        """Mark what is issued inside as side-door traffic (`judged=False`)."""
        before, self._judged = self._judged, False
        try:
            yield
        finally:
            self._judged = before

    def _issue(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], issue: Issue
    ) -> Any:
        """Record what `operator` does with these arguments, then do it."""
        if threading.get_ident() != self._thread and not in_backward():
            return issue()
        calls = parse(operator, args, kwargs, first_group=self._first_group)
        indices = [self._enter(call) for call in calls]
        try:
            return issue()
        finally:
            for index in indices:
                self._leave(index)

    def _enter(self, call: Call) -> int:
        stream = call.stream
        nth, checksum, members = self._streams.get(stream, (0, 0, _members(call)))
        record = CollectiveRecord(
            index=len(self.records),
            op=call.op,
            group=call.group,
            group_ranks=call.group_ranks,
            stream=stream,
            nth=nth + 1,
            numel=call.numel,
            shapes=call.shapes,
            dtype=call.dtype,
            bytes=call.bytes,
            reduce_op=call.reduce_op,
            root=call.root,
            module=self._modules.current(),
            phase=self._phase,
            backward=in_backward(),
            judged=self._judged,
            entered=time.monotonic(),
        )
        text = repr(signature(record)).encode()
        self._streams[stream] = (nth + 1, zlib.crc32(text, checksum), members)
        self.records.append(record)
        if self._ring is not None:
            self._ring.enter(record)
        return record.index

    def _leave(self, index: int) -> None:
        now = self._ring.leave(index) if self._ring is not None else time.monotonic()
        self.records[index].left = now


def _members(call: Call) -> tuple[int, ...]:
    """Ranks that take part in the stream of a call."""
    if call.op not in {"send", "recv"}:
        return call.group_ranks
    here = dist.get_rank()
    return (here,) if call.root is None else tuple(sorted({here, call.root}))

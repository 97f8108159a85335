"""The record of one collective, and the shared-memory ring that holds each rank's last ones.

A rank writes the record before it issues the collective; the controller reads it from outside when
the rank can no longer speak. Knows bytes and plain data. Must not know torch.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from conformance.room import told

__all__ = ["CollectiveRecord", "Ring", "clear_ring", "read_ring", "reserve_ring", "ring_counts"]

SLOTS = 256
"""Records kept per rank: more than a rank can be ahead of its peers in practice."""
SLOT_BYTES = 1024
_HEADER = struct.Struct("<4sIQQ")  # magic, slots, entered, left
_SLOT = struct.Struct("<QddI")  # index + 1, entered, left (0.0: inside the call), payload bytes
_MAGIC = b"RNG1"
_HEADER_BYTES = 64
_RING_BYTES = _HEADER_BYTES + SLOTS * SLOT_BYTES
# `dumps` would make one at every call; to look for values that hold themselves takes a quarter
_as_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(kw_only=True)
class CollectiveRecord:
    """One collective, as the rank that issued it saw it.

    Not frozen: a record is made at every collective, and a frozen one takes four times as long.

    Attributes:
        index: position among all records of this rank's job, from 0.
        op: plain name: all_reduce, all_gather, reduce_scatter, broadcast, barrier, send, ...
        group: name of the process group, equal on all of its members.
        group_ranks: global ranks of the members.
        stream: the ordered sequence in which this collective must agree with its peers': one per
            group, and one per (group, sender, receiver) for point-to-point traffic.
        nth: position in that stream, from 1.
        numel: elements of the full payload: the output of an all_gather, the input of a
            reduce_scatter, all pieces of a gather, a scatter or an all_to_all.
        shapes: shapes of the tensors of that payload as this rank passed them.
        dtype: their dtype ("float32"); several are joined by "+".
        bytes: size of the full payload.
        reduce_op: "sum", "avg", "max", ...; None where nothing is reduced.
        root: global rank of the root, or the peer of a send or recv; None if there is none.
        module: fully qualified name of the module whose forward or backward issued it; "" is the
            named root itself, None is outside of every module.
        phase: label that the job gave by `CollectiveRecorder.mark`.
        backward: whether it was issued while autograd ran a backward.
        judged: False for side-door traffic.
        entered: `time.monotonic()` just before the call.
        left: the same just after it returned, None inside. An asynchronous collective may still be
            in flight after that.
    """

    index: int
    op: str
    group: str
    group_ranks: tuple[int, ...]
    stream: str
    nth: int
    numel: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    bytes: int = 0
    reduce_op: str | None = None
    root: int | None = None
    module: str | None = None
    phase: str = ""
    backward: bool = False
    judged: bool = True
    entered: float = field(default=0.0, compare=False)
    left: float | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the payload where it is one tensor, else None."""
        return self.shapes[0] if len(self.shapes) == 1 else None

    def to_json(self) -> dict[str, object]:
        """All fields as JSON-able data."""
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, data: dict[str, object]) -> CollectiveRecord:
        """The inverse of `to_json`, also after a round trip through JSON text."""
        plain = dict(data)
        plain["group_ranks"] = tuple(plain["group_ranks"])  # type: ignore[arg-type]
        plain["shapes"] = tuple(tuple(shape) for shape in plain["shapes"])  # type: ignore[attr-defined]
        return cls(**plain)  # type: ignore[arg-type]


class Ring:
    """The writing end: one file per rank, mapped into its memory and reused by all of its jobs.

    The kernel keeps the mapped pages when the rank dies, so the last record survives any signal.
    """

    def __init__(self, path: Path) -> None:
        """Map the file, made by `reserve_ring` if the controller has not done so.

        Args:
            path: where; its directory exists.

        Raises:
            OSError: see `reserve_ring`.
        """
        reserve_ring(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RING_BYTES)
        self.clear()

    def clear(self) -> None:
        """Forget all records: a job begins."""
        self._entered = 0
        self._left = 0
        self._write_header()

    def enter(self, record: CollectiveRecord) -> None:
        """Publish a record whose collective is about to be issued; indices count up from 0."""
        payload = _fit(record)
        offset = _HEADER_BYTES + (record.index % SLOTS) * SLOT_BYTES
        start = offset + _SLOT.size
        _SLOT.pack_into(self._map, offset, 0, 0.0, 0.0, 0)  # a reader skips a half-written slot
        self._map[start : start + len(payload)] = payload
        _SLOT.pack_into(self._map, offset, record.index + 1, record.entered, 0.0, len(payload))
        self._entered = record.index + 1
        self._write_header()

    def leave(self, index: int) -> float:
        """Mark that the call of record `index` returned; gives the time of it."""
        now = time.monotonic()
        offset = _HEADER_BYTES + (index % SLOTS) * SLOT_BYTES
        tag, entered, _, length = _SLOT.unpack_from(self._map, offset)
        if tag == index + 1:
            _SLOT.pack_into(self._map, offset, tag, entered, now, length)
        self._left += 1
        self._write_header()
        return now

    def _write_header(self) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, SLOTS, self._entered, self._left)


def reserve_ring(path: Path) -> None:
    """Make the file of a rank's ring, with all of its room on the disk.

    A write into a mapped page for which a full disk has no room kills the rank (SIGBUS), at any
    collective of a wrapper that did nothing wrong.

    Raises:
        OSError: there is no room; says in which folder, and the remedy.
    """
    try:
        with path.open("ab") as file:
            file.write(bytes(max(0, _RING_BYTES - file.tell())))
    except OSError as error:
        lost = f"a rank has no {_RING_BYTES} bytes for a record of its collectives"
        raise OSError(error.errno, told(error, lost, path)) from error


def clear_ring(path: Path) -> None:
    """Forget the records in a rank's ring from outside, while the rank is idle."""
    try:
        with path.open("r+b") as file:
            file.write(_HEADER.pack(_MAGIC, SLOTS, 0, 0))
    except FileNotFoundError:
        return  # the rank has not come to make it


def ring_counts(path: Path) -> tuple[int, int]:
    """How many collectives a rank has entered and left so far; (0, 0) without a readable ring."""
    try:
        with path.open("rb", buffering=0) as file:
            magic, _, entered, left = _HEADER.unpack(file.read(_HEADER.size))
    except (OSError, struct.error):
        return 0, 0
    return (entered, left) if magic == _MAGIC else (0, 0)


def read_ring(path: Path, *, last: int = SLOTS) -> tuple[CollectiveRecord, ...]:
    """The last records of a rank, oldest first; half-written ones are left out.

    Args:
        path: the ring's file.
        last: at most so many.
    """
    entered, _ = ring_counts(path)
    wanted = range(max(0, entered - min(last, SLOTS)), entered)
    found = []
    try:
        with path.open("rb") as file:
            for index in wanted:
                file.seek(_HEADER_BYTES + (index % SLOTS) * SLOT_BYTES)
                found.append(_read_slot(file.read(SLOT_BYTES), index))
    except OSError:
        return ()
    return tuple(record for record in found if record is not None)


def _read_slot(slot: bytes, index: int) -> CollectiveRecord | None:
    try:
        tag, entered, left, length = _SLOT.unpack_from(slot)
        if tag != index + 1:
            return None  # being written, or already overwritten
        record = CollectiveRecord.from_json(json.loads(slot[_SLOT.size : _SLOT.size + length]))
    except (struct.error, ValueError, TypeError, KeyError):
        return None
    return replace(record, entered=entered, left=left or None)


def _fit(record: CollectiveRecord) -> bytes:
    """The record as JSON that fits a slot; long lists of shapes and long names are cut."""
    shapes: Sequence[tuple[int, ...]] = record.shapes[:8]
    for limit in (len(shapes), 1, 0):
        fits = limit == len(record.shapes)
        cut = record if fits else replace(record, shapes=tuple(shapes[:limit]))
        payload = _as_json(cut.to_json()).encode()
        if len(payload) <= SLOT_BYTES - _SLOT.size:
            return payload
    cut = replace(
        record,
        shapes=(),
        group_ranks=record.group_ranks[:32],
        stream=record.stream[-120:],
        group=record.group[:60],
        module=None if record.module is None else record.module[-120:],
        phase=record.phase[:40],
    )
    return _as_json(cut.to_json()).encode()[: SLOT_BYTES - _SLOT.size]

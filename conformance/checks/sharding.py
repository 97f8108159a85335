"""Something is really sharded: bytes that the ranks store, against what sharding would need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.evidence import Evidence, Ledger, Moment
from conformance.checks.registry import check
from conformance.history import Observation, as_tensor
from conformance.models import ModelCase
from conformance.report.words import number
from conformance.scenarios.checkpoint import STEPS_BEFORE
from conformance.scenarios.states import named_pieces

PARTS: Mapping[str, str] = {"parameters": "shard.parameters", "optimizer": "shard.optimizer"}
ALIGNMENT, ELEMENTS = 16, 4
"""Bytes, or elements if these are more, to which layouts may round up each parameter, or each
rank's piece of it."""

Shapes = list[tuple[int, ...]]


@check("sharding.bytes", profile="sharding", any_of=frozenset(PARTS.values()))
def sharding_bytes(evidence: Evidence, ledger: Ledger) -> None:
    """All ranks together store no more than sharding needs of what is claimed to be sharded."""
    for seen in evidence.expected("stored"):
        _judge_parts(evidence, ledger, seen)
    ledger.notes[:] = dict.fromkeys(ledger.notes)  # what holds of every step is said once


@check(
    "sharding.loaded",
    profile="checkpoint",
    scenarios=frozenset({"checkpoint"}),
    any_of=frozenset(PARTS.values()),
)
def sharding_loaded(evidence: Evidence, ledger: Ledger) -> None:
    """After a load all ranks together store no more than sharding needs."""
    for seen in evidence.expected("stored"):
        _judge_parts(evidence, ledger, seen, when=" after the load")


def sharded(case: Case, model: ModelCase) -> bool:
    """A state in memory of which each rank has a part, by parameter name."""
    return case.option("kind") == "sharded"


@check(
    "sharding.saved",
    profile="checkpoint",
    scenarios=frozenset({"checkpoint"}),
    any_of=frozenset(PARTS.values()),
    applies=sharded,
)
def sharding_saved(evidence: Evidence, ledger: Ledger) -> None:
    """The sharded states of all ranks together hold no more than sharding needs."""
    step = STEPS_BEFORE - 1
    for part in _claimed(evidence, ledger):
        what = _PIECES[part]
        moment = evidence.expected(what)[0].moment
        due = shapes(evidence, part, step=step)
        for dtype, saved in sorted(_saved(evidence, what).items()):
            held = Held(part=part, dtype=dtype, bytes=saved, step=step, when=" in a sharded state")
            _hold_sharded(evidence, ledger, held, due.get(dtype), moment)


_PIECES: Mapping[str, str] = {"parameters": "model_state_pieces", "optimizer": "optim_state_pieces"}


def _saved(evidence: Evidence, what: str) -> dict[str, int]:
    """Bytes of the pieces of parameters in all ranks' states, by dtype; of ties the first's."""
    names = set(anatomy(evidence.model).distinct)
    total: dict[str, int] = {}
    for rank in range(evidence.world):
        for key, piece in named_pieces(evidence.history.get(rank, what)):
            if piece.values.dim() and key.partition("/")[0] in names:
                dtype = str(piece.values.dtype).removeprefix("torch.")
                total[dtype] = total.get(dtype, 0) + piece.values.nbytes
    return total


def _claimed(evidence: Evidence, ledger: Ledger) -> Iterator[str]:
    for part, capability in PARTS.items():
        if capability in evidence.capabilities:
            yield part
        else:
            ledger.notes.append(f"{capability} is not claimed")


def _judge_parts(evidence: Evidence, ledger: Ledger, seen: Observation, when: str = "") -> None:
    step = int(seen.where["step"])
    for part in _claimed(evidence, ledger):
        stored = _stored(evidence, part, step)
        due = shapes(evidence, part, step=step)
        for dtype in sorted({*stored, *due}):
            held = Held(part=part, dtype=dtype, bytes=stored.get(dtype, 0), step=step, when=when)
            judged = _hold_sharded(evidence, ledger, held, due.get(dtype), seen.moment)
            if judged and dtype in due:
                _hold_all_shown(evidence, ledger, held, due[dtype], seen.moment)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What all ranks together hold of one part in one dtype.

    Attributes:
        part: one of `PARTS`.
        dtype: of the elements.
        bytes: of their storages.
        step: at which they were counted.
        when: that in words, if it is not the first step, or where they are.
    """

    part: str
    dtype: str
    bytes: int
    step: int
    when: str

    def taken(self, evidence: Evidence) -> str:
        """The beginning of a sentence about it."""
        return (
            f"{self.part} ({self.dtype}) take {self.bytes} bytes on"
            f" {number(evidence.world, 'rank')} together{self.when},"
        )


def _stored(evidence: Evidence, part: str, step: int) -> dict[str, int]:
    """Bytes on all ranks together, by dtype."""
    total: dict[str, int] = {}
    for rank in range(evidence.world):
        for key, value in evidence.history.get(rank, "stored", step=step).items():
            name, _, dtype = key.partition("/")
            if name == part:
                total[dtype] = total.get(dtype, 0) + int(value)
    return total


def shapes(evidence: Evidence, part: str, *, step: int = 0) -> dict[str, Shapes]:
    """The oracle's shapes of one part after `step`, by dtype; a tied parameter counts once."""
    once = set(anatomy(evidence.model).distinct)
    what = {"parameters": "parameters", "optimizer": "optimizer_state"}[part]
    found: dict[str, Shapes] = {}
    for key, value in evidence.oracle.reference.get(0, what, step=step).items():
        fqn = key if part == "parameters" else key.rpartition("/")[0]
        tensor = as_tensor(value)
        if fqn in once and (part == "parameters" or tensor.dim()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.setdefault(dtype, []).append(tuple(tensor.shape))
    return found


def _hold_sharded(
    evidence: Evidence, ledger: Ledger, held: Held, due: Shapes | None, moment: Moment
) -> bool:
    """No more than sharding needs; False where that cannot be told from replicas."""
    # what is kept in a dtype that the model does not have is a second copy of the whole
    of_part = shapes(evidence, held.part, step=held.step).values()
    counted = due or [shape for each in of_part for shape in each]
    size = size_of(held.dtype)
    whole = _whole(counted, size)
    shards = evidence.world // evidence.replicas
    allowed = evidence.replicas * needed(counted, size, shards)
    if allowed >= evidence.world * whole:
        ledger.notes.append(f"{held.part}: too small to tell sharded from replicated")
        return False
    ledger.hold(
        held.bytes <= allowed,
        moment=moment,
        cause=Cause.NOT_SHARDED,
        sentence=f"{held.taken(evidence)} sharding needs at most {allowed} with padding, one full"
        f" copy {whole}:"
        f" {MEANING[Cause.NOT_SHARDED]}",
        got=held.bytes,
        expected=allowed,
        step=held.step,
    )
    return True


def _hold_all_shown(
    evidence: Evidence, ledger: Ledger, held: Held, due: Shapes, moment: Moment
) -> None:
    whole = _whole(due, size_of(held.dtype))
    ledger.hold(
        held.bytes >= evidence.replicas * whole,
        moment=moment,
        cause=Cause.UNEXPLAINED,
        sentence=f"{held.taken(evidence)} less than their {evidence.replicas * whole}:"
        " local_tensors() does not show all of them",
        got=held.bytes,
        expected=evidence.replicas * whole,
        step=held.step,
    )


def _whole(counted: Shapes, size: int) -> int:
    return size * sum(numel(shape) for shape in counted)


def needed(counted: Iterable[tuple[int, ...]], size: int, shards: int) -> int:
    """Bytes of all shards: rows dealt out in equal chunks, or a flat layout, whichever is more."""
    total = 0
    for shape in counted:
        rows, row = (shape[0], numel(shape[1:])) if shape else (1, 1)
        chunked = shards * aligned(-(-rows // shards) * row * size, size)
        flat = aligned(numel(shape) * size, size) + shards * size
        total += max(chunked, flat)
    return total


def aligned(size: int, element: int) -> int:
    """`size` in bytes of elements of so many bytes, rounded up."""
    unit = max(ALIGNMENT, ELEMENTS * element)
    return -(-size // unit) * unit


def numel(shape: Iterable[int]) -> int:
    """Elements of a tensor of this shape."""
    total = 1
    for size in shape:
        total *= size
    return total


def size_of(dtype: str) -> int:
    """Bytes of one element of the dtype of this name."""
    return int(getattr(torch, dtype).itemsize)

"""Something is really sharded: bytes that the ranks store, against what sharding would need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from conformance.causes import MEANING, Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.evidence import Evidence, Ledger
from conformance.checks.registry import check
from conformance.history import as_tensor
from conformance.scenarios.checkpoint import STEPS_BEFORE

PARTS: Mapping[str, str] = {"parameters": "shard.parameters", "optimizer": "shard.optimizer"}
ALIGNMENT = 16
"""Bytes to which layouts may round up each parameter, or each rank's piece of it."""

Shapes = list[tuple[int, ...]]


@check("sharding.bytes", profile="sharding", any_of=frozenset(PARTS.values()))
def sharding_bytes(evidence: Evidence, ledger: Ledger) -> None:
    """All ranks together store no more than sharding needs of what is claimed to be sharded."""
    _judge_parts(evidence, ledger, 0)


@check(
    "sharding.loaded",
    profile="checkpoint",
    scenarios=frozenset({"checkpoint"}),
    any_of=frozenset(PARTS.values()),
)
def sharding_loaded(evidence: Evidence, ledger: Ledger) -> None:
    """After a load all ranks together store no more than sharding needs."""
    _judge_parts(evidence, ledger, STEPS_BEFORE - 1, when=" after the load")


def _judge_parts(evidence: Evidence, ledger: Ledger, step: int, when: str = "") -> None:
    for part, capability in PARTS.items():
        if capability not in evidence.capabilities:
            ledger.notes.append(f"{capability} is not claimed")
            continue
        stored = _stored(evidence, part, step)
        due = shapes(evidence, part, step=step)
        for dtype in sorted({*stored, *due}):
            held = Held(part=part, dtype=dtype, bytes=stored.get(dtype, 0), step=step, when=when)
            _judge(evidence, ledger, held, due.get(dtype))


@dataclass(frozen=True, kw_only=True)
class Held:
    """What all ranks together store of one part in one dtype.

    Attributes:
        part: one of `PARTS`.
        dtype: of the elements.
        bytes: of their storages.
        step: at which they were counted.
        when: that in words, if it is not the first step.
    """

    part: str
    dtype: str
    bytes: int
    step: int
    when: str


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


def _judge(evidence: Evidence, ledger: Ledger, held: Held, due: Shapes | None) -> None:
    # what is kept in a dtype that the model does not have is a second copy of the whole
    of_part = shapes(evidence, held.part, step=held.step).values()
    counted = due or [shape for each in of_part for shape in each]
    size = size_of(held.dtype)
    whole = size * sum(numel(shape) for shape in counted)
    shards = evidence.world // evidence.replicas
    allowed = evidence.replicas * needed(counted, size, shards)
    if allowed >= evidence.world * whole:
        ledger.notes.append(f"{held.part}: too small to tell sharded from replicated")
        return
    seen = evidence.oracle.reference.find(0, "stored", {"step": held.step})
    assert seen is not None
    taken = (
        f"{held.part} ({held.dtype}) take {held.bytes} bytes on {evidence.world} ranks"
        f" together{held.when},"
    )
    ledger.hold(
        held.bytes <= allowed,
        moment=seen.moment,
        cause=Cause.NOT_SHARDED,
        sentence=f"{taken} sharding needs {allowed}, one full copy {whole}:"
        f" {MEANING[Cause.NOT_SHARDED]}",
        got=held.bytes,
        expected=allowed,
        step=held.step,
    )
    ledger.hold(
        due is None or held.bytes >= evidence.replicas * whole,
        moment=seen.moment,
        cause=Cause.UNEXPLAINED,
        sentence=f"{taken} less than their {evidence.replicas * whole}: local_tensors() does not"
        " show all of them",
        got=held.bytes,
        expected=evidence.replicas * whole,
        step=held.step,
    )


def needed(counted: Iterable[tuple[int, ...]], size: int, shards: int) -> int:
    """Bytes of all shards: rows dealt out in equal chunks, or a flat layout, whichever is more."""
    total = 0
    for shape in counted:
        rows, row = (shape[0], numel(shape[1:])) if shape else (1, 1)
        chunked = shards * aligned(-(-rows // shards) * row * size)
        flat = aligned(numel(shape) * size) + shards * size
        total += max(chunked, flat)
    return total


def aligned(size: int) -> int:
    """`size` in bytes, rounded up."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def numel(shape: Iterable[int]) -> int:
    """Elements of a tensor of this shape."""
    total = 1
    for size in shape:
        total *= size
    return total


def size_of(dtype: str) -> int:
    """Bytes of one element of the dtype of this name."""
    return int(getattr(torch, dtype).itemsize)

"""Live bytes: nothing grows from step to step, and unsharded parameters are freed."""

from __future__ import annotations

from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger
from conformance.checks.registry import check
from conformance.checks.sharding import needed, numel, shapes, size_of
from conformance.models import ModelCase
from conformance.scenarios.memory import STEPS

MEMORY = frozenset({"memory"})
STEADY = 1
"""The first step after which there is optimizer state: it is made in step 0."""

SETTLED = 2
"""The first step that leaves what every later one leaves. A wrapper may lay out its buckets anew
once it has seen the order of gradients, DDP with a static graph in the forward of step 2."""

ALLOWANCE = 1 / 8
"""What may be alive beside shards, gradients and optimizer state, as a part of one full copy of the
parameters: a batch, buffers, the root's own few parameters. Less than one of the model's units."""


def wide(case: Case, model: ModelCase) -> bool:
    """The parameters outweigh everything else in the model."""
    return "wide" in model.traits


@check("memory.growth", profile="memory", scenarios=MEMORY, applies=wide)
def memory_growth(evidence: Evidence, ledger: Ledger) -> None:
    """After the third step, no step leaves more bytes alive than the one before it."""
    for rank in range(evidence.world):
        for seen in evidence.expected("live_bytes", rank):
            step, place = seen.where["step"], seen.where["place"]
            if step <= SETTLED:
                continue
            before = evidence.history.get(rank, "live_bytes", step=step - 1, place=place)
            live = evidence.history.get(rank, "live_bytes", **seen.where)
            ledger.hold(
                live <= before,
                moment=seen.moment,
                cause=Cause.NOT_FREED,
                sentence=f"{live} bytes are alive after {place} of step {step} on rank {rank},"
                f" {live - before} more than a step before: {MEANING[Cause.NOT_FREED]}",
                rank=rank,
                got=live,
                expected=before,
                **seen.where,
            )


@check(
    "memory.live_bytes",
    profile="memory",
    scenarios=MEMORY,
    needs=frozenset({"memory.reshard"}),
    applies=wide,
)
def memory_live_bytes(evidence: Evidence, ledger: Ledger) -> None:
    """After backward, after the step and after an evaluation no unsharded parameters are alive."""
    parameters, whole = _part(evidence, "parameters")
    optimizer, _ = _part(evidence, "optimizer")
    allowance = int(whole * ALLOWANCE)
    # gradients may be kept until the next step overwrites them
    due = 2 * parameters + optimizer
    for rank in range(evidence.world):
        for seen in evidence.expected("live_bytes", rank):
            step, place = seen.where["step"], seen.where["place"]
            if step < STEADY or place == "forward":
                continue
            live = evidence.history.get(rank, "live_bytes", **seen.where)
            expected = due
            if place == "eval":
                before = evidence.history.get(rank, "live_bytes", step=step, place="step")
                expected = min(due, before)
            ledger.hold(
                live <= expected + allowance,
                moment=seen.moment,
                cause=Cause.NOT_FREED,
                sentence=f"{live} bytes are alive after {place} of step {step} on rank {rank};"
                f" {expected} were due, one full copy of the parameters takes {whole}:"
                f" {MEANING[Cause.NOT_FREED]}",
                rank=rank,
                got=live,
                expected=expected + allowance,
                **seen.where,
            )


def _part(evidence: Evidence, part: str) -> tuple[int, int]:
    """(bytes of one rank's share, bytes of one full copy) of parameters or optimizer state."""
    claimed = f"shard.{part}" in evidence.capabilities
    shards = evidence.world // evidence.replicas if claimed else 1
    share = whole = 0
    for dtype, counted in shapes(evidence, part, step=STEPS - 1).items():
        size = size_of(dtype)
        whole += size * sum(numel(shape) for shape in counted)
        share += needed(counted, size, shards) // shards
    return share, whole

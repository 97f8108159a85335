"""What a wrapped model leaves behind when it is dropped, after training and after a failed forward.

Also in a notebook, a search over settings or a service that goes on after an error, one process
makes and drops many.
"""

from __future__ import annotations

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger
from conformance.checks.memory import MEMORY, wide
from conformance.checks.registry import check
from conformance.scenarios.deletion import FAILED, TRAINED

AFTER = {TRAINED: "after one step and an evaluation", FAILED: "after a forward that raised"}


@check("deletion.memory", profile="robustness", scenarios=MEMORY, applies=wide)
def deletion_memory(evidence: Evidence, ledger: Ledger) -> None:
    """When a wrapped model and its optimizer are dropped, no tensor or object of theirs stays."""
    for rank in range(evidence.world):
        for seen in evidence.expected("left", rank):
            left = evidence.history.get(rank, "left", **seen.where)
            live, due = left["live_bytes"], seen.value["live_bytes"]
            alive = ", ".join(left["objects"])
            ledger.hold(
                live <= due and not alive,
                moment=seen.moment,
                cause=Cause.NOT_FREED,
                sentence=f"dropped {AFTER[seen.where['life']]}, rank {rank}: {live} bytes are alive"
                f" after a garbage collection ({left['uncollected']} before it), {due} were due;"
                f" alive of the wrapped model: {alive or 'no object'}:"
                f" {MEANING[Cause.NOT_FREED]}",
                rank=rank,
                got=live,
                expected=due,
                **seen.where,
            )


@check("deletion.globals", profile="robustness", scenarios=MEMORY, applies=wide)
def deletion_globals(evidence: Evidence, ledger: Ledger) -> None:
    """When a wrapped model is dropped, global hooks, modes and functions are as they were."""
    for rank in range(evidence.world):
        for seen in evidence.expected("left", rank):
            changed = evidence.history.get(rank, "left", **seen.where)["changed"]
            ledger.hold(
                not changed,
                moment=seen.moment,
                cause=Cause.NOT_RESTORED,
                sentence=f"dropped {AFTER[seen.where['life']]}, rank {rank}: changed are"
                f" {', '.join(changed)}: {MEANING[Cause.NOT_RESTORED]}",
                rank=rank,
                got=", ".join(changed),
                **seen.where,
            )

"""The dtypes of results and of gradients on their way, whatever their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.causes import MEANING, Cause
from conformance.checks.communication import Row, reduces_gradients
from conformance.checks.evidence import Evidence, Ledger, observed, place
from conformance.checks.gradients import GRADIENTS
from conformance.checks.moments import moment_of
from conformance.checks.registry import OBSERVED, check
from conformance.history import as_tensor

RESULTS = {
    "loss": "loss",
    "gradients": "gradient of",
    "grad_norm": "gradient norm",
    "clipped": "clipped gradient of",
    "parameters": "parameter",
    "optimizer_state": "optimizer state",
}


@check(
    "dtypes.results",
    profile="precision",
    scenarios=OBSERVED | {"checkpoint"},
)
def dtypes_results(evidence: Evidence, ledger: Ledger) -> None:
    """Losses, gradients, parameters and optimizer state have the oracle's dtypes."""
    for what, noun in RESULTS.items():
        for rank, seen, got in observed(evidence, what):
            values, expected = _tree(got), _tree(seen.value)
            for key, wanted in expected.items():
                value = values.get(key)
                if not (isinstance(wanted, Tensor) and isinstance(value, Tensor)):
                    continue  # a plain number has no dtype; a missing one is another check's affair
                name = f"{noun} {key}".strip()
                ledger.hold(
                    value.dtype == wanted.dtype,
                    moment=seen.moment,
                    cause=Cause.WRONG_DTYPE,
                    sentence=f"{name} at {place(seen.where, rank)} is {_name(value)},"
                    f" expected {_name(wanted)}",
                    rank=rank,
                    fqn=key,
                    got=_name(value),
                    expected=_name(wanted),
                    **seen.where,
                )


def _tree(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"": value}


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@check("dtypes.reduced", profile="precision", needs=GRADIENTS)
def dtypes_reduced(evidence: Evidence, ledger: Ledger) -> None:
    """Gradients are reduced in no shorter dtype than is declared."""
    due = _dtypes_due(evidence)  # a wider one costs bytes, which another check counts
    longest = max(getattr(torch, name).itemsize for name in due)
    for rank in range(evidence.world):
        for row in filter(_travels, evidence.history.ranks[rank].collectives):
            short = row["dtype"] not in due and getattr(torch, row["dtype"]).itemsize <= longest
            ledger.hold(
                not short,
                moment=moment_of(evidence.oracle.reference, row["phase"]),
                cause=Cause.DTYPE_ROUND_TRIP,
                sentence=f"{row['phase']}, rank {rank}: {row['op']} of {row['numel']} gradient"
                f" elements in {row['dtype']}, declared {' or '.join(due)}:"
                f" {MEANING[Cause.DTYPE_ROUND_TRIP]}",
                rank=rank,
                got=row["dtype"],
                expected=due[0],
            )
    for _ in observed(evidence, "gradients"):  # every step was really run
        ledger.comparisons += 1


def _dtypes_due(evidence: Evidence) -> list[str]:
    """Names of the dtypes in which gradients may travel: the declared one, or the parameters'."""
    declared = evidence.conventions.reduced_as
    if declared != "parameter":
        return [declared]
    values = evidence.oracle.reference.get(0, "parameters", step=-1).values()
    return sorted({_name(as_tensor(value)) for value in values})


def _travels(row: Row) -> bool:
    """A reduction of gradients in a step; a single element may be bookkeeping."""
    inside = row["phase"].startswith("step ") and "/micro " in row["phase"]
    return inside and reduces_gradients(row) and row["numel"] > 1 and len(row["group_ranks"]) > 1

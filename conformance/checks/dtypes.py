"""The dtypes of results, whatever their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from conformance.causes import Cause
from conformance.checks.evidence import Evidence, Ledger, observed, place
from conformance.checks.registry import OBSERVED, check

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

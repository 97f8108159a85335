"""The checks. The order of the imports is the order in which ties in time are reported."""

from conformance.checks import (  # noqa: F401, I001 - imported for registration, in this order
    communication,
    dtypes,
    structure,
    accumulation,
    clipping,
    robustness,
    recipes,
    training,
    fresh,
    optimizer,
    sharding,
    memory,
    states,
    saving,
    checkpoint,
    traffic,
    deletion,
)
from conformance.checks.evidence import Evidence, Ledger
from conformance.checks.registry import Check, registered
from conformance.names import PROFILES

CHECKS = registered()

__all__ = ["CHECKS", "PROFILES", "Check", "Evidence", "Ledger"]

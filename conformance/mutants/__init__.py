"""Wrappers with one deliberate, named defect: the proof that a check can fail."""

from conformance.mutants import (  # noqa: F401 - imported for registration
    accumulation,
    again,
    checkpoint,
    clipping,
    communication,
    completion,
    deletion,
    dtypes,
    lifetimes,
    memory,
    optimizer,
    participation,
    precision,
    recipes,
    reported,
    resuming,
    robustness,
    saving,
    sharding,
    states,
    streams,
    structure,
    traffic,
    training,
)
from conformance.mutants.registry import MUTANTS, Mutant, mutant_named

__all__ = ["MUTANTS", "Mutant", "mutant_named"]

"""Wrappers with one deliberate, named defect: the proof that a check can fail."""

from conformance.mutants import training  # noqa: F401 - imported for registration
from conformance.mutants.registry import MUTANTS, Mutant, mutant_named

__all__ = ["MUTANTS", "Mutant", "mutant_named"]

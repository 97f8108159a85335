"""Model cases: small models with data and loss, each made to expose one class of defects.

Installed as `conformance.models`. Knows nothing of wrappers, of the suite or of processes.
"""

from . import drawn
from .case import TRAITS, Batch, ModelCase, concatenate, map_tensors, move
from .registry import case, cases

__all__ = [
    "TRAITS",
    "Batch",
    "ModelCase",
    "case",
    "cases",
    "concatenate",
    "drawn",
    "map_tensors",
    "move",
]

"""Parameters that take part on some ranks only, as where each rank's data choose a branch."""

from __future__ import annotations

import torch
from torch import nn

from .case import Batch, ModelCase
from .seeding import drawing, regression, seeded
from .varying import SwitchedLayer, Varying, loss

NAME = "routed"


def build() -> nn.Module:
    """Make the model with its own weights."""
    with seeded(NAME):
        return Varying()


def batch(rank: int, step: int, micro: int) -> Batch:
    """Draw inputs (8, 10) and targets (8, 4); whose turn it is, (8,), is another on the next rank.

    What one of two ranks leaves out the other uses, so no parameter is left out by all of them.
    """
    with drawing(NAME, rank, step, micro) as random:
        return *regression(random, 8, 10, outputs=4), torch.full((8,), step + micro + rank)


CASE = ModelCase(
    name=NAME,
    why="One rank uses a parameter and another does not: a wrapper divides by the ranks that do, "
    "leaves a gradient out where there was none, or reduces one parameter into another.",
    traits=frozenset({"varying", "routed"}),
    build=build,
    batch=batch,
    loss=loss,
    units=(SwitchedLayer,),
    concatenate=False,
)

"""Optimizers with one state for all of their parameters: it cannot be saved by parameter.

Whatever saves, loads or moves states asks here before it looks at them. No tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer


def expect_separate(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers whose state is not one of each parameter, whether they have any or not.

    ``LBFGS`` keeps lists of vectors over all of its parameters, in their order, as the state of
    the first: under that name another form or world would take them for what they are not.

    Raises:
        NotImplementedError: on all ranks, as it depends on the classes alone.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise NotImplementedError(
                f"{type(optimizer).__name__} keeps one state for all of its parameters together, "
                "which cannot be saved, loaded or resharded by their names. Save or load the model "
                "without it, and beside it on every rank what its state_dict() returns, which fits "
                "the same form of the model on as many ranks."
            )

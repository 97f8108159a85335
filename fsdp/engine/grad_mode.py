"""Turns gradients off where they are not off already. Knows nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_OFF = nullcontext()


def without_gradients() -> AbstractContextManager[Any]:
    """Record nothing for autograd in the body; free of cost where nothing is, as in backward."""
    return torch.no_grad() if torch.is_grad_enabled() else _OFF

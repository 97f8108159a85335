"""Turns gradients off where they are not off already. Knows nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fsdp.engine.torch_private import set_gradients


class _Off:
    """Turns them off for its body, before which they were on. Has no state, so one will do."""

    def __enter__(self) -> None:
        set_gradients(False)

    def __exit__(self, *_raised: object) -> None:
        set_gradients(True)


_OFF, _AS_IT_IS = _Off(), nullcontext()


def without_gradients() -> AbstractContextManager[Any]:
    """Record nothing for autograd in the body; free of cost where nothing is, as in backward."""
    return _OFF if torch.is_grad_enabled() else _AS_IT_IS

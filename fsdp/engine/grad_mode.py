"""Turns gradients and transforms off where they are not off already. Knows nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fsdp.engine.torch_private import set_gradients, transform_level, without_transforms


class _Off:
    """Turns them off for its body, before which they were on. Has no state, so one will do."""

    def __enter__(self) -> None:
        set_gradients(False)

    def __exit__(self, *_raised: object) -> None:
        set_gradients(True)


@contextmanager
def _outside_transforms() -> Iterator[None]:
    with without_transforms(), torch.no_grad():
        yield


_OFF, _AS_IT_IS = _Off(), nullcontext()


def without_gradients() -> AbstractContextManager[Any]:
    """Record nothing for autograd in the body; free of cost where nothing is, as in backward.

    Nor for a function of ``torch.func``, whose tensors cannot be sent and do not outlive it.
    """
    if transform_level() is not None:
        return _outside_transforms()
    return _OFF if torch.is_grad_enabled() else _AS_IT_IS

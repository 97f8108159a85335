"""Memory that comes and goes behind a tensor which stays, and views of it. Knows no collective."""

from __future__ import annotations

from typing import Any

import torch

from fsdp.engine.param import FSDPParam


class Buffer:
    """Memory that is needed for a part of each pass: allocated, freed, allocated again.

    Its tensor stays the same object, so that views of it are made once, and the autograd leaves
    over it, and what autograd has saved of them, keep pointing at the right place; only the storage
    behind it comes and goes.

    Attributes:
        data: that tensor, (numel,).
        read: the event behind what reads it, once its owner has recorded one; moved every time.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(numel, dtype=dtype, device=device)  # (numel,)
        self._storage = self.data.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.read: Any = None

    def allocate(self) -> None:
        """Get memory on the current stream; its contents are undefined."""
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Give the memory back to the stream that it was allocated on."""
        self._storage.resize_(0)


def param_view(
    buffer: torch.Tensor, offset: int, param: FSDPParam, dtype: torch.dtype, rows: int | None = None
) -> torch.Tensor:
    """Return ``param`` (or ``rows`` rows of it) inside ``buffer``, which may be one of bytes."""
    shape = param.shape if rows is None else param.local_shape(rows)
    numel = shape.numel()
    if buffer.dtype == dtype:
        return buffer.narrow(0, offset, numel).view(shape)
    return buffer.narrow(0, offset, numel * dtype.itemsize).view(dtype).view(shape)

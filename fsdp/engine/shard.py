"""This rank's part of a group: one flat tensor (S,) in which its parameters lie.

Knows where the parameters are now and brings them into the shard; knows no collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp.engine.buffer import param_view
from fsdp.engine.extension import extends
from fsdp.engine.group_options import GroupOptions
from fsdp.engine.layout import Extent, Layout
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param import FSDPParam

# Elements, or bytes where dtypes differ, at whose multiples pieces start: 16 bytes in float32 and 8
# in a 16-bit dtype, so that vectorised kernels accept them without much padding.
ALIGN = 4
_ALIGN_BYTES = 16


class Shard:
    """The memory of a group's sharded parameters.

    Attributes:
        plain: the parameters that lie in it, in order.
        extended: those whose local tensors see to themselves.
        layout: who holds what of ``plain``; counts bytes where dtypes differ, else elements.
        data: (S,), in the dtype of the parameters, or uint8 where dtypes differ.
    """

    def __init__(
        self, params: Sequence[FSDPParam], info: DataParallelMeshInfo, options: GroupOptions
    ) -> None:
        self._params = params
        self._info = info
        self._options = options
        self._exposure = options.exposure
        self.plain: list[FSDPParam] = []
        self.extended: list[FSDPParam] = []
        self._sort()
        self._remake()
        self._link()

    def _sort(self) -> bool:
        """Tell plain parameters from extended ones; return whether anything has changed."""
        extended = [param for param in self._params if extends(self._exposure.local(param))]
        plain = [param for param in self._params if param not in extended]
        if (plain, extended) == (self.plain, self.extended):
            return False
        self.plain, self.extended = plain, extended
        return True

    def lay_out(self, dtypes: Sequence[torch.dtype], world: int) -> tuple[Layout, torch.dtype]:
        """Return the layout of ``plain`` in ``dtypes`` over ``world`` ranks, and its unit."""
        extents, unit = self._extents(dtypes)
        align = _ALIGN_BYTES if unit.itemsize == 1 else ALIGN
        return self._options.lay_out(extents, world, align=align), unit

    def _extents(self, dtypes: Sequence[torch.dtype]) -> tuple[list[Extent], torch.dtype]:
        """Return extents in one unit for all: elements, or bytes if ``dtypes`` differ."""
        if len(set(dtypes)) <= 1:
            return [param.extent for param in self.plain], (*dtypes, torch.float32)[0]
        sized = zip(self.plain, dtypes, strict=True)
        return [p.extent.in_bytes(dtype.itemsize) for p, dtype in sized], torch.uint8

    def _remake(self) -> None:
        """Make zeroed memory where the parameters are now."""
        self.layout, dtype = self.lay_out([p.dtype for p in self.plain], self._info.shard_size)
        device = self._exposure.local((self.plain or self._params)[0]).device
        if self._options.offload and device.type != "meta":
            device = torch.device("cpu")
        self.data = torch.zeros(
            self.layout.shard_numel,
            dtype=dtype,
            device=device,
            pin_memory=self._options.pin_memory and device.type == "cpu",
        )

    def pieces(self) -> list[torch.Tensor]:
        """Return this rank's part of every plain parameter, as a view of ``data``."""
        views = []
        for index, param in enumerate(self.plain):
            piece = self.layout.piece(index, self._info.shard_rank)
            rows = piece.stop - piece.start
            views.append(param_view(self.data, piece.offset, param, param.dtype, rows))
        return views

    def _link(self) -> None:
        """Move the parameters into the shard, and what users see with them."""
        pieces = self.pieces()
        with torch.no_grad():
            for param, piece in zip(self.plain, pieces, strict=True):
                local = self._exposure.local(param)
                if local.device.type != "meta" and piece.device.type != "meta":
                    piece.copy_(local)
            self._exposure.bind(self.plain, self.data, pieces)

    def relink(self) -> bool:
        """Adopt what is registered on the modules now, and bring it back into the shard.

        Parameters may have been replaced, moved, cast or materialised since.

        Returns:
            Whether layout, dtypes or device changed, so that plans made from them are void.

        Raises:
            RuntimeError: there is no memory behind one of them.
        """
        self._exposure.reread(self._params)
        changed = self._sort()
        if changed:
            self._remake()
        locals_ = [self._exposure.local(param) for param in self.plain]
        for param, local in zip(self.plain, locals_, strict=True):
            check_memory(local, f"'{param.name}'")
        pieces = self.pieces()
        if all(map(_same_memory, locals_, pieces)):
            if self._exposure.changed(self.plain):  # all of it has moved, as to be shared does
                self._exposure.bind(self.plain, self.data, pieces)
            return changed
        # Half of a module's parameters may have moved: the shard follows when all have.
        together = len({local.device for local in locals_}) <= 1
        moved = any(
            local.dtype != piece.dtype or local.device != piece.device
            for local, piece in zip(locals_, pieces, strict=True)
        )
        if moved or not together:
            changed = True
            for param, local in zip(self.plain, locals_, strict=True):
                param.dtype = local.dtype
            if together:
                self._remake()
        if together:
            with torch.inference_mode(False):
                self._link()
        return changed


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Refuse ``tensor`` if the memory behind it was given back, as ``resize_(0)`` does.

    Raises:
        RuntimeError: names it as ``what``.
    """
    if tensor.numel() and tensor.device.type != "meta" and not tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"the memory of {what} was freed: resize its storage and fill it before parameters "
            "are used again. To do without the memory of a device for a while, move the module."
        )


def _same_memory(local: torch.Tensor, piece: torch.Tensor) -> bool:
    """Whether ``local`` is the part of the shard that ``piece`` shows."""
    return (
        local.device == piece.device
        and local.dtype == piece.dtype
        and local.shape == piece.shape
        and local.untyped_storage().device.type != "meta"  # nor is there memory behind fake tensors
        and local.data_ptr() == piece.data_ptr()
    )

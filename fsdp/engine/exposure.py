"""What a face shows on the modules while a group is sharded; the one seam between face and engine.

The engine hands an exposure plain memory (the shard, pieces of it, whole parameters) and gets plain
memory back. Whether users see one object per parameter, one for the whole group, or views with the
original names is known to the exposure alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fsdp.engine.layout import Extent, Layout
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param import FSDPParam

CutShard = Callable[[], Sequence[torch.Tensor]]
P_contra = TypeVar("P_contra", bound=FSDPParam, contravariant=True)


class LayOut(Protocol):
    """Deals parameters out to ranks: one of the builders of ``layout.py``, or a face's own."""

    def __call__(self, extents: Sequence[Extent], world: int, *, align: int) -> Layout:
        """Return the layout; the same for the same arguments, on every rank."""


class Exposure(Protocol[P_contra]):
    """What one group shows. ``P_contra`` is the face's kind of ``FSDPParam``."""

    def local(self, param: P_contra) -> torch.Tensor:
        """Return the memory behind this rank's part of ``param``."""

    def bind(
        self, params: Sequence[P_contra], shard: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> None:
        """Point what users see at ``shard`` (S,) and its ``pieces``, keeping the objects."""

    def changed(self, params: Sequence[P_contra]) -> bool:
        """Whether what users see is no longer where ``bind`` has put it.

        Parameters may have been replaced, swapped, moved or given other memory since. Asked before
        each gather from the shard, for which ``reread`` and ``bind`` would be too slow.
        """

    def reread(self, params: Sequence[P_contra]) -> None:
        """Adopt what the user has registered since; raise if it is no sharded parameter."""

    def optimized(self, params: Sequence[P_contra]) -> Iterable[torch.Tensor | None]:
        """Return what users see and give to optimizers; None where there is nothing."""

    def requires_grad(self, params: Sequence[P_contra]) -> list[bool]:
        """Return which of ``params`` are to be trained, as users see them now."""

    def leaf(self, param: P_contra, whole: torch.Tensor) -> nn.Parameter:
        """Make the autograd leaf over ``whole``, which has a version counter of its own."""

    def show_sharded(self, params: Sequence[P_contra]) -> None:
        """Register what users see while the group is sharded."""

    def show_whole(self, params: Sequence[P_contra]) -> None:
        """Register the leaves, ``param.unsharded``."""

    def check_whole(self, params: Sequence[P_contra]) -> None:
        """Raise if users have replaced what ``show_whole`` has shown, and backward relies on."""

    def show_post_forward(
        self, params: Sequence[P_contra], pieces: Sequence[torch.Tensor], info: DataParallelMeshInfo
    ) -> None:
        """Register ``pieces``, which remain after forward on the smaller mesh of ``info``."""

    def plain_gradients(
        self, params: Sequence[P_contra], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the memory of unsharded gradients, reduced over what is not data parallel."""

    def accumulates(self, params: Sequence[P_contra]) -> bool:
        """Whether the next ``hand_over`` runs user code, or adds to a gradient that is there."""

    def hand_over(self, params: Sequence[P_contra], shard: torch.Tensor, cut: CutShard) -> None:
        """Set, or add to, the gradients that users see, then run the users' hooks.

        ``shard`` (S,) is the reduced shard; ``cut()`` returns the parts of ``params`` in it, as
        views, for faces that show them one by one.
        """


class HeldGradients(Protocol[P_contra]):
    """What users see of gradients that wait for a reduction, where they see any."""

    def show_held(self, params: Sequence[P_contra]) -> bool:
        """Take the whole gradients off the leaves and show them; return whether any is shown."""

    def recall_held(self, params: Sequence[P_contra]) -> None:
        """Put what ``show_held`` showed back onto the leaves, as users have left it."""


AnyExposure = Exposure[Any]

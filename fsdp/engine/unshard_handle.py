"""What a user holds of a gather that was started by hand. Knows groups, no face."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp.engine.grad_mode import without_gradients
from fsdp.engine.param_group import FSDPParamGroup


class UnshardHandle:
    """Waits for an ``unshard`` that was asked for with ``async_op=True``."""

    def wait(self) -> None:
        """Register the whole parameters; the current stream may use them from now on."""


class PendingUnshard(UnshardHandle):
    """The same for the groups of one unit; a second wait does nothing."""

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._groups = groups

    def wait(self) -> None:
        """Register the whole parameters; the current stream may use them from now on."""
        groups, self._groups = self._groups, ()
        with without_gradients():
            for group in groups:
                if group.pending:
                    group.unshard()  # anew, if parameters were replaced meanwhile
                group.wait_for_unshard()


def start_unshard(groups: Sequence[FSDPParamGroup], *, async_op: bool) -> UnshardHandle | None:
    """Gather ``groups``; with ``async_op``, return a handle at once.

    *Collective* over the shard group. *Blocks* the current stream, unless ``async_op``.
    """
    with without_gradients():
        for group in groups:
            group.lazy_init()
            group.unshard(async_op=async_op)
    handle = PendingUnshard(groups)
    if async_op:
        return handle
    handle.wait()
    return None

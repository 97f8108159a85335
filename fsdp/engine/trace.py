"""Names what groups do: in the debug log, in a running profile, and below an error."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger("fsdp")

_NO_TRACE = nullcontext()


def trace(event: str, fqn: str) -> AbstractContextManager[Any]:
    """Name the body ``event`` of the group ``fqn``.

    Naming it in the profile costs as much as the rest of a hook, so only while one runs.
    """
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("FSDP::%s (%s)", event, fqn)
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NO_TRACE
    return torch.profiler.record_function(f"FSDP::{event} ({fqn})")


def say_where(error: BaseException, collective: str, first: str, doing: str) -> None:
    """Note below ``error`` at which collective this rank was, and of the unit of which parameter.

    What ends there is often the wait for ranks that run other units, which they cannot know. Memory
    that has run out is no wait; and processes that end may have no group any more.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return
    who = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
    error.add_note(
        f"FSDP: {who} was {doing}, at the {collective} of the unit that begins "
        f"with '{first}'. If ranks have waited for each other, compare where they were: all must "
        "run the same units in the same order."
    )

"""Names what groups do, in the debug log and in a running profile."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

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

"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds after which something does not come about any more."""


def wait_for(condition: Callable[[], object]) -> None:
    """Return when `condition` holds; it does within `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)

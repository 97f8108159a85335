"""Leaving at once after an interrupt."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from conformance.verdicts import EXIT_INTERRUPTED


def leave(remove: Path | None, note: str = "") -> NoReturn:
    """End this process with the status of an interrupt.

    Threads may be waiting for ranks, and an orderly exit would wait for them; the ranks end by
    themselves when this process is gone.

    Args:
        remove: a temporary folder that nobody else would remove.
        note: what the user should know.
    """
    if remove is not None:
        shutil.rmtree(remove, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.write(f"fsdp-conformance: interrupted{'; ' + note if note else ''}\n")
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED)

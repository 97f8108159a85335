"""What an interrupt does while ranks run: the process ends at once, its files are in order."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from conformance.ranks.servers import end_servers
from conformance.verdicts import EXIT_INTERRUPTED

_SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def leaving_on_interrupt(
    remove: Path | None = None, note: Callable[[], str] = str
) -> Iterator[None]:
    """Inside, an interrupt ends this process with its own status.

    An exception would not do: threads wait for ranks, and an orderly exit would wait for those
    threads. Ranks end before this process does.

    Args:
        remove: a temporary folder that nobody else would remove.
        note: what the user should know then; by default nothing.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        end_servers()
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        if sys.stdout.isatty():
            sys.stdout.write(_SHOW_CURSOR)  # a progress bar hides it
            sys.stdout.flush()
        said = note()
        text = f"fsdp-conformance: interrupted{'; ' + said if said else ''}\n"
        os.write(sys.stderr.fileno(), text.encode())
        os._exit(EXIT_INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""What ends a command from outside: an interrupt, and what `timeout`, a CI or a terminal sends.

Knows signals and what must be in order when a process ends at once. Must not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO

from conformance.room import remove_folders

ENDING = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP",
}
"""What ends a command, and how that is told."""
SERVERS = "conformance.ranks.servers"

START_OF_LINE = "\r\x1b[K"
"""Goes there, and takes away what stands in the line."""
_SHOW_CURSOR = "\x1b[?25h"

_told: list[tuple[Callable[[], str], str]] = []
"""What commands of this process would say; the last one that began is the one that goes on."""


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Inside, a signal of `ENDING` ends this process at once, with the status that shells give it.

    An exception would not do: threads wait for ranks, and an orderly exit would wait for those
    threads. Ranks end and temporary folders go, then it is told what is known (see `telling`). What
    this process was started to ignore, as under ``nohup``, it ignores.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    heard = [number for number in ENDING if before[number] not in (signal.SIG_IGN, None)]
    if threading.current_thread() is not threading.main_thread():
        heard = []  # no other thread is ever told
    for number in heard:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def leave_with(module: str) -> NoReturn:
    """Leave this process with what ``main()`` of a module returns, or on a signal of `ENDING`.

    A module that takes seconds to import begins with this where it is run with ``python -m``, so
    that an interrupt is told in one line from the first second on.
    """
    with leaving_on_signals():
        raise SystemExit(importlib.import_module(module).main())


@contextmanager
def telling(known: Callable[[], str] = str, note: str = "") -> Iterator[None]:
    """Inside, a process that is ended says what is known so far.

    Args:
        known: the results until then, for standard output. Called in the midst of anything, so it
            only reads.
        note: what else to know then, in one line beside the results.
    """
    _told.append((known, note))
    try:
        yield
    finally:
        _told.pop()


def _leave(number: int, frame: FrameType | None) -> None:
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)  # what goes to a group as well comes twice
    servers = sys.modules.get(SERVERS)  # by whom ranks are started: else there are none
    if servers is not None:
        servers.end_servers()
    known, note = _told[-1] if _told else (str, "")
    text = ""
    with contextlib.suppress(Exception):  # whatever state the process is in, it ends
        text = known()
    remove_folders()  # before a write, which may have to wait for who reads
    _write(sys.__stdout__, text)
    line = f"{ENDING[signal.Signals(number)]}{'; ' + note if note else ''}"
    _write(sys.__stderr__, f"fsdp-conformance: {line}\n")
    remove_folders()  # a thread may have begun its next case
    os._exit(128 + number)


def _write(stream: TextIO | None, text: str) -> None:
    """Write to what stands behind a stream, which may itself be in the midst of a write."""
    if stream is None:
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        stream.flush()
    with contextlib.suppress(OSError, ValueError):
        if stream.isatty():  # a bar stands there, and hides the cursor
            text = f"{START_OF_LINE}{_SHOW_CURSOR}{text}"
        with open(stream.fileno(), "w", encoding="utf-8", errors="replace", closefd=False) as plain:
            plain.write(text)

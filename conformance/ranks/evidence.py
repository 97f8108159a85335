"""Files that ranks leave: output that is capped while it grows, and Python stacks.

Knows paths and text. Must not know processes.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["OutputFile", "innermost_frame", "is_whole", "size_of", "tail_of"]

OUTPUT_CAP = 16 * 2**20
"""Bytes after which a rank's output is cut: a rank that prints without end fills no disk."""
OUTPUT_TAIL = 8192


class OutputFile:
    """What one rank writes to stdout and stderr, from now on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._start = size_of(path)

    def cap(self) -> None:
        """Cut the file if it has grown too large."""
        if size_of(self._path) > OUTPUT_CAP:
            os.truncate(self._path, 0)  # the rank appends, so it goes on at the new end
            self._start = 0

    def tail(self) -> str:
        """The end of what was written."""
        return tail_of(self._path, self._start, OUTPUT_TAIL)


def size_of(path: str) -> int:
    """Bytes in a file, 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def tail_of(path: str, start: int, limit: int) -> str:
    """The last `limit` bytes of a file, none of them before `start`, as text."""
    try:
        with Path(path).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""


def is_whole(stack: str) -> bool:
    """Whether faulthandler has written it to the end, which is the outermost frame of the program.

    It writes piece by piece, so on a busy machine a part may be all there is for a while.

    Args:
        stack: of all threads; the main thread's comes last, and only so many frames of it.
    """
    return stack.endswith((" in <module>\n", "\n  ...\n"))


def innermost_frame(stack: str) -> str:
    """Where the main thread stands, as `function (file:line)`; "" if the stack does not tell.

    If that is inside torch, the innermost frame outside of it is named too.

    Args:
        stack: as faulthandler writes it, the current thread being the one that got the signal.
    """
    lines = iter(stack.splitlines())
    frames = []
    for line in lines:
        if line.startswith("Current thread"):
            break
    for line in lines:
        if not line.lstrip().startswith("File "):
            break
        frames.append(_frame(line))
    if not frames:
        return ""
    inner, outer = frames[0], next((f for f in frames if "/torch/" not in f[0]), frames[0])
    text = _text(inner)
    return text if outer is inner else f"{text}, called from {_text(outer)}"


def _frame(line: str) -> tuple[str, str, str]:
    """File, line and function of `  File "x.py", line 3 in function`."""
    place, _, function = line.strip().removeprefix("File ").rpartition(" in ")
    file, _, number = place.rpartition(", line ")
    return file.strip('"'), number, function


def _text(frame: tuple[str, str, str]) -> str:
    file, number, function = frame
    return f"{function} ({os.path.basename(file)}:{number})"

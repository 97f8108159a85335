"""Where a command writes what it does not keep, and what is said when a disk has no room.

Knows folders and errors. Must not import torch, nor know what is written.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conformance.errors import UsageError

LEAST_ROOM = 2**16
"""Bytes; a disk with less takes no history."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

TRIES = 5
"""Of removing a folder, into which a thread may write meanwhile."""

_folders: list[Path] = []
"""Every temporary folder that this process has made."""


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed afterwards.

    Threads that judge cases may write into it until they end, which the end of this process waits
    for; what they leave is removed then (`remove_folders`).

    Raises:
        UsageError: there is no place for it.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="fsdp-conformance-"))
    except OSError as error:
        raise UsageError(told(error, "nothing was run")) from error
    _folders.append(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@atexit.register  # threads have been waited for by then
def remove_folders() -> None:
    """Remove what is left of the temporary folders of this process, which ends."""
    for folder in _folders:
        for _ in range(TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has no room to speak of; of one that tells nothing: no."""
    disk = shutil.disk_usage(folder)
    return disk.total > 0 and disk.free < LEAST_ROOM


ELSEWHERE = "name another folder by --out or TMPDIR"
"""The remedy for most files."""


def no_room(path: Path | str, lost: str, why: str = os.strerror(errno.ENOSPC)) -> str:
    """That a disk is full: the system's words and the place, what was lost by it, the remedy."""
    return told(OSError(errno.ENOSPC, why), lost, path)


def told(error: OSError, lost: str, path: Path | str = "", *, elsewhere: str = ELSEWHERE) -> str:
    """An error of writing: the system's words and the place, what was lost by it, the remedy.

    Args:
        error: of the system.
        lost: what was lost by it.
        path: where, if the error does not know.
        elsewhere: how to name another place; where there was no room, more of it would do, too.
    """
    where = error.filename or path or tempfile.tempdir or "temporary files"
    more = "make room, or " if error.errno in NO_ROOM else ""
    return f"{error.strerror or error}: {where}; {lost}; {more}{elsewhere}"

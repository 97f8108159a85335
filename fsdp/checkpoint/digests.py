"""Sizes and digests of the files of a checkpoint: written last, checked before anything is read.

Knows files. Ranks share the work by file; who agrees with whom is the caller's business.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from fsdp.checkpoint.errors import CheckpointError

DIGESTS = "digests.json"
_VERSION = 1
Digests = dict[str, tuple[int, str]]  # file name: (bytes, SHA-256 as hex digits)


def digest_files(directory: Path, names: list[str]) -> Digests:
    """Return size and digest of some files, and bring each to permanent storage."""
    found: Digests = {}
    for name in names:
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = (file.tell(), digest)
    return found


def write_digests(directory: Path, digests: Mapping[str, tuple[int, str]]) -> None:
    """Write the digest file, and bring it and the directory to permanent storage."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in digests.items()}
    temporary = directory / f"{DIGESTS}.tmp"
    with temporary.open("w") as file:
        json.dump({"version": _VERSION, "files": files}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / DIGESTS)
    sync_directory(directory)


def read_digests(directory: Path) -> Digests | None:
    """Return what the digest file says; None if there is none.

    Raises:
        CheckpointError: it is no digest file of this package, or of a later version.
    """
    path = directory / DIGESTS
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        version, files = found["version"], found["files"]
        digests = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); take another checkpoint"
        ) from error
    if version != _VERSION:
        raise CheckpointError(f"{path} has version {version}; this package reads {_VERSION}")
    return digests


def check_sizes(directory: Path, sizes: Mapping[str, int], *, exact: bool) -> None:
    """Refuse files that are missing or short, or with ``exact`` of another size.

    Raises:
        CheckpointError: names the file.
    """
    for name, wanted in sizes.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; take another checkpoint")
        size = path.stat().st_size
        if size < wanted or (exact and size != wanted):
            raise CheckpointError(
                f"{path} has {size} bytes, wanted {wanted}: it was not written to its end, or was "
                "changed since; take another checkpoint"
            )


def check_digests(directory: Path, digests: Digests) -> None:
    """Refuse files whose bits have changed.

    Raises:
        CheckpointError: names the file.
    """
    for name, (_, wanted) in digests.items():
        path = directory / name
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted:
            raise CheckpointError(
                f"{path} has the digest {found[:16]}, wanted {wanted[:16]}: its bits have changed; "
                "take another checkpoint"
            )


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory to permanent storage."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

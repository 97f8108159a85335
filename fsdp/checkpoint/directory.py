"""Where a checkpoint is written, and how it takes the place of the one before.

A checkpoint is written into a directory beside its own and renamed when it is complete, so its path
shows the previous one until then. Between two renames neither is there; ``complete`` knows where
the previous one lies then.
"""

from __future__ import annotations

import secrets
import shutil
import warnings
from pathlib import Path

from fsdp.checkpoint.digests import DIGESTS, sync_directory

METADATA = ".metadata"  # of torch.distributed.checkpoint


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def number_of_a_save() -> int:
    """Return a number that no other save has."""
    return secrets.randbits(48)


def fresh(path: Path, number: int) -> Path:
    """Return where the save of that number writes a checkpoint for ``path``."""
    return _beside(path, f"saving-{number:012x}")


def begin(fresh: Path, path: Path) -> None:
    """Make the place, if a checkpoint can be written at ``path``.

    One rank does, so that the others see whether they look at the same file system.

    Raises:
        FileExistsError: something is at ``path`` that is no checkpoint.
        OSError: a directory cannot be made.
    """
    if path.exists() and not is_checkpoint(path):
        raise FileExistsError(
            f"{path} exists and is no checkpoint; it is not replaced. Choose another path, or "
            "remove it."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh.mkdir()


def is_checkpoint(path: Path) -> bool:
    """Whether a checkpoint of this package or of PyTorch is there."""
    return path.is_dir() and ((path / DIGESTS).exists() or (path / METADATA).exists())


def finish(fresh: Path, path: Path) -> None:
    """Let a complete checkpoint take the place of the one before, if any.

    What else has come to ``path`` since the save began is kept beside it, with a warning.

    Raises:
        OSError: it cannot be renamed.
    """
    _put_aside_what_is_foreign(path)
    previous = _beside(path, "previous")
    replaces = path.exists()
    if replaces:
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    try:
        fresh.rename(path)
    except BaseException:
        if replaces:
            previous.rename(path)
        raise
    sync_directory(path.parent)
    shutil.rmtree(previous, ignore_errors=True)
    # Of saves that were killed.
    for left in path.parent.iterdir():
        if left.name.startswith(_beside(path, "saving-").name):
            shutil.rmtree(left, ignore_errors=True)


def _put_aside_what_is_foreign(path: Path) -> None:
    if not path.exists() or is_checkpoint(path) or (path.is_dir() and not any(path.iterdir())):
        return
    aside = path.with_name(f"{path.name}.replaced-{number_of_a_save():012x}")
    path.rename(aside)
    warnings.warn(
        f"what came to {path} while a checkpoint was saved is none; it is {aside} now",
        stacklevel=2,
    )


def give_up(fresh: Path) -> None:
    """Remove what was written of a checkpoint that will not be complete."""
    shutil.rmtree(fresh, ignore_errors=True)


def complete(path: Path) -> Path:
    """Return where the last complete checkpoint of ``path`` is.

    Raises:
        FileNotFoundError: there is none.
    """
    if path.exists():
        return path
    previous = _beside(path, "previous")
    if previous.exists():
        return previous
    raise FileNotFoundError(f"there is no checkpoint at {path}")

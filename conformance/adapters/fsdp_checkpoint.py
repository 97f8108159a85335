"""Checkpoint directories of the reference implementation, for both its faces."""

from __future__ import annotations

from pathlib import Path

from conformance.adapter import Adapter, Wrapped
from fsdp import checkpoint


class OwnCheckpoint(Adapter):
    """Mixin: `save` and `load` in the package's own form."""

    def save(self, w: Wrapped, directory: Path) -> None:
        """Each rank its part, and digests."""
        checkpoint.save(directory, w.module, w.optimizer)

    def load(self, w: Wrapped, directory: Path) -> None:
        """Into the fresh pair, after everything was read and compared."""
        checkpoint.load(directory, w.module, w.optimizer)

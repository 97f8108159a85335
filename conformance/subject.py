"""What is judged: an adapter's variant, by name, perhaps with a defect planted.

Knows adapters and mutants by name. Runs nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from conformance.adapter import Adapter
from conformance.adapters import make_adapter
from conformance.mutants import mutant_named


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is judged: an adapter's variant, perhaps with a mutant planted."""

    adapter: str
    variant: str = "default"
    mutant: str | None = None

    def make(self) -> Adapter:
        """The adapter as the ranks will have it, for its claims and conventions."""
        adapter, _ = make_adapter(self.adapter, self.variant)
        if self.mutant is None:
            return adapter
        with mutant_named(self.mutant).planted(adapter) as planted:
            return planted

    def source(self) -> str | None:
        """File of the module of an adapter named ``module:Class``, once it is imported here."""
        module, colon, _ = self.adapter.partition(":")
        return getattr(sys.modules.get(module), "__file__", None) if colon else None

    @property
    def folder(self) -> str:
        """A folder name for it."""
        plain = f"{self.adapter}[{self.variant}]{'+' + self.mutant if self.mutant else ''}"
        return plain.replace("/", "_").replace(":", "_")

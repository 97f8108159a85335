"""The reference implementation's ``fully_shard``."""

from __future__ import annotations

from typing import ClassVar

from conformance.adapters.composable import ComposableAdapter
from fsdp import fully_shard


class FullyShardAdapter(ComposableAdapter):
    """The composable face of the reference."""

    name: ClassVar[str] = "fsdp.fully_shard"
    shard = staticmethod(fully_shard)

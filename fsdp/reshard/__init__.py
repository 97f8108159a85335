"""Parameters and optimizer states from one way of sharding into another.

``reshard`` moves them inside a job. ``fsdp.checkpoint`` moves them through a directory; both see a
model through ``pieces``. Reading order: ``dealt``, ``plan``, ``pieces``, ``live``.
"""

from fsdp.reshard.live import reshard

__all__ = ["reshard"]

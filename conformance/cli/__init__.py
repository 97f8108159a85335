"""The command line: ``fsdp-conformance``, the same as ``python -m conformance``.

Knows options, exit statuses and where text goes. What a run does is `conformance.matrix`.
"""

from __future__ import annotations

from conformance.cli.app import main

__all__ = ["main"]

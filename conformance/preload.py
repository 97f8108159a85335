"""What ranks have imported before they are forked, and a head start for the process that does it.

Importing torch takes seconds, in the controller and in the forkserver of its ranks alike; begun
early enough, both do it at the same time. Must not import torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from conformance.ranks.servers import lease_server, release_server

PRELOAD = (
    "conformance.execute",
    "torch._dynamo",
    "conformance.adapters.torch_fsdp2",
    "conformance.adapters.fsdp_composable",
    "conformance.adapters.fsdp_wrapper",
)
"""Imported once, before ranks are forked. The first optimizer of a process imports dynamo, which
alone would cost every fresh rank two seconds, and a wrapper's own modules a quarter of one."""

COLLECT_AFTER = 1_000_000
"""Objects after which garbage is looked for, instead of Python's 700. Half of them are made by
imports and stay, and there is hardly a cycle: to look for them took an eighth of the imports and of
judging."""


@contextmanager
def forkserver_starting() -> Iterator[None]:
    """Inside, the forkserver that every session of this process uses is there or on its way.

    And garbage is collected now and then only, while torch is imported and while cases are judged.
    """
    server = lease_server(PRELOAD, {})
    often = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *often[1:])
    try:
        yield
    finally:
        gc.set_threshold(*often)
        release_server(server)

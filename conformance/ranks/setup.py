"""What a rank is told when it is forked. Plain data, read by controller, forkserver and rank."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["IGNORED_ENVIRONMENT", "STACK_SIGNAL", "RankSetup"]

STACK_SIGNAL = signal.SIGUSR2
"""A rank that gets it writes the Python stacks of all its threads to its stacks file."""


IGNORED_ENVIRONMENT = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE", "PYTEST_CURRENT_TEST"}
    | {"TORCHINDUCTOR_CACHE_DIR"}
)
"""Variables whose change leaks nothing: a rank's place, the running test, and one that importing
torch._dynamo sets, which the first optimizer does."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Place and files of one rank.

    Attributes:
        rank: its rank.
        world: number of ranks.
        device: device type.
        index: of the device that was leased for this rank, among those that the controller sees;
            None without a lease.
        environment: variables by which the ranks see their leased devices only, {} if they see all.
        backend: backend of the default group; None takes torch's for the device and for the host.
        store: path of the file store for the rendezvous of the default group.
        output: file for stdout and stderr.
        stacks: file for the Python stacks on request.
        ring: file for the ring of its last collectives.
        port: a free port, for code that opens a rendezvous of its own.
    """

    rank: int
    world: int
    device: str
    backend: str | None
    store: str
    output: str
    stacks: str
    ring: str
    port: int
    index: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

"""One forkserver for all pools of this process that need the same one; importing torch is the cost.

Knows how forkservers are shared. Must not know ranks or jobs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence

from conformance.ranks.process import ForkServer
from conformance.ranks.setup import IGNORED_ENVIRONMENT

__all__ = ["end_servers", "lease_server", "release_server"]

_Key = tuple[int, tuple[str, ...], frozenset[tuple[str, str]]]

_lock = threading.Lock()
_servers: dict[_Key, ForkServer] = {}
_open: list[ForkServer] = []
"""All that were started and are not closed, also while they are being closed."""
_users: dict[int, int] = {}


def lease_server(preload: Sequence[str], env: Mapping[str, str]) -> ForkServer:
    """A running forkserver, to be given back once by `release_server`.

    Args:
        preload: modules that it imports.
        env: variables over this process's present environment.
    """
    merged = {**os.environ, **_fixed_environment(), **env}
    relevant = frozenset(item for item in merged.items() if item[0] not in IGNORED_ENVIRONMENT)
    key = (os.getpid(), tuple(preload), relevant)
    with _lock:
        server = _servers.get(key)
        if server is None or not server.alive:
            server = ForkServer(preload=preload, env=merged)
            _servers[key] = server
            _open.append(server)
        _users[id(server)] = _users.get(id(server), 0) + 1
        return server


def release_server(server: ForkServer) -> None:
    """Give a leased server back; the last one to do so ends it."""
    with _lock:
        _users[id(server)] -= 1
        if _users[id(server)]:
            return
        del _users[id(server)]
        for key in [key for key, known in _servers.items() if known is server]:
            del _servers[key]
    server.close()
    _open.remove(server)


def end_servers() -> None:
    """End every forkserver of this process with its ranks, whoever uses it.

    For a process that ends right after, such as in a handler of a signal: no lock is asked for.
    """
    for server in _open.copy():
        server.end_now()


def _fixed_environment() -> dict[str, str]:
    """Set before torch is imported: one OpenMP thread, gloo on the loopback device."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        "PYTHONUNBUFFERED": "1",  # the last words of a rank that is killed reach its file
    }

"""Settings of the whole test suite."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.draws import SWITCH
from tests.laws import Lines

# Before anything imports torch: the models are tiny, and threads that wait for each other on two
# busy cores cost more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has interrupts ignored; what tests interrupt, and
# the processes that they start, would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where tests are matrices, each cell a training on ranks: a few cells, spread over all, stand for
# the others in a quick run.
MATRICES = {
    *("state_dict", "optim_state", "reshard", "checkpoint", "interop", "fsdp"),
    *("test_torch_wrappers", "test_covering"),
}
"""Folders, and files in others."""
CHEAP = {
    *("test_errors", "test_wrapper_errors", "test_grad_mode"),
    "test_a_mesh_that_does_not_fit_is_named_on_every_rank",
    "test_what_does_not_fit_together_is_named_on_every_rank",
}
"""Files in these folders, and tests in others of their files, whose cells train nothing: most are
an error before anything happens."""
FIRST = {"testing", "ranks"}
"""Folders whose ranks no other folder uses. The first tests go to one worker in one piece, so that
the others need not start such ranks as well."""
STANDING_FOR_ALL = 2
STRIDES = (1, 3, 5, 7, 11, 13, 17, 23, 31, 47, 71, 101, 151, 227, 347, 521)


def stride(size: int) -> int:
    """How far apart the cells are: no divisor of `size`, or a parameter would have one value."""
    fit = (s for s in STRIDES if s * STANDING_FOR_ALL >= size and (s == 1 or size % s))
    return next(fit, STRIDES[-1])


@pytest.fixture(scope="session")
def forkserver() -> Iterator[None]:
    """That of all sessions of this process, which else ends with each: a start costs seconds."""
    from conformance.preload import PRELOAD
    from conformance.ranks.servers import lease_server, release_server

    server = lease_server(PRELOAD, {})
    yield
    release_server(server)


COLLECTED = pytest.StashKey[frozenset[str]]()
"""Ids of all tests that this process has found, before any is left out."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect no garbage meanwhile: what is found stays, and looking at torch again takes long.

    As usual afterwards, but for what modules and tests consist of.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most cells of large matrices as long; put first what one worker should have alone."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    tests = [(item.path, getattr(item, "originalname", item.name)) for item in items]
    sizes, seen = Counter(tests), Counter[tuple[object, str]]()
    for item, test in zip(items, tests, strict=True):
        number = seen[test]
        seen[test] += 1
        places = {item.path.parent.name, item.path.stem}
        matrix = MATRICES & places and not CHEAP & {item.path.stem, test[1]}
        if matrix and number % stride(sizes[test]):
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.path.parent.name not in FIRST)


def pytest_configure(config: pytest.Config) -> None:
    """Tell of each law as soon as it was drawn, where laws are drawn by a switch."""
    if SWITCH in os.environ:
        config.pluginmanager.register(Lines(config))

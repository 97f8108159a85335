from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from conformance.ranks import supervise
from tests.ranks.bounds import count_bounds_from, rest
from tests.testing.running import MARK


@pytest.fixture(scope="session", autouse=True)
def mark() -> Iterator[str]:
    """Every process that these tests start carries it; one for all, so they share a forkserver."""
    value = str(os.getpid())
    os.environ[MARK] = value
    yield value
    del os.environ[MARK]


@pytest.fixture
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds on a busy machine too, and soon on another one.

    Ranks that are stuck are found sooner. What every rank has to say is waited for. Bounds count
    from when the ranks are where they stay.
    """
    monkeypatch.setattr(supervise, "GRACE", 60.0)
    monkeypatch.setattr(supervise, "STILL", 0.5)
    count_bounds_from(monkeypatch, rest)

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from conformance.ranks import supervise
from tests.testing.running import MARK


@pytest.fixture(scope="session", autouse=True)
def mark() -> Iterator[str]:
    """Every process that these tests start carries it; one for all, so they share a forkserver."""
    value = str(os.getpid())
    os.environ[MARK] = value
    yield value
    del os.environ[MARK]


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE", 0.5)

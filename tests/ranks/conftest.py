from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.ranks import RankPool, supervise


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """One pool for the folder: every test also shows that it survives the faults of the others."""
    with RankPool(world=2) as ranks:
        yield ranks


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE", 0.4)

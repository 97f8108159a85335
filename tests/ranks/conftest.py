from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.ranks import RankPool, shared_pool, supervise
from tests.ranks.bounds import count_bounds_from, rest


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """One pool for the folder: every test also shows that it survives the faults of the others."""
    with RankPool(world=2) as ranks:
        yield ranks


@pytest.fixture
def warm() -> RankPool:
    """Ranks that need not import what training imports first."""
    return shared_pool(2, preload=("tests.fsdp.preload",))


@pytest.fixture
def _soon_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are stuck are found sooner."""
    monkeypatch.setattr(supervise, "STILL", 0.4)


@pytest.fixture
def _long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every rank has to say is waited for."""
    monkeypatch.setattr(supervise, "GRACE", 60.0)


@pytest.fixture
def _from_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts from when the ranks are where they stay."""
    count_bounds_from(monkeypatch, rest)

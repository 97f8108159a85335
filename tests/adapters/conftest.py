from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Two kept ranks for the folder."""
    with RankPool(world=2) as ranks:
        yield ranks

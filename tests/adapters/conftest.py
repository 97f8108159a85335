from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.preload import PRELOAD
from conformance.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Two kept ranks for the folder; what every job imports is imported once."""
    with RankPool(world=2, preload=PRELOAD) as ranks:
        yield ranks

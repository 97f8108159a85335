from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Narrow and wide tests alternate in runs of two, so that workers meet in every combination."""
    items.sort(key=lambda item: (int(item.name.rpartition("_")[2]) // 2, item.nodeid))

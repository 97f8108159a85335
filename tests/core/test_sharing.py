"""More cases at once than accelerators allow share them; others keep theirs to themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import session as module
from conformance.ranks import RankPool
from conformance.session import Session, Setting, devices_of
from tests.ranks.leasing import fake_leases


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(module, "leases_of", lambda kind: fake_leases(tmp_path, "a,b,c,d,e"))
    return Setting(directory=tmp_path, device="fake", world=2)


@pytest.mark.parametrize(("jobs", "shared"), [(1, ()), (2, ()), (3, (0, 1, 2, 3))])
def test_devices_are_shared_only_where_there_are_too_few(setting, jobs: int, shared) -> None:
    with Session(setting, jobs=jobs) as session:
        assert session._shared == shared


def test_what_is_shared_is_leased_and_comes_back(setting, tmp_path: Path) -> None:
    leases = fake_leases(tmp_path, "a,b,c,d,e")
    with Session(setting, jobs=3):
        with leases.hold(1) as left:
            assert left == (4,)
        with pytest.raises(RuntimeError, match="were not free"), leases.hold(2, timeout=0.1):
            pass
    with leases.hold(5) as all_of_them:
        assert all_of_them == (0, 1, 2, 3, 4)


def test_pools_take_the_shared_devices_in_turns() -> None:
    assert [devices_of(pool, 2, (0, 1, 2, 3)) for pool in range(3)] == [(0, 1), (2, 3), (0, 1)]
    assert devices_of(0, 2, ()) is None


def test_a_pool_needs_a_device_for_every_rank() -> None:
    with pytest.raises(ValueError, match=r"world=2 needs as many devices, got \[0\]"):
        RankPool(world=2, devices=[0])

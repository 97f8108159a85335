"""pytest plugin, loaded at start-up in every environment that has this distribution installed.

It knows how many workers `-n auto` should start in a project whose tests start ranks, and where
the workers of a run share histories. It must do nothing to any other project: its one hook answers
only where the project's own configuration says how many ranks a test uses
(`fsdp_conformance_ranks = 2`), and leaves the answer to xdist elsewhere; its one fixture is used
by `parametrize_with_checks`.
It must not import torch, nor any module of the suite, unless one of them is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

RANKS_OPTION = "fsdp_conformance_ranks"
_XDIST_VARIABLE = "PYTEST_XDIST_AUTO_NUM_WORKERS"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the one setting by which a project says that its tests start ranks."""
    parser.addini(
        RANKS_OPTION,
        help="ranks that one test starts, the fewest where tests differ (tests that need more "
        "accelerators wait for them); `-n auto` then means accelerators (or cores) // ranks",
        default="",
    )


# First, because xdist's own implementation always answers; optional, because xdist may be absent.
@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Workers for `-n auto`: accelerators // ranks, else cores // ranks, at least 1.

    Returns None, which leaves the decision to xdist, in a project that does not set
    `fsdp_conformance_ranks`, for `-n logical`, and where the user's environment already says how
    many workers there should be.

    Raises:
        pytest.UsageError: the setting is not a whole number above 0.
    """
    setting = str(config.getini(RANKS_OPTION)).strip()
    asked = getattr(config.option, "numprocesses", None)
    if not setting or asked != "auto" or os.environ.get(_XDIST_VARIABLE):
        return None
    if not setting.isdecimal() or int(setting) == 0:
        raise pytest.UsageError(
            f"{RANKS_OPTION}: got {setting!r}, want a whole number above 0: the ranks of one test"
        )
    return max(1, (_accelerators() or _cores()) // int(setting))


@pytest.fixture(scope="session")
def conformance_histories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The histories of this test run, shared by its workers; ranks end with the session."""
    from conformance.parametrize import Histories

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    with Histories.open(shared / "conformance"):
        yield


def _accelerators() -> int:
    # Imported here: torch takes seconds, and most pytest runs of an environment never ask.
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _cores() -> int:
    # The cores this process may use, not those of the machine: containers pin to fewer.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

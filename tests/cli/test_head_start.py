"""The forkserver is begun to be started before a command's own work is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conformance.cli.app import _starts_ranks


def test_nothing_that_takes_seconds_is_imported_before() -> None:
    code = "import sys, conformance.cli.app; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        (["run", "fsdp.fully_shard"], True),
        (["selftest"], True),
        (["run", "--help"], False),
        (["list", "checks"], False),
        (["recheck", "folder"], False),
        ([], False),
    ],
)
def test_only_commands_with_ranks_start_them(arguments: list[str], starts: bool) -> None:  # noqa: FBT001
    assert _starts_ranks(arguments) is starts

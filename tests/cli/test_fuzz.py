"""The command ``fuzz`` as a user runs it: what it finds, says and returns."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

MUTANT = ["--mutant", "summed_not_averaged"]


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conformance", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def fuzz(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    adapter = ["torch.DistributedDataParallel", "--variant", "default", "--device", "cpu"]
    return command(folder, "fuzz", *adapter, *arguments)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return fuzz(tmp_path_factory.mktemp("found"), "--examples", "1", *MUTANT)


def test_a_planted_defect_is_found_and_named(found: subprocess.CompletedProcess[str]) -> None:
    assert found.returncode == 1, found.stdout + found.stderr
    first, *_ = found.stdout.splitlines()
    smallest = "drawn:1.1/sequence/accumulation=1,acts=ss,optimizer=sgd#0"
    assert first == f"FAIL  gradients.value@torch.DistributedDataParallel/{smallest}"
    assert "cause: summed-not-averaged" in found.stdout
    assert re.search(r"\n1 example, 1 deviation, \d+ checks? passed in ", found.stdout)
    assert "examples a second (2 ranks on cpu, seed 0)" in found.stdout
    assert not found.stderr


@pytest.mark.long
def test_its_repro_line_repeats_it(tmp_path: Path, found: subprocess.CompletedProcess[str]) -> None:
    line = next(x.strip() for x in found.stdout.splitlines() if " repro " in x)
    again = command(tmp_path, *shlex.split(line)[1:])
    assert again.returncode == 1, again.stdout + again.stderr
    assert "FAIL  gradients.value@torch.DistributedDataParallel/drawn:1.1/" in again.stdout

"""The command ``fuzz`` as a user runs it: what it finds, says and returns."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.here import Done, command

MUTANT = ["--mutant", "summed_not_averaged"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, forkserver: None) -> Done:
    adapter = ["torch.DistributedDataParallel", "--variant", "default", "--device", "cpu"]
    folder = tmp_path_factory.mktemp("found")
    return command(folder, "fuzz", *adapter, "--examples", "1", *MUTANT)


def test_a_planted_defect_is_found_and_named(found: Done) -> None:
    assert found.returncode == 1, found.stdout + found.stderr
    first, *_ = found.stdout.splitlines()
    smallest = "drawn:1.1/sequence/accumulation=1,acts=ss,optimizer=sgd#0"
    assert first == f"FAIL  gradients.value@torch.DistributedDataParallel/{smallest}"
    assert "cause: summed-not-averaged" in found.stdout
    assert re.search(r"\n1 example, 1 deviation, \d+ checks? passed in ", found.stdout)
    assert "examples a second (2 ranks on cpu, seed 0)" in found.stdout
    assert not found.stderr


@pytest.mark.long
def test_its_repro_line_repeats_it(tmp_path: Path, found: Done) -> None:
    line = next(x.strip() for x in found.stdout.splitlines() if " repro " in x)
    again = command(tmp_path, *shlex.split(line)[1:])
    assert again.returncode == 1, again.stdout + again.stderr
    assert "FAIL  gradients.value@torch.DistributedDataParallel/drawn:1.1/" in again.stdout

"""The scripts that README.md shows for `fsdp` train as one process does."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import RankContext
from tests.fsdp.ranks import on_ranks

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = r"^```python\n# {}\.py\n(.*?)^```$"
SHOWN = re.compile(r"rank (\d+): loss (\d+\.\d{4})")
WORLD = 2


def losses_of_one_process() -> list[float]:
    """The last loss of every rank, from the mean gradient over their batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = [torch.Generator().manual_seed(rank) for rank in range(WORLD)]
    losses: list[torch.Tensor] = []
    for _ in range(10):
        batches = [torch.randn(8, 64, generator=draw) for draw in draws]
        losses = [(model(x) - 1).square().mean() for x in batches]
        (sum(losses, torch.zeros(())) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def script_of(name: str) -> str:
    (script,) = re.findall(BLOCK.format(name), README.read_text(encoding="utf-8"), re.M | re.S)
    return str(script)


def agree(shown: str) -> None:
    """Every rank has shown the last loss that one process computes for it."""
    losses = {int(rank): float(loss) for rank, loss in SHOWN.findall(shown)}
    assert sorted(losses) == list(range(WORLD)), shown
    for rank, loss in enumerate(losses_of_one_process()):
        assert losses[rank] == pytest.approx(loss, abs=2e-4)


def _run_script(context: RankContext, name: str) -> str:
    """What the script prints where the process group is there already."""
    shown = io.StringIO()
    given = [mock.patch.object(dist, f"{verb}_process_group") for verb in ("init", "destroy")]
    with given[0] as made, given[1] as ended, contextlib.redirect_stdout(shown):
        exec(compile(script_of(name), f"{name}.py", "exec"), {"__name__": "__main__"})
    assert (made.call_count, ended.call_count) == (1, 1)
    return shown.getvalue()


@pytest.mark.skipif(
    torch.accelerator.device_count() > 0, reason="there the scripts do not compute on the CPU"
)
@pytest.mark.parametrize("name", ["composable", "wrapper"])
def test_what_the_readme_shows_trains_as_one_process_does(name: str) -> None:
    agree("".join(on_ranks(_run_script, WORLD, name=name)))


@pytest.mark.long
@pytest.mark.skipif(
    0 < torch.accelerator.device_count() < WORLD, reason="the scripts take one device a rank"
)
@pytest.mark.parametrize("name", ["composable", "wrapper"])
def test_a_script_of_the_readme_trains_as_one_process_does(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(script_of(name))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    done = subprocess.run(
        [sys.executable, *launch, f"{name}.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    agree(done.stdout)

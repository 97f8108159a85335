"""The scripts that README.md shows for `fsdp` train as one process does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

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


@pytest.mark.skipif(
    0 < torch.accelerator.device_count() < WORLD, reason="the scripts take one device a rank"
)
@pytest.mark.parametrize("name", ["composable", pytest.param("wrapper", marks=pytest.mark.long)])
def test_a_script_of_the_readme_trains_as_one_process_does(name: str, tmp_path: Path) -> None:
    (script,) = re.findall(BLOCK.format(name), README.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / f"{name}.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    done = subprocess.run(
        [sys.executable, *launch, f"{name}.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shown = {int(rank): float(loss) for rank, loss in SHOWN.findall(done.stdout)}
    assert sorted(shown) == list(range(WORLD)), done.stdout
    for rank, loss in enumerate(losses_of_one_process()):
        assert shown[rank] == pytest.approx(loss, abs=2e-4)

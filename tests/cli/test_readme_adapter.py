"""The adapter that README.md shows is whole: it runs as it stands there, and nothing is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.report.lines import Role, read_log

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"^```python\n# my_adapter\.py\n(.*?)^```$", re.M | re.S)
MODELS = ["--model", "mlp", "--model", "batchnorm", "--model", "transformer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("readme")
    (shown,) = BLOCK.findall(README.read_text(encoding="utf-8"))
    (folder / "my_adapter.py").write_text(shown)
    return folder


def test_the_adapter_of_the_readme_passes_every_check(folder: Path) -> None:
    options = ["--depth", "narrow", *MODELS, "--device", "cpu", "--jobs", "2", "--out", "result"]
    done = subprocess.run(
        [sys.executable, "-m", "conformance", "run", "my_adapter:MyAdapter", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nmy_adapter:MyAdapter: " in done.stdout  # under the name that was typed
    reported = read_log(folder / "result" / "run.jsonl").reported
    judged = [one.finding for one in reported if one.role is Role.JUDGED]
    assert {str(finding.verdict) for finding in judged} == {"PASS", "UNSUPPORTED"}
    # what an adapter has to say about names and buffers is among it
    passed = {f.check for f in judged if f.verdict == "PASS"}
    assert {"gradients.value", "buffers.convention", "tied.one", "clip.gradients"} <= passed

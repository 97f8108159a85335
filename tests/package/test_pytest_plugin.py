"""The pytest plugin answers where a project asks for it, and does nothing anywhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance import pytest_plugin
from conformance.pytest_plugin import RANKS_OPTION, pytest_xdist_auto_num_workers


@pytest.fixture(autouse=True)
def _machine(monkeypatch) -> None:
    """Six cores, no accelerator, and no wish in the environment."""
    monkeypatch.setattr(pytest_plugin, "_cores", lambda: 6)
    monkeypatch.setattr(pytest_plugin, "_accelerators", lambda: 0)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)


def workers(ranks: str, asked: str | int | None = "auto") -> int | None:
    settings = {RANKS_OPTION: ranks}
    config = SimpleNamespace(
        getini=settings.__getitem__, option=SimpleNamespace(numprocesses=asked)
    )
    return pytest_xdist_auto_num_workers(config)


@pytest.mark.parametrize(("ranks", "wanted"), [("1", 6), ("2", 3), ("4", 1), ("8", 1)])
def test_without_accelerator_cores_are_shared_by_ranks(ranks: str, wanted: int) -> None:
    assert workers(ranks) == wanted


def test_accelerators_count_before_cores(monkeypatch) -> None:
    monkeypatch.setattr(pytest_plugin, "_accelerators", lambda: 8)
    assert workers("2") == 4


def test_one_accelerator_still_gives_a_worker(monkeypatch) -> None:
    monkeypatch.setattr(pytest_plugin, "_accelerators", lambda: 1)
    assert workers("2") == 1


def test_a_project_without_the_setting_is_left_to_xdist() -> None:
    assert workers("") is None


@pytest.mark.parametrize("asked", ["logical", 4, None])
def test_only_auto_is_answered(asked: str | int | None) -> None:
    assert workers("2", asked) is None


def test_the_variable_of_the_user_wins(monkeypatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "5")
    assert workers("2") is None


@pytest.mark.parametrize("setting", ["0", "-2", "two", "1.5"])
def test_a_setting_that_is_no_count_is_refused(setting: str) -> None:
    with pytest.raises(pytest.UsageError, match=rf"{RANKS_OPTION}: got '{setting}'"):
        workers(setting)


def test_loading_the_plugin_imports_neither_torch_nor_the_suite() -> None:
    code = (
        "import sys, conformance.pytest_plugin\n"
        "ours = {'conformance', 'conformance.pytest_plugin'}\n"
        "tops = ('torch', 'conformance', 'fsdp', 'numpy')\n"
        "print(sorted(n for n in set(sys.modules) - ours if n.split('.')[0] in tops))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        # Hypothesis' own plugin takes a second to import, and has no part in this.
        [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project on a machine where xdist counts three cores, and torch two accelerators."""
    files = {
        "psutil.py": "def cpu_count(logical=True):\n    return 3\n",
        "torch.py": "class accelerator:\n"
        "    is_available = staticmethod(lambda: True)\n"
        "    device_count = staticmethod(lambda: 2)\n",
        "test_workers.py": "import os\n"
        "def test_count():\n"
        "    assert os.environ['PYTEST_XDIST_WORKER_COUNT'] == os.environ['WANTED']\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        pytest.param("", "3", marks=pytest.mark.long),
        pytest.param("1", "2", marks=pytest.mark.long),
        ("2", "1"),
    ],
)
def test_pytest_starts_the_workers_that_the_project_asks_for(
    project: Path, monkeypatch, ranks: str, wanted: str
) -> None:
    setting = f"{RANKS_OPTION} = {ranks}\n" if ranks else ""
    (project / "pytest.ini").write_text(f"[pytest]\n{setting}")
    monkeypatch.setenv("WANTED", wanted)
    # Loaded first, the plugin would be asked last, after xdist, if its hook did not say otherwise.
    done = start(project, "-p", "fsdp_conformance", "-n", "auto", "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytest_without_xdist_accepts_the_plugin(project: Path) -> None:
    done = start(project, "-p", "no:xdist", "--collect-only")
    assert done.returncode == 0, done.stdout + done.stderr

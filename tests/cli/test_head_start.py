"""What is told, and what is begun, before anything that takes seconds is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conformance.verdicts import EXIT_OK, EXIT_USAGE
from tests.cli import here

TOLD_AT_ONCE: dict[str, int] = {
    "--help": EXIT_OK,
    "--version": EXIT_OK,
    "run --help": EXIT_OK,
    "fuzz --help": EXIT_OK,
    "list capabilities": EXIT_OK,
    "list nothing": EXIT_USAGE,
    "": EXIT_USAGE,
    "rnu fsdp.fully_shard": EXIT_USAGE,
    "run": EXIT_USAGE,
    "run fsdp.fuly_shard": EXIT_USAGE,
    "run fuly_shard": EXIT_USAGE,
    "run no_such_module:Adapter": EXIT_USAGE,
    "run fsdp.fully_shard --devise cpu": EXIT_USAGE,
    "run fsdp.fully_shard --depth ful": EXIT_USAGE,
    "run fsdp.fully_shard --profile cor": EXIT_USAGE,
    "run fsdp.fully_shard --profile core@0.1": EXIT_USAGE,
    "run fsdp.fully_shard --baseline dpd": EXIT_USAGE,
    "run fsdp.fully_shard --check clip.nom": EXIT_USAGE,
    "run fsdp.fully_shard --model mpl": EXIT_USAGE,
    "run fsdp.fully_shard --case mpl/train/*": EXIT_USAGE,
    "run fsdp.fully_shard --world 0": EXIT_USAGE,
    "run fsdp.fully_shard --timeout nan": EXIT_USAGE,
    "run fsdp.fully_shard --expect missing.txt": EXIT_USAGE,
    "run fsdp.fully_shard --out run.jsonl": EXIT_USAGE,
    "repro losses.value": EXIT_USAGE,
    "repro losses.value@fsdp.fuly_shard/mlp/train#0": EXIT_USAGE,
    "recheck .": EXIT_USAGE,
    "selftest --jobs 0": EXIT_USAGE,
    "selftest --mutant last_step_los": EXIT_USAGE,
    "selftest --page none/page.md": EXIT_USAGE,
    "fuzz fsdp.fully_shard --world 2,x": EXIT_USAGE,
    "fuzz fsdp.fully_shard --examples 0": EXIT_USAGE,
    "fuzz fsdp.fully_shard --mutant last_step_los": EXIT_USAGE,
    "repro losses.value@fsdp.fully_shard/mlp/train#0 --mutant last_step_los": EXIT_USAGE,
}
EACH_IN_TURN = """
import contextlib, io, json, sys
from conformance.cli import main
found = {}
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line.split()
    before = {"torch", "numpy"} & sys.modules.keys()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit as left:
            status = left.code
    heavy = {"torch", "numpy"} & sys.modules.keys()
    found[line] = [status, sorted(heavy - before)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    """By line: its status, and what it was the first to import. One process for all."""
    folder: Path = tmp_path_factory.mktemp("lines")
    (folder / "run.jsonl").write_text("")
    ran = subprocess.run(
        [sys.executable, "-c", EACH_IN_TURN, json.dumps(list(TOLD_AT_ONCE))],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert [path.name for path in folder.iterdir()] == ["run.jsonl"]
    return {line: (status, heavy) for line, (status, heavy) in json.loads(ran.stdout).items()}


@pytest.mark.parametrize("line", TOLD_AT_ONCE)
def test_a_line_that_needs_no_torch_is_answered_without(told, line: str) -> None:
    assert told[line] == (TOLD_AT_ONCE[line], [])


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("run fsdp.fully_shard --device cpu", True),
        ("run fsdp.fully_shard --depth ful", False),
        ("run --help", False),
        ("list capabilities", False),
        ("recheck .", False),
        ("", False),
    ],
)
def test_ranks_are_begun_to_be_started_once_a_line_that_needs_them_is_right(
    tmp_path: Path,
    monkeypatch,
    line: str,
    starts: bool,  # noqa: FBT001
) -> None:
    begun: list[str] = []

    @contextmanager
    def starting() -> Iterator[None]:
        begun.append("forkserver")
        try:
            yield
        finally:
            begun.append("released")

    def work(*_: object) -> int:
        begun.append("work")
        return 0

    monkeypatch.setattr("conformance.preload.forkserver_starting", starting)
    monkeypatch.setattr("conformance.cli.running.run_command", work)
    done = here.command(tmp_path, *line.split())
    assert begun == (["forkserver", "work", "released"] if starts else []), done.stderr

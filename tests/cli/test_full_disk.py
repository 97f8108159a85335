"""A run whose files find no room: one line, a status, and nothing left. No ranks.

The limit on the size of a file stands for the disk: the kernel writes what fits, then refuses.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from conformance import false_alarms
from conformance.errors import UsageError
from conformance.false_alarms import Planned
from conformance.item import Item
from conformance.matrix import Matrix
from conformance.report.lines import Reported, read_log
from conformance.report.log import RunLog
from conformance.report.repeated import Done, recorded
from conformance.room import no_room, temporary_folder
from conformance.selftest import Diagonal, Kill
from conformance.verdicts import EXIT_BAD, EXIT_OK, EXIT_UNDECIDED
from tests.cli import here
from tests.cli.literal import header, judged

RUN = ["run", "torch.fully_shard", "--variant", "default", "--model", "mlp", "--device", "cpu"]


@contextmanager
def room(size: int) -> Iterator[None]:
    """Inside, no file of this process grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_log_without_room_is_partial_says_why_and_closes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(tmp_path, header()) as log:
        log.add(judged())
        with room(path.stat().st_size + 9):
            log.add(judged("FAIL"))
        log.add(judged())  # there is room again, but a line is missing
        assert log.fault == no_room(path, "the log is partial", "File too large")
        assert log.finish(stale=(), seconds=1.0) == EXIT_BAD
        assert log.log.partial
    assert [one.finding.verdict for one in read_log(path).reported] == ["PASS"]
    assert [one.finding.verdict for one in log.reported] == ["PASS", "FAIL", "PASS"]


def test_a_log_that_lacks_its_footer_only_is_undecided(tmp_path: Path) -> None:
    with RunLog(tmp_path, header()) as log:
        log.add(judged())
        with room((tmp_path / "run.jsonl").stat().st_size):
            assert log.finish(stale=(), seconds=1.0) == EXIT_UNDECIDED
    assert read_log(tmp_path / "run.jsonl").partial


@pytest.mark.parametrize(("verdict", "status"), [("PASS", EXIT_UNDECIDED), ("FAIL", EXIT_BAD)])
def test_a_run_without_room_for_its_log_ends_with_one_line(
    tmp_path: Path, monkeypatch, verdict: str, status: int
) -> None:
    asked: list[Item] = []

    def run(self: Matrix, items: list[Item], *, jobs: int) -> Iterator[tuple[Item, list[Reported]]]:
        for item in items:
            asked.append(item)
            size = (tmp_path / "out" / "run.jsonl").stat().st_size
            with room(size + 9 if len(asked) == 2 else size + 9999):
                yield item, [judged(verdict)]

    monkeypatch.setattr(Matrix, "run", run)
    done = here.command(tmp_path, *RUN, "--quiet", "--out", "out")
    path = (tmp_path / "out" / "run.jsonl").resolve()
    assert done.stderr == (
        f"fsdp-conformance: File too large: {path}; the log is partial; make room, or name another"
        " folder by --out or TMPDIR\n"
    )
    assert done.returncode == status
    assert len(asked) == 2  # nothing is run that could not be kept
    assert "PARTIAL: the run did not come to its end" in done.stdout
    again = here.command(tmp_path, "recheck", "out")
    assert again.returncode == EXIT_UNDECIDED, again.stderr


def test_a_report_without_room_is_one_line_beside_a_whole_log(tmp_path: Path, monkeypatch) -> None:
    def run(self: Matrix, items: list[Item], *, jobs: int) -> Iterator[tuple[Item, list[Reported]]]:
        yield items[0], [judged()]

    def full(*_: object, **__: object) -> None:
        with room(9):
            (tmp_path / "out" / "junit.xml").write_text("<testsuites>")

    monkeypatch.setattr(Matrix, "run", run)
    monkeypatch.setattr(ET.ElementTree, "write", full)
    done = here.command(tmp_path, *RUN, "--quiet", "--out", "out")
    path = (tmp_path / "out" / "junit.xml").resolve()
    told = no_room(path, "junit.xml is partial", "File too large")
    assert done.stderr == f"fsdp-conformance: {told}\n"
    assert done.returncode == EXIT_UNDECIDED
    assert not read_log(tmp_path / "out" / "run.jsonl").partial


def test_a_run_that_keeps_nothing_needs_no_room_for_a_log(tmp_path: Path, monkeypatch) -> None:
    def run(self: Matrix, items: list[Item], *, jobs: int) -> Iterator[tuple[Item, list[Reported]]]:
        with room(0):
            yield items[0], [judged()]

    monkeypatch.setattr(Matrix, "run", run)
    done = here.command(tmp_path, *RUN, "--quiet")
    assert (done.returncode, done.stderr) == (EXIT_OK, "")


def test_a_page_of_the_selftest_without_room_is_one_line_after_its_results(
    tmp_path: Path, monkeypatch
) -> None:
    killed = Diagonal(mutant="halved", check="gradients.scale", cause="scaled", kill=Kill.KILLED)

    def diagonal(*_: object, done: Callable[[Diagonal], None], **__: object) -> None:
        done(killed)

    monkeypatch.setattr("conformance.cli.selftesting.diagonal", diagonal)
    monkeypatch.setattr("conformance.cli.selftesting.kills_page", lambda *_: "page" * 99)
    with room(9):
        done = here.command(tmp_path, "selftest", "--device", "cpu", "--page", "page.md")
    assert done.stderr.splitlines()[-1] == (
        "fsdp-conformance: File too large: page.md; the page is not whole; make room, or name"
        " another file by --page"
    )
    assert "1 killed in" in done.stdout
    assert done.returncode == EXIT_UNDECIDED


def test_a_record_of_false_alarms_without_room_keeps_the_runs_before(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    def judged(runs: Sequence[Planned], *, jobs: int, until: float) -> Iterator[Done]:
        done = Done(key="", block="core", adapter="a", world=2, seed=0, cases=1, verdicts={})
        yield replace(done, key=runs[0].key)
        with room((tmp_path / "runs.jsonl").stat().st_size + 9):
            yield replace(done, key=runs[1].key)

    monkeypatch.setattr(false_alarms, "judged", judged)
    arguments = ["--out", str(tmp_path), "--seeds", "1", "--block", "core", "--jobs", "1"]
    assert false_alarms.main(arguments) == EXIT_UNDECIDED
    lost = "runs.jsonl has the runs so far, false-alarms.md is not whole"
    told = no_room(tmp_path, lost, "File too large")
    assert capsys.readouterr().err == f"{told}\n"
    assert f"core/{false_alarms.REFERENCE[0]}/world=2#0" in recorded(tmp_path / "runs.jsonl")


def test_a_temporary_folder_that_cannot_be_made_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(UsageError) as refused, temporary_folder():
        pass
    place = str(tmp_path / "none" / "fsdp-conformance-")
    assert str(refused.value).startswith(f"No such file or directory: {place}")
    assert str(refused.value).endswith("; nothing was run; name another folder by --out or TMPDIR")


def test_a_temporary_folder_goes_although_a_thread_still_writes_into_it(tmp_path: Path) -> None:
    script = """
    import threading
    from conformance.room import temporary_folder

    entered, left = threading.Event(), threading.Event()

    def case(folder):
        entered.wait()
        while not left.is_set():
            (folder / "oracle" / "new").mkdir(parents=True, exist_ok=True)
        (folder / "oracle" / "late").mkdir(parents=True, exist_ok=True)

    with temporary_folder() as folder:
        threading.Thread(target=case, args=(folder,)).start()
        entered.set()
    assert not left.is_set()
    left.set()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=True,
    )
    assert list(tmp_path.glob("fsdp-conformance-*")) == []


def test_a_temporary_folder_goes_with_what_it_was_made_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder() as folder:
        (folder / "histories").mkdir()
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_fills_while_it_is_removed_is_no_fault(tmp_path: Path, monkeypatch) -> None:
    def not_empty(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as patched, temporary_folder() as folder:
        (folder / "oracle").mkdir()
        patched.setattr(os, "rmdir", not_empty)
    assert folder.exists()

"""Whose child a process is, as far as the kernel tells."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from conformance.ranks import orphans
from conformance.ranks.orphans import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no child is found")


@contextlib.contextmanager
def sleeper() -> Iterator[int]:
    """A process that sleeps; killed and reaped in the end."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_a_child_counts_until_it_is_reaped() -> None:
    before = children()
    with sleeper() as pid:
        assert pid in children()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is dead
        assert pid in children()
    assert children() == before


def test_a_child_of_another_thread_counts() -> None:
    started, ended = threading.Event(), threading.Event()
    found: list[int] = []

    def start() -> None:
        with sleeper() as pid:
            found.append(pid)
            started.set()
            ended.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    started.wait(60)
    try:
        assert set(found) <= set(children())
    finally:
        ended.set()
        thread.join()


def test_a_process_without_children_reads_no_file_for_each_of_its_threads() -> None:
    """It is asked before and after every job, in ranks with a dozen threads."""
    script = """
        from unittest import mock
        from conformance.ranks.orphans import children

        with mock.patch("builtins.open", side_effect=AssertionError):
            assert children() == ()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_where_the_kernel_does_not_take_the_question_its_files_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orphans, "_WALL", 1 << 20)  # no flag at all: EINVAL
    with sleeper() as pid:
        assert pid in children()

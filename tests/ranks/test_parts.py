"""Ring, wire, evidence and jobs by themselves, in one process."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from conformance.ranks import Job, supervise
from conformance.ranks.evidence import innermost_frame, is_whole
from conformance.ranks.job import load_function
from conformance.ranks.process import describe_exit
from conformance.ranks.records import (
    SLOTS,
    Ring,
    clear_ring,
    read_ring,
    reserve_ring,
    ring_counts,
)
from conformance.ranks.wire import Inbox, WireError, receive, send
from tests.ranks import jobs
from tests.ranks.test_diagnose import REDUCE


def test_a_ring_gives_back_what_was_written(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring")
    ring.enter(REDUCE)
    (inside,) = read_ring(tmp_path / "ring")
    assert (inside, inside.entered, inside.left) == (REDUCE, 100.0, None)
    left = ring.leave(0)
    assert read_ring(tmp_path / "ring")[0].left == left
    assert ring_counts(tmp_path / "ring") == (1, 1)


def test_a_full_ring_keeps_the_last_records(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring")
    for index in range(SLOTS + 10):
        ring.enter(replace(REDUCE, index=index))
    assert [r.index for r in read_ring(tmp_path / "ring")] == list(range(10, SLOTS + 10))
    assert [r.index for r in read_ring(tmp_path / "ring", last=2)] == [SLOTS + 8, SLOTS + 9]


@pytest.mark.parametrize("by", ["rank", "controller"])
def test_a_cleared_ring_shows_nothing_of_the_job_before(tmp_path: Path, by: str) -> None:
    ring = Ring(tmp_path / "ring")
    ring.enter(REDUCE)
    ring.clear() if by == "rank" else clear_ring(tmp_path / "ring")
    assert read_ring(tmp_path / "ring") == ()


def test_a_ring_has_all_of_its_room_before_anything_is_written(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring")
    found = (tmp_path / "ring").stat()
    assert found.st_blocks * 512 >= found.st_size >= SLOTS * 1024  # a hole may find no room later
    ring.enter(REDUCE)
    reserve_ring(tmp_path / "ring")  # again: nothing is lost
    assert read_ring(tmp_path / "ring") == (REDUCE,)


def test_a_ring_without_room_is_an_error_that_names_the_remedy() -> None:
    told = "No space left on device: /dev/full; .*; make room, or name another folder .* TMPDIR"
    with pytest.raises(OSError, match=told) as raised:
        Ring(Path("/dev/full"))
    assert raised.value.errno == errno.ENOSPC


def test_a_half_written_slot_is_left_out(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring")
    ring.enter(REDUCE)
    ring.enter(replace(REDUCE, index=1, nth=2))
    data = bytearray((tmp_path / "ring").read_bytes())
    struct.pack_into("<Q", data, 64, 0)  # the tag of slot 0
    (tmp_path / "ring").write_bytes(data)
    assert [record.nth for record in read_ring(tmp_path / "ring")] == [2]


def test_a_record_with_long_names_fits_its_slot(tmp_path: Path) -> None:
    shapes = tuple((i, 1000 + i) for i in range(400))
    ranks = tuple(range(1000, 1400))
    long = replace(REDUCE, module="m" * 3000, shapes=shapes, group_ranks=ranks, phase="p" * 500)
    Ring(tmp_path / "ring").enter(long)
    (record,) = read_ring(tmp_path / "ring")
    assert (record.op, record.numel, record.nth) == ("all_reduce", 8, 1)
    assert long.module is not None
    assert long.module.endswith(record.module or "?")


def test_no_ring_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("something else")
    for name in ("absent", "text"):
        assert read_ring(tmp_path / name) == ()


def test_messages_arrive_whole_from_pieces_of_any_size() -> None:
    one, other = socket.socketpair()
    with one, other:
        for payload in (b"", b"first", b"x" * 70_000):
            send(one, payload)
            one.send(b"") if not payload else None
            assert receive(other) == payload
        inbox = Inbox()
        send(one, b"ab")
        send(one, b"cd")
        stream = other.recv(1000)
        assert [m for byte in stream for m in inbox.feed(bytes([byte]))] == [b"ab", b"cd"]


def test_a_closed_peer_is_the_end_and_a_torn_message_an_error() -> None:
    one, other = socket.socketpair()
    with other:
        one.close()
        assert receive(other) is None
    one, other = socket.socketpair()
    with other:
        one.send(b"rank\x10\x00\x00\x00half")
        one.close()
        with pytest.raises(WireError, match="closed after 12 bytes"):
            receive(other)


@pytest.mark.parametrize("junk", [b"hello, world", b"rank\xff\xff\xff\xff"])
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(WireError, match="not a message"):
        Inbox().feed(junk)


def test_exits_in_words() -> None:
    def status(code: str) -> int:
        return os.waitpid(subprocess.Popen([sys.executable, "-c", code]).pid, 0)[1]

    assert describe_exit(status("import os; os._exit(3)")) == "exit 3"
    assert describe_exit(status("import os; os.kill(os.getpid(), 9)")) == "signal SIGKILL"


STACK = """\
Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 9 in wait

Current thread 0x02 (most recent call first):
  File "/lib/torch/distributed/c10d.py", line 5 in all_reduce
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 30 in main
"""


def test_the_innermost_frame_is_that_of_the_current_thread() -> None:
    assert innermost_frame(STACK) == "all_reduce (c10d.py:5), called from step (train.py:12)"
    assert innermost_frame("") == innermost_frame("no stack here") == ""


OUTERMOST = '  File "<string>", line 1 in <module>\n'


def test_a_stack_is_whole_when_its_last_frame_is_written() -> None:
    for last in (OUTERMOST, "  ...\n"):
        assert is_whole(STACK + last)
        assert not any(is_whole((STACK + last)[:size]) for size in range(len(STACK + last)))


def test_a_stack_that_is_written_with_breaks_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, stacks = tmp_path / "output", tmp_path / "stacks"
    process = mock.Mock(setup=mock.Mock(output=str(output), stacks=str(stacks)))
    supervisor = supervise.Supervisor(server=mock.Mock(), ranks=[process], timeout=1.0)
    pieces = iter([STACK[:20], "", "", STACK[20:], "", "", "", OUTERMOST])

    def write(seconds: float) -> None:
        with stacks.open("a") as file:
            file.write(next(pieces, ""))

    monkeypatch.setattr("conformance.ranks.supervise.time.sleep", write)
    supervisor._take_stacks(supervisor._watched)
    assert supervisor._watched[0].stack == (STACK + OUTERMOST).strip()


def test_a_job_names_its_function() -> None:
    job = Job.of(jobs.Holder.rank_twice, n=1)
    assert (job.module, job.qualname) == ("tests.ranks.jobs", "Holder.rank_twice")
    assert job.file == str(Path(jobs.__file__).resolve())
    assert dict(job.kwargs) == {"n": 1}
    assert load_function(job) is jobs.Holder.rank_twice


@pytest.mark.parametrize("function", [lambda context: None, Inbox().feed], ids=["lambda", "bound"])
def test_functions_without_a_name_are_refused(function: object) -> None:
    with pytest.raises(ValueError, match=r"a rank cannot import it|no module and name"):
        Job.of(function)  # type: ignore[arg-type]


def test_a_file_that_is_no_module_is_loaded_by_its_path(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"def f(context):\n    return {name!r}\n")
    for name in ("a", "b"):
        file = str(tmp_path / name / "same_name.py")
        function = load_function(Job(file=file, module="same_name", qualname="f"))
        assert function(None) == name


def test_the_error_of_an_import_inside_the_module_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "broken_job.py").write_text("import surely_not_installed\n")
    job = Job(file=str(tmp_path / "broken_job.py"), module="broken_job", qualname="f")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_function(job)


def test_a_missing_attribute_is_named() -> None:
    with pytest.raises(ImportError, match=r"has no 'Holder\.nothing'"):
        load_function(Job(module="tests.ranks.jobs", qualname="Holder.nothing"))


def test_a_script_runs_its_own_functions_as_jobs_and_needs_no_torch_for_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            import sys

            from conformance.ranks import Job, RankPool

            def who(context):
                return [context.rank, os.environ["ONLY_IN_RANKS"]]

            if __name__ == "__main__":
                with RankPool(world=2, env={"ONLY_IN_RANKS": "yes"}) as pool:
                    print(pool.run(Job.of(who)).values, "torch" in sys.modules)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "([0, 'yes'], [1, 'yes']) False\n", done.stderr

"""Test methods that go wrong on rank 1, each named after what happens. Run by `test_faults`."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from conformance.testing import FSDPTest

LONG = 600.0


class Faults(FSDPTest):
    __test__ = False

    world_size = 2
    timeout = 60.0

    def meet(self) -> None:
        values = torch.ones(2, device=self.device)
        dist.all_reduce(values)

    def wait_for_rank_1(self) -> None:
        """Rank 0 waits in a collective that rank 1 never comes to."""
        if self.rank == 0:
            self.meet()

    def exception(self) -> None:
        if self.rank == 1:
            raise ValueError("rank 1 has its reasons")
        self.meet()

    def exception_on_all_ranks(self) -> None:
        time.sleep(0.1 * (1 - self.rank))
        raise KeyError(f"reason of rank {self.rank}")

    def same_exception_on_all_ranks(self) -> None:
        raise KeyError("the same reason")

    def sigkill(self) -> None:
        self._end_by_signal(signal.SIGKILL)

    def sigkill_with_nothing_left_to_do(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def sigsegv(self) -> None:
        self._end_by_signal(signal.SIGSEGV)

    def sigabrt(self) -> None:
        self._end_by_signal(signal.SIGABRT)

    def _end_by_signal(self, number: int) -> None:
        self.meet()
        if self.rank == 1:
            os.kill(os.getpid(), number)
        self.meet()

    def os_exit_0(self) -> None:
        if self.rank == 1:
            os._exit(0)

    def os_exit_3(self) -> None:
        if self.rank == 1:
            os._exit(3)

    def sys_exit_0(self) -> None:
        if self.rank == 1:
            sys.exit(0)

    def skip_on_one_rank(self) -> None:
        if self.rank == 1:
            self.skipTest("not here")

    def endless_python_loop(self) -> None:
        if self.rank == 1:
            while True:
                pass

    def endless_native_loop(self) -> None:
        if self.rank == 1:
            re.match(r"(a+)+$", "a" * 60 + "b")

    def never_enters_a_collective(self) -> None:
        if self.rank == 1:
            time.sleep(LONG)
        self.meet()

    def another_collective(self) -> None:
        values = torch.ones(4)
        if self.rank == 1:
            dist.broadcast(values, src=0)
        else:
            dist.all_reduce(values)

    def another_shape(self) -> None:
        dist.all_reduce(torch.ones(3 + self.rank))

    def another_dtype(self) -> None:
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if self.rank == 1 else torch.float32))

    def ignores_sigterm(self) -> None:
        if self.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)

    def writes_100_megabytes(self) -> None:
        if self.rank == 1:
            line = "x" * 1023 + "\n"
            for _ in range(100):
                sys.stdout.write(line * 1024)
            sys.stdout.write("the end\n")

    def a_child_outlives_it(self) -> None:
        if self.rank == 1:
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])

    def a_thread_never_ends(self) -> None:
        if self.rank == 1:
            threading.Thread(target=time.sleep, args=(LONG,)).start()

    def out_of_memory(self) -> None:
        if self.rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            used = pages * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
            torch.ones(2**28)
        self.meet()

    def corrupt_report(self) -> None:
        if self.rank == 1:
            for number in range(3, 100):
                try:
                    with socket.socket(fileno=os.dup(number)) as channel:
                        if channel.family == socket.AF_UNIX:
                            channel.sendall(b"this is no report")
                            break
                except OSError:
                    continue
            time.sleep(LONG)

    @unittest.expectedFailure
    def dies_where_a_failure_is_expected(self) -> None:
        if self.rank == 1:
            os._exit(0)

    @unittest.expectedFailure
    def fails_where_a_failure_is_expected(self) -> None:
        raise ValueError("expected")

    def fails_in_teardown(self) -> None:
        self.addCleanup(self.fail, "the cleanup fails")

    def leaves_default_dtype(self) -> None:
        torch.set_default_dtype(torch.float64)

    def leaves_patched_function(self) -> None:
        original = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: original(*args, **kwargs)

    def leaves_environment(self) -> None:
        os.environ["LEAKED"] = "1"

    def leaves_random_state(self) -> None:
        torch.manual_seed(12345 + self.rank)
        random.seed(12345)

    def finds_everything_as_it_was(self) -> None:
        self.assertEqual(torch.get_default_dtype(), torch.float32)
        assert "LEAKED" not in os.environ
        assert dist.all_reduce.__name__ == "all_reduce"
        assert torch.initial_seed() == 0
        assert "hook" not in vars(nn.Module)
        values = torch.ones(2, device=self.device)
        dist.all_reduce(values)
        self.assertEqual(values, torch.full((2,), float(self.world_size)))


class BoundedFaults(Faults):
    """Those that only the bound ends."""

    timeout = 1.5

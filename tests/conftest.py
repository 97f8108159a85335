"""Settings of the whole test suite."""

from __future__ import annotations

import os
import signal

# Before anything imports torch: the models are tiny, and threads that wait for each other on two
# busy cores cost more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has interrupts ignored; what tests interrupt, and
# the processes that they start, would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""Settings of the whole test suite."""

from __future__ import annotations

import os

# Before anything imports torch: the models are tiny, and threads that wait for each other on two
# busy cores cost more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

"""Imported by the fork server before it forks ranks: what every rank would otherwise do alone.

The first optimizer of a process imports the compiler (seconds) and patches the optimizer classes,
which a pool takes for a spoilt rank. What counts graphs imports much of the compiler, and the
modules of tests import pytest (a third of a second each).
"""

from __future__ import annotations

import importlib
import os

import pytest  # noqa: F401 - imported for its ranks
import torch
import torch._dynamo.testing
import torch.distributed.checkpoint
import torch.distributed.tensor.parallel
from torch import nn

import fsdp  # noqa: F401 - imported for its ranks

if "RANKS_COVERAGE" in os.environ:
    importlib.import_module("coverage")
for _kind in (torch.optim.AdamW, torch.optim.SGD):
    _kind([nn.Parameter(torch.empty(0))], lr=0.1)

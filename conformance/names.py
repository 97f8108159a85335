"""The names that a user types: short lists with what each means, and what is registered.

Must not import torch, nor a module that does: a name that is misspelt is told at once. Checks,
models and mutants are registered by modules that need torch, so their names are read from the text
of these modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from conformance.errors import unknown

CAPABILITIES: Mapping[str, str] = {
    "gradients": "full gradients can be read between backward and the optimizer step",
    "no_sync": "micro-batches before the last one do not reduce gradients",
    "no_sync.dropped": "zero_grad drops gradients that wait unreduced, too",
    "clip.p1": "clip_grad_norm with the 1-norm",
    "clip.p2": "clip_grad_norm with the 2-norm",
    "clip.pinf": "clip_grad_norm with the maximum norm",
    "clip.gradients": "full gradients can be read between clipping and the optimizer step",
    "two_forwards": "two forward passes before two backward passes",
    "unused_parameters": "trains a model with parameters that take no part in forward",
    "unused_parameters.varying": "parameters may take part in some micro-batches and steps only",
    "unused_parameters.ranks": "parameters may take part on some ranks only",
    "optimizer.whole": "optimizers that need the norm of each whole parameter",
    "shard.parameters": "each rank stores a part of the parameters",
    "shard.optimizer": "each rank stores a part of the optimizer state",
    "memory.reshard": "unsharded parameters are freed after backward and after evaluation",
    "model_state.full": "full model state, saved and loaded",
    "model_state.sharded": "sharded model state, saved and loaded",
    "model_state.local": "local model state, saved and loaded",
    "optim_state.full": "full optimizer state, saved and loaded",
    "optim_state.sharded": "sharded optimizer state, saved and loaded",
    "optim_state.local": "local optimizer state, saved and loaded",
    "hooks.parameters": "hooks registered on parameters run for every backward",
    "scaler": "trains with a gradient scaler",
    "meta": "a model on the meta device is wrapped, and a full state loaded into it",
    "save": "save to and load from a directory",
}

PROFILES: Mapping[str, str] = {
    "core": "training gives what the unsharded model gives",
    "sharding": "something is really sharded",
    "checkpoint": "states are saved and loaded, and training goes on from them",
    "precision": "dtypes are what they should be",
    "memory": "memory is given back",
    "communication": "the right collectives, once, in the same order on all ranks",
    "robustness": "unusual but legal sequences",
}


class Depth(Enum):
    """How many cases each model but the plain one takes.

    NARROW: one training and one checkpoint. WIDE: each value of each option once. FULL: all
    combinations of options.
    """

    NARROW = "narrow"
    WIDE = "wide"
    FULL = "full"


def depth_named(name: str) -> Depth:
    """The depth called `name`.

    Raises:
        UsageError: there is none.
    """
    try:
        return Depth(name)
    except ValueError:
        raise unknown("depth", name, [depth.value for depth in Depth]) from None


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What says what is right.

    Attributes:
        program: function of `conformance.execute` that writes its histories of a case.
        cannot: scenarios that it is itself wrong in.
        job_by_job: whether it needs the ranks of each job of a case; else one job does them all.
    """

    program: str
    cannot: frozenset[str] = frozenset()
    job_by_job: bool = False


BASELINES: Mapping[str, Baseline] = {
    "oracle": Baseline(program="run_oracle"),
    # docs/findings/ddp-two-forwards.md
    "ddp": Baseline(program="run_baseline", cannot=frozenset({"two_forwards"}), job_by_job=True),
}
"""By name: all ranks in one process, or DDP on the ranks of the run for what one cannot train."""


def check_ids() -> frozenset[str]:
    """The ids of all checks."""
    return _written("conformance.checks", r'^(?:@check\(|_REGISTER\[)\s*"(.+?)"')


def model_names() -> frozenset[str]:
    """The names of all model cases but drawn ones."""
    return _written("conformance.models", r'^NAME = "(.+)"')


def mutant_names() -> frozenset[str]:
    """The names of all mutants."""
    classes = _written("conformance.mutants", r"^@mutant\((?:.*\n)+?class (\w+)")
    return frozenset(map(snake_case, classes))


def snake_case(name: str) -> str:
    """A class's name as that of what it is registered as: ``LastStepLost``, ``last_step_lost``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


@cache
def _written(package: str, pattern: str) -> frozenset[str]:
    """What `pattern` finds in the modules of a package of this suite, which is not imported."""
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    modules = (module for folder in folders for module in Path(folder).glob("*.py"))
    texts = (module.read_text(encoding="utf-8") for module in modules)
    return frozenset(name for text in texts for name in re.findall(pattern, text, re.MULTILINE))

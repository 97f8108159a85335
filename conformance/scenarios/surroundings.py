"""What surrounds a save or a load: modes and flags of the model, random numbers, global state.

None of that is saved, so none of it may be another one afterwards. Knows no check.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.adapter import Wrapped
from conformance.ranks.fingerprint import changes, fingerprint
from conformance.scenarios.run import Run

OWN_BUSINESS = frozenset({"non-daemon threads", "child processes"})
"""Global state that a save may leave changed: it may go on in the background."""


@contextmanager
def left_alone(run: Run, w: Wrapped, act: str) -> Iterator[None]:
    """Record what is not as it was after the body, which is called `act`."""
    if run.recorder is None:  # the truth has no wrapper that could change anything
        yield
        run.writer.write("surroundings_changed", [], act=act)
        return
    before = surroundings(run, w)
    yield
    found = changes(before, surroundings(run, w))
    changed = [name for name in found if name not in OWN_BUSINESS]
    run.writer.write("surroundings_changed", changed, act=act)


def surroundings(run: Run, w: Wrapped) -> dict[str, Any]:
    """Name to value of what surrounds the wrapped model, as `changes` compares it."""
    state = fingerprint(run.device) | _random_numbers(run.device)
    for name, module in w.module.named_modules():  # wrappers and what is in them, each by its path
        state[f"training mode of {name or 'the model'}"] = module.training
    # a tied one by each of its names, so that untying it adds none
    for name, parameter in w.module.named_parameters(remove_duplicate=False):
        state[f"requires_grad of {name}"] = parameter.requires_grad
        state[f"gradient of {name}"] = parameter.grad is not None
    return state


def _random_numbers(device: torch.device) -> dict[str, Any]:
    """States of the generators that a rank draws from."""
    state: dict[str, Any] = {
        "random numbers of torch": torch.get_rng_state().numpy().tobytes(),
        "random numbers of Python": random.getstate(),
    }
    if device.type != "cpu":
        drawn = torch.get_device_module(device).get_rng_state(device)
        state["random numbers of the accelerator"] = drawn.numpy().tobytes()
    if "numpy" in sys.modules:
        drawn = sys.modules["numpy"].random.get_state(legacy=False)["state"]
        state["random numbers of numpy"] = {
            name: value.tobytes() if hasattr(value, "tobytes") else value
            for name, value in drawn.items()
        }
    return state

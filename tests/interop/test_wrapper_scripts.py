"""Scripts for torch's ``FullyShardedDataParallel`` run with ours when the import is swapped.

Each script is run twice on two CPU ranks, and everything that it kept must be the same: losses and
tensors bit for bit, names, keys and shapes; the kinds of its warnings and errors, and what their
texts say of the fragments that its callers know.
"""

from __future__ import annotations

import ast
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import fsdp as torch_fsdp

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel
from tests.fsdp.ranks import agreed, on_ranks
from tests.interop.wrapper_scripts import DEVICE_SCRIPTS, IMPORTS, SCRIPTS

PACKAGES = ("torch.distributed.fsdp", "fsdp")
ALL = SCRIPTS | DEVICE_SCRIPTS


FRAGMENTS = (
    "FSDP will not all-gather parameters for containers that do not implement forward",
    "FSDP is switching to use `NO_SHARD` instead of",
    "The `NO_SHARD` sharding strategy is deprecated",
    "Both mixed precision and an auto_wrap_policy were specified",
    "has both parameters with requires_grad=True and False",
)
NOT_COMPARED = (
    "full_state_dict will be returned",  # torch says so also if that is what was asked for
    "state_dict_type() are being deprecated",  # of torch's functions
    "AccumulateGrad node's stream does not match",  # autograd's, of torch's wrapper on accelerators
)


def of_interest(warning: warnings.WarningMessage) -> list[list[str]]:
    """What callers know a warning by: its kind, and a fragment of its text or all of it."""
    text = str(warning.message)
    if any(fragment in text for fragment in NOT_COMPARED):
        return []
    known = next((fragment for fragment in FRAGMENTS if fragment in text), text)
    return [["warning", warning.category.__name__, known]]


def kept(package: str, script: str) -> list[Any]:
    """What a script keeps, with that package as its import, and its warnings."""
    found: list[Any] = []

    def keep(what: str, value: Any) -> None:
        found.append([what, value])

    names: dict[str, Any] = {"__name__": "script", "keep": keep}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(compile(IMPORTS.format(package=package) + script, f"{package} script", "exec"), names)
    return found + [each for warning in seen for each in of_interest(warning)]


def bit_for_bit(one: Any, other: Any) -> bool:
    """Whether what two scripts kept is the same."""
    return repr(one) == repr(other)


def within_noise(one: Any, other: Any) -> bool:
    """Whether it is the same but for the last digits of numbers, which kernels of accelerators
    choose by where memory lies.
    """
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and within_noise(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(within_noise, one, other))
    return bit_for_bit(one, other)


def _differences(
    context: RankContext, script: str, same: Callable[[Any, Any], bool] = bit_for_bit
) -> list[str]:
    del context
    theirs, ours = (kept(package, ALL[script]) for package in PACKAGES)
    wrong = [
        f"torch {one!r:.300}, ours {other!r:.300}"
        for one, other in zip(theirs, ours, strict=False)
        if not same(one, other)
    ]
    wrong += [f"torch {one!r:.300}, ours nothing" for one in theirs[len(ours) :]]
    wrong += [f"torch nothing, ours {other!r:.300}" for other in ours[len(theirs) :]]
    errors = [each for each in theirs if each[0] == "error" and not each[1][1]]
    return wrong + [f"torch itself says {each}" for each in errors]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_keeps_the_same_with_either_import(script: str) -> None:
    assert agreed(_differences, 2, script=script) == []


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
@pytest.mark.parametrize("script", DEVICE_SCRIPTS)
def test_a_script_keeps_the_same_on_accelerators(script: str) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert agreed(_differences, 2, device=accelerator.type, script=script, same=within_noise) == []


WITHOUT = {
    "offload": {"offload_params=True": "offload_params=False"},
    "sync": {
        "sync_module_states=True": "sync_module_states=False",
        "make(seed=RANK)": "make(seed=0)",
        "shift.add_(RANK)": "shift.add_(0)",
    },
}
"""What makes of each script one that needs no accelerator and must keep the same on the CPU."""


def _ours(context: RankContext, script: str) -> tuple[list[Any], list[Any]]:
    del context
    text = plain = DEVICE_SCRIPTS[script]
    for old, new in WITHOUT[script].items():
        assert old in plain
        plain = plain.replace(old, new)
    return kept("fsdp", text), kept("fsdp", plain)


@pytest.mark.parametrize("script", DEVICE_SCRIPTS)
def test_what_torchs_refuses_on_the_cpu_ours_does_there(script: str) -> None:
    for found, wanted in on_ranks(_ours, 2, script=script):
        assert "loss" in {what for what, *_ in found}
        assert found == wanted


def arguments_used() -> set[str]:
    """Arguments of the constructor that some script gives by name."""
    trees = [ast.parse(text) for text in SCRIPTS.values()]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "FSDP"]
    return {keyword.arg for call in named for keyword in call.keywords if keyword.arg}


def test_the_scripts_use_every_argument_of_the_constructor() -> None:
    ours = inspect.signature(FullyShardedDataParallel).parameters
    theirs = inspect.signature(torch_fsdp.FullyShardedDataParallel).parameters
    assert list(ours) == list(theirs)
    assert set(ours) == arguments_used()

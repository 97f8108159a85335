"""Ranks that keep other things of one parameter are refused alike, whatever is done with them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import checkpoint
from fsdp.optim_state.judge import facts_of, ranks_differ, same
from fsdp.reshard import reshard
from tests.fsdp.plain import build
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.optim_state.running import optimizer_for, step, wrapped

Entry = dict[str, Any]


def _further(entry: Entry) -> None:
    entry["step"] += 1


def _whole_number(entry: Entry) -> None:
    entry["step"] = 1


def _no_step(entry: Entry) -> None:
    del entry["step"]


def _no_moment(entry: Entry) -> None:
    del entry["exp_avg"]


def _double(entry: Entry) -> None:
    entry["exp_avg"] = entry["exp_avg"].double()


def _nothing(entry: Entry) -> None:
    entry.clear()


STEP, MOMENT = "tensor(1, torch.float32)", "elements of torch.float32"
SPOILS: dict[str, tuple[Callable[[Entry], None], str, str, str]] = {
    "further": (_further, "step", "tensor(2, torch.float32)", STEP),
    "kind": (_whole_number, "step", "1", STEP),
    "no_step": (_no_step, "step", "absent", STEP),
    "no_moment": (_no_moment, "exp_avg", "absent", MOMENT),
    "dtype": (_double, "exp_avg", "elements of torch.float64", MOMENT),
    "nothing": (_nothing, "exp_avg", "absent", MOMENT),
}


def _refused(
    context: RankContext, *, spoil: str, spoiled: int, original: bool, path: str
) -> list[list[str]]:
    """What three ways say when one rank keeps other things of a parameter that all hold."""
    model, other = wrapped(use_orig_params=original), wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "adamw")
    step(model, optimizer, 0, context.rank)
    if context.rank == spoiled:
        sizes = {name: param.numel() for name, param in build().named_parameters()}
        named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in model.named_parameters()]
        shared = next(p for n, p in named if 0 < p.numel() < sizes.get(n, 10**9))
        SPOILS[spoil][0](optimizer.state[shared])
    fresh = optimizer_for(other, "adamw")
    found = [
        error_of(lambda: FSDP.optim_state_dict(model, optimizer)),
        error_of(lambda: checkpoint.save(path, model, optimizer)),
        error_of(lambda: reshard(model, other, optimizer, fresh)),
    ]
    assert not fresh.state
    assert not Path(path).exists()
    return found


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_difference_between_ranks_has_one_verdict(
    spoil: str, tmp_path: Path, *, original: bool
) -> None:
    _, state, odd, usual = SPOILS[spoil]
    where = {"spoil": spoil, "original": original, "path": str(tmp_path / "saved")}
    for spoiled in (0, 1):
        there, here = (odd, usual) if spoiled else (usual, odd)
        found = on_ranks(_refused, 2, spoiled=spoiled, **where)
        for number, kind in enumerate((AssertionError, ValueError, ValueError)):
            errors = tuple(ways[number] for ways in found)
            named_on_every_rank(errors, kind, f"Rank 1 has different values for {state} of '")
            named_on_every_rank(errors, kind, f"it is {there}, and {here} on rank 0")


class _Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class _Scale:
    value: float


class _Thing:
    """Shows its address, as objects do."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, 3.0),
        (float("nan"), float("nan")),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (_Scale(1.0), _Scale(1.0)),
        (_Thing(), _Thing()),
        (torch.tensor(5).numpy()[()], 5),
    ],
)
def test_what_is_equal_is_the_same(one: Any, other: Any) -> None:
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, 4),
        (0.1, 0.1 + 1e-17 * 8),
        (1, True),
        (torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64)),
        (torch.tensor(3.0), 3.0),
        (torch.tensor([3.0]), torch.tensor(3.0)),
        ((1, 2), [1, 2]),
        (_Colour.RED, _Colour.BLUE),
        (_Scale(1.0), _Scale(2.0)),
        (_Thing(), _Scale(1.0)),
        (torch.tensor(5).numpy()[()], 6),
    ],
)
def test_what_differs_is_not_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)


def test_the_first_rank_that_differs_is_named() -> None:
    here = facts_of({"m": torch.float32}, {"step": 3})
    assert ranks_differ("w", {4: here}) is None
    assert ranks_differ("w", {4: here, 7: dict(here)}) is None
    found = ranks_differ("w", {4: here, 7: dict(here), 9: facts_of({}, {"step": 3})})
    assert found is not None
    assert found.startswith("Rank 9 has different values for m of 'w': it is absent, and elements")
    assert "on rank 4" in found

"""Beside tensor parallelism, ours and torch's wrapper train alike and take each other's states."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, StateDictType
from tests.fsdp.parallel import Block, data_rank, parallel, square, wrapped
from tests.fsdp.plain import batch, loss_of, optimizer_of
from tests.fsdp.ranks import agreed, on_ranks

LONG = pytest.mark.long
Theirs = torch_fsdp.FullyShardedDataParallel


def _theirs(mesh: DeviceMesh, *, original: bool) -> Any:
    return Theirs(
        parallel(mesh["tp"]),
        device_mesh=mesh["dp"],
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=original,
    )


def _run(model: Any, rank: int, kind: str) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer, losses = optimizer_of(model.parameters(), kind), []
    for step in range(2):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, optimizer


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _state(wrapper: Any, kinds: Any, model: Any, kind: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with wrapper.state_dict_type(model, kinds[kind]):
            return dict(model.state_dict())


def _load(wrapper: Any, kinds: Any, model: Any, kind: str, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with wrapper.state_dict_type(model, kinds[kind]):
            model.load_state_dict(state)


def _exchanged(context: RankContext, *, original: bool, kind: str) -> list[str]:
    mesh = square()
    rank = data_rank(context, mesh)
    # Torch saves one state right where original parameters are on the CPU, not several.
    steps_of = "sgd" if original else "adamw"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = wrapped(mesh, use_orig_params=original), _theirs(mesh, original=original)
        mine, optimizer = _run(ours, rank, steps_of)
        others, other_optimizer = _run(theirs, rank, steps_of)
    assert mine == others
    one = _state(FullyShardedDataParallel, StateDictType, ours, kind)
    two = _state(Theirs, torch_fsdp.StateDictType, theirs, kind)
    assert list(one) == list(two)
    for key, value in two.items():
        assert one[key].dtype == value.dtype
        assert torch.equal(_whole(one[key]), _whole(value)), key
    fresh = wrapped(mesh, use_orig_params=original)
    _load(FullyShardedDataParallel, StateDictType, fresh, kind, two)
    again = _state(FullyShardedDataParallel, StateDictType, fresh, kind)
    assert all(torch.equal(_whole(again[key]), _whole(one[key])) for key in one)
    if kind == "SHARDED_STATE_DICT":
        # The other way round only what they take: plain parameters are on two dims there.
        plain = {key: two[key] if key.startswith("out") else value for key, value in one.items()}
        other = _theirs(mesh, original=original)
        _load(Theirs, torch_fsdp.StateDictType, other, kind, plain)
        again = _state(Theirs, torch_fsdp.StateDictType, other, kind)
        assert all(torch.equal(_whole(again[key]), _whole(one[key])) for key in one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Theirs.state_dict_type(theirs, torch_fsdp.StateDictType[kind]):
            saved = Theirs.optim_state_dict(theirs, other_optimizer)
    with FullyShardedDataParallel.state_dict_type(ours, StateDictType[kind]):
        found = FullyShardedDataParallel.optim_state_dict(ours, optimizer)
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(ours, optimizer, saved)
    assert list(found["state"]) == list(saved["state"])
    for name, entry in saved["state"].items():
        for key, value in entry.items():
            assert torch.equal(_whole(found["state"][name][key]), _whole(value)), (name, key)
    for number, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(loaded["state"][number][key], value), (number, key)
    return sorted({type(value).__name__ for value in two.values()})


@LONG
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("FULL_STATE_DICT", ["DTensor", "Tensor"]), ("SHARDED_STATE_DICT", ["DTensor"])],
    ids=["full", "sharded"],
)
def test_losses_are_torchs_and_its_states_are_loaded(
    *, kind: str, theirs: list[str], original: bool
) -> None:
    assert agreed(_exchanged, 4, kind=kind, original=original) == theirs


def _clipped(context: RankContext) -> list[float]:
    """Torch's norm is that of this rank's part of tensor parallelism: each rank has another."""
    mesh = square()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _theirs(mesh, original=False)
        loss_of(model, batch(0, data_rank(context, mesh))).backward()
        theirs = model.clip_grad_norm_(1.0).item()
    ours = wrapped(mesh)
    loss_of(ours, batch(0, data_rank(context, mesh))).backward()
    return [theirs, ours.clip_grad_norm_(1.0).item()]


@LONG
def test_a_norm_is_the_same_on_all_ranks() -> None:
    found = on_ranks(_clipped, 4)
    assert len({theirs for theirs, _ in found}) == 2
    assert len({ours for _, ours in found}) == 1

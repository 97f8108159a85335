"""What ranks must agree on before a save, and models that are in use: refused on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, checkpoint
from fsdp.checkpoint import CheckpointError, saving, sharded
from fsdp.reshard import agreed, reshard
from fsdp.reshard.pieces import pieces_of
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.reshard.faces import everything, fresh, made, marked, plain, same

FACES = pytest.mark.parametrize("face", ["flat", "fully"])
RANKS = [0, 1]


def test_tensors_that_are_only_attributes_are_no_state() -> None:
    model = plain()
    model.notes = torch.ones(3)
    assert "notes" not in {name for piece in pieces_of(model, [0]) for name in piece.names}


# Models in use


def _in_summon(context: RankContext, *, path: str) -> list[list[str]]:
    model, other = made("flat", RANKS), made("flat", RANKS, seed=8)
    assert model is not None
    assert other is not None
    checkpoint.save(path, other)
    before = everything(model, None)
    calls = [
        lambda: checkpoint.load(path, model),
        lambda: checkpoint.save(path, model),
        lambda: reshard(other, model),
        lambda: reshard(model, other),
    ]
    with FullyShardedDataParallel.summon_full_params(model):
        errors = [error_of(call) for call in calls]
    same(everything(model, None), before)
    return errors


def test_nothing_is_lost_inside_summoned_parameters(tmp_path: Path) -> None:
    found = on_ranks(_in_summon, 2, path=str(tmp_path / "saved"))
    for errors in found:
        named_on_every_rank(tuple(errors), RuntimeError, "is in use")


def _in_forward(context: RankContext, *, path: str, face: str) -> list[str]:
    model, errors = made(face, RANKS), []
    assert model is not None
    inner: Any = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    inner.register_forward_hook(
        lambda *_: errors.append(error_of(lambda: checkpoint.save(path, model)))
    )
    model(torch.arange(6).view(2, 3)).sum().backward()
    checkpoint.save(path, model)
    return errors[0]


@FACES
def test_a_save_inside_forward_is_refused_and_forward_goes_on(face: str, tmp_path: Path) -> None:
    errors = on_ranks(_in_forward, 2, path=str(tmp_path / "saved"), face=face)
    named_on_every_rank(errors, RuntimeError, "is in use")


# Ranks that differ


def _differ(context: RankContext, *, path: str, face: str, how: str) -> list[str]:
    model = made(face, RANKS)
    optimizer = marked(model)
    assert model is not None
    assert optimizer is not None
    if context.rank == 1:
        first = optimizer.state[max(optimizer.state, key=torch.numel)]
        if how == "lr":
            optimizer.param_groups[0]["lr"] = 0.25
        elif how == "step":
            first["step"] += 1
        elif how == "dtype":
            first["twice"] = first["twice"].double()
        else:
            first["call"] = lambda: None
    error = error_of(lambda: checkpoint.save(path, model, optimizer))
    assert not Path(path).exists()
    return error


@FACES
@pytest.mark.parametrize(
    ("how", "kind", "fragment"),
    [
        (
            "lr",
            ValueError,
            "Rank 1 has different values for lr of 'parameter group 0': it is 0.25, and 1 ",
        ),
        (
            "step",
            ValueError,
            "it is tensor(4, torch.float32), and tensor(3, torch.float32) on rank 0",
        ),
        ("dtype", ValueError, "it is elements of torch.float64, and elements of torch.float32"),
        ("unpicklable", TypeError, "cannot be pickled"),
    ],
    ids=["lr", "step", "dtype", "unpicklable"],
)
def test_ranks_that_trained_apart_save_nothing(
    how: str, kind: type[Exception], fragment: str, face: str, tmp_path: Path
) -> None:
    errors = on_ranks(_differ, 2, path=str(tmp_path / "saved"), face=face, how=how)
    named_on_every_rank(errors, kind, fragment)


def _idle_states(context: RankContext, *, path: str) -> None:
    model = made("original_one", RANKS)
    optimizer = marked(model)
    assert model is not None
    assert optimizer is not None
    lacking = [param for param in model.parameters() if not param.numel()]
    assert lacking
    for param in lacking:
        optimizer.state[param] = {"step": torch.tensor(99.0)}
    checkpoint.save(path, model, optimizer)


def test_ranks_without_elements_have_no_say(tmp_path: Path) -> None:
    """Some optimizers begin with a step count, which never counts where nothing is stepped on."""
    on_ranks(_idle_states, 2, path=str(tmp_path / "saved"))
    model = plain(seed=8)
    optimizer = fresh(model)
    assert optimizer is not None
    checkpoint.load(tmp_path / "saved", model, optimizer)
    assert [float(entry["step"]) for entry in optimizer.state.values()] == [3.0] * len(
        list(model.parameters())
    )


def _exchanges(context: RankContext, *, path: str) -> int:
    model = made("fully", RANKS)
    optimizer = marked(model)
    assert model is not None
    assert optimizer is not None
    for entry in optimizer.state.values():
        # Equal, and with other bytes as a pickle: one object for all, or one for each.
        entry["word"] = "kept" if context.rank else "".join(["ke", "pt"])
    calls = []
    told = agreed.told_by_all
    agreed.told_by_all = lambda *args: calls.append(args) or told(*args)
    try:
        checkpoint.save(path, model, optimizer)
    finally:
        agreed.told_by_all = told
    return len(calls)


def test_equal_states_are_not_gathered(tmp_path: Path) -> None:
    assert on_ranks(_exchanges, 2, path=str(tmp_path / "saved")) == (0, 0)


def _unread(context: RankContext, *, path: str, rank: int, form: str) -> list[str]:
    model = made("flat", RANKS)
    assert model is not None
    module: Any = sharded if form == "sharded" else saving
    digest_files = module.digest_files

    def fails(directory: Path, names: list[str]) -> Any:
        if context.rank == rank and names:
            raise OSError(5, f"cannot read {names}")
        return digest_files(directory, names)

    module.digest_files = fails
    try:
        return error_of(lambda: checkpoint.save(path, model, marked(model), format=form))
    finally:
        module.digest_files = digest_files


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("form", "kind", "fragment"),
    [
        ("sharded", CheckpointError, "cannot be written: OSError: [Errno 5] cannot read"),
        ("safetensors", OSError, "[Errno 5] cannot read"),
    ],
    ids=["sharded", "safetensors"],
)
def test_what_one_rank_cannot_digest_fails_on_all_ranks(
    form: str, kind: type[Exception], fragment: str, rank: int, tmp_path: Path
) -> None:
    errors = on_ranks(_unread, 2, path=str(tmp_path / "saved"), rank=rank, form=form)
    named_on_every_rank(errors, kind, fragment)
    assert errors[1 - rank][1].startswith(f"on rank {rank}: ")
    assert not list(tmp_path.iterdir())


# Two optimizers


def _second_fails(context: RankContext) -> list[str]:
    model = made("original", RANKS)
    assert model is not None
    params = list(model.parameters())
    pair = [torch.optim.SGD(p, lr=1.0, momentum=0.5) for p in (params[:2], params[2:])]
    model(torch.arange(6).view(2, 3)).sum().backward()
    for optimizer in pair:
        optimizer.step()
    state = checkpoint.get_optimizer_state_dict(model, pair)
    pair[0].param_groups[0]["lr"] = 0.5
    real, calls = FullyShardedDataParallel.optim_state_dict_to_load, []

    def second(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("does not fit")
        return real(*args, **kwargs)

    FullyShardedDataParallel.optim_state_dict_to_load = second
    try:
        error = error_of(lambda: checkpoint.set_optimizer_state_dict(model, pair, state))
    finally:
        FullyShardedDataParallel.optim_state_dict_to_load = real
    assert pair[0].param_groups[0]["lr"] == 0.5
    return error


def test_an_optimizer_that_does_not_fit_leaves_the_others() -> None:
    named_on_every_rank(on_ranks(_second_fails, 2), ValueError, "does not fit")

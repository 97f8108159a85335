"""Through a directory: saved in any form, loaded in any other, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

from conformance.ranks import RankContext
from fsdp import checkpoint
from fsdp.checkpoint import sharded
from tests.fsdp.ranks import on_ranks
from tests.reshard.faces import ALL, everything, fresh, made, marked, plain, same

FORMATS = pytest.mark.parametrize("form", ["sharded", "safetensors"])


def _through(  # noqa: PLR0913 - a cell of the matrix
    context: RankContext,
    *,
    path: str,
    source: str,
    target: str,
    one: list[int],
    other: list[int],
    form: str,
) -> None:
    groups = [dist.new_group(one), dist.new_group(other)]
    here = made(source, one)
    if here is not None:
        before = marked(here)
        untouched = everything(here, before)
        checkpoint.save(path, here, before, process_group=groups[0], format=form)
        same(everything(here, before), untouched)
    dist.barrier()
    there, wanted = made(target, other, seed=8), made(target, other)
    if there is not None and wanted is not None:
        after, expected = fresh(there, lr=0.5), marked(wanted)
        checkpoint.load(path, there, after, process_group=groups[1])
        same(everything(there, after), everything(wanted, expected))


def check(
    path: Path,
    source: str,
    target: str,
    *,
    one: list[int],
    other: list[int],
    form: str = "sharded",
) -> None:
    on_ranks(
        _through,
        max(*one, *other) + 1,
        path=str(path / "saved"),
        source=source,
        target=target,
        one=one,
        other=other,
        form=form,
    )
    assert [each.name for each in path.iterdir()] == ["saved"], "something was left beside it"


@pytest.mark.parametrize(
    ("source", "target"),
    [("flat", "fully"), ("fully", "flat"), ("original", "plain"), ("plain", "original")],
)
def test_any_form_loads_any_other(source: str, target: str, tmp_path: Path) -> None:
    check(tmp_path, source, target, one=[0, 1], other=[0, 1])


@pytest.mark.long
@FORMATS
@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_every_form_loads_every_other(source: str, target: str, form: str, tmp_path: Path) -> None:
    check(tmp_path, source, target, one=[0, 1, 2], other=[0, 2], form=form)


@pytest.mark.parametrize(
    ("source", "target", "one", "other", "form"),
    [
        ("flat", "fully", [0], [0, 1], "sharded"),
        ("fully_last_dim", "original_one", [0, 1], [1], "safetensors"),
        ("flat", "fully_root", [0, 1, 2], [2, 0], "safetensors"),
        ("no_shard", "flat_norm", [0, 1], [0, 1, 2], "sharded"),
        ("ddp", "original_no_shard", [0, 1], [0, 1, 2], "safetensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(map(str, value)),
)
def test_other_worlds(
    source: str, target: str, one: list[int], other: list[int], form: str, tmp_path: Path
) -> None:
    check(tmp_path, source, target, one=one, other=other, form=form)


@pytest.mark.parametrize(("source", "target"), [("hybrid", "fully"), ("flat", "fully_hybrid")])
def test_replicas(source: str, target: str, tmp_path: Path) -> None:
    check(tmp_path, source, target, one=[0, 1, 2, 3], other=[0, 1, 2, 3])


@FORMATS
def test_one_process_without_a_group(form: str, tmp_path: Path) -> None:
    model, again = plain(), plain(seed=8)
    optimizer, other = marked(model), fresh(again)
    checkpoint.save(tmp_path / "saved", model, optimizer, format=form)
    checkpoint.load(tmp_path / "saved", again, other)
    same(everything(again, other), everything(model, optimizer))


def test_safetensors_are_those_of_the_plain_model(tmp_path: Path) -> None:
    on_ranks(_saves, 2, path=str(tmp_path / "saved"), face="flat", form="safetensors")
    found = load_file(tmp_path / "saved" / "model.safetensors")
    wanted = {k: v for k, v in plain().state_dict().items() if isinstance(v, torch.Tensor)}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    states = load_file(tmp_path / "saved" / "optimizer.safetensors")
    assert torch.equal(states["state.emb.weight.twice"], wanted["emb.weight"] * 2)


def test_a_directory_has_the_names_of_the_plain_model(tmp_path: Path) -> None:
    on_ranks(_saves, 2, path=str(tmp_path / "saved"), face="flat", form="sharded")
    saved = FileSystemReader(tmp_path / "saved").read_metadata()
    assert sharded.is_own(saved)
    metadata = saved.state_dict_metadata
    found = {key.removeprefix("model.") for key in metadata if key.startswith("model.")}
    wanted = set(plain().state_dict()) - {"counter._extra_state"}
    assert found == wanted | {"counter._extra_state.count"}
    assert {"emb.weight", "out.weight"} <= found, "both names of the tied weight"


def test_one_name_of_a_tied_tensor_is_enough(tmp_path: Path) -> None:
    state = plain().state_dict()
    del state["emb.weight"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_with_torch({"model": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    model = plain(seed=8)
    checkpoint.load(tmp_path / "saved", model)
    assert torch.equal(model.emb.weight, plain().emb.weight)


class Tied(nn.Module):
    """One weight under two names, in the order in which they are given."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(3, 2))
        for name in names:
            self.add_module(name, nn.ParameterDict({"weight": weight}))


@FORMATS
def test_a_tied_tensor_may_have_its_names_in_another_order(form: str, tmp_path: Path) -> None:
    """Its optimizer state and its group are under the first name of the model that was saved."""
    source, model = Tied("first", "second"), Tied("second", "first")
    optimizer, other = marked(source), fresh(model)
    checkpoint.save(tmp_path / "saved", source, optimizer, format=form)
    checkpoint.load(tmp_path / "saved", model, other)
    wanted = everything(source, optimizer)
    assert "first.weight" in wanted
    turned = {key.replace("first", "second"): value for key, value in wanted.items()}
    same(everything(model, other), turned)


def _saves(context: RankContext, *, path: str, face: str, form: str) -> None:
    ranks = list(range(context.world_size))
    model = made(face, ranks)
    assert model is not None
    checkpoint.save(path, model, marked(model), format=form)


def _without_state(context: RankContext, *, path: str, face: str) -> None:
    """A parameter that never had a gradient has no state, neither here nor there."""
    ranks = list(range(context.world_size))
    model, again = made(face, ranks), made(face, ranks, seed=8)
    assert model is not None
    before, after = fresh(model), marked(again)
    assert before is not None
    checkpoint.save(path, model, before)
    checkpoint.load(path, again, after)
    assert not after.state
    assert not before.state


@pytest.mark.parametrize("face", ["flat", "fully"])
def test_no_state_stays_no_state(face: str, tmp_path: Path) -> None:
    on_ranks(_without_state, 2, path=str(tmp_path / "saved"), face=face)


def _asynchronous(context: RankContext, *, path: str, face: str) -> None:
    ranks = list(range(context.world_size))
    model, again = made(face, ranks), made(face, ranks, seed=8)
    assert model is not None
    assert again is not None
    optimizer, other = marked(model), fresh(again)
    wanted = everything(model, optimizer)
    group = dist.new_group(backend="gloo")
    future = checkpoint.async_save(path, model, optimizer, process_group=group)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)  # training goes on
        for entry in optimizer.state.values():
            for value in filter(torch.is_tensor, entry.values()):
                value.fill_(9.0)
    assert future.result(timeout=120) is None
    checkpoint.load(path, again, other)
    same(everything(again, other), wanted)


@pytest.mark.parametrize("face", ["flat", "fully"])
def test_an_asynchronous_save_has_the_state_of_its_call(face: str, tmp_path: Path) -> None:
    on_ranks(_asynchronous, 2, path=str(tmp_path / "saved"), face=face)


def _shared_group(context: RankContext, *, path: str) -> None:
    model: Any = made("fully", [0, 1])
    with pytest.raises(ValueError, match="a process_group of its own"):
        checkpoint.async_save(path, model)


def test_an_asynchronous_save_needs_its_own_group(tmp_path: Path) -> None:
    on_ranks(_shared_group, 2, path=str(tmp_path / "saved"))


def _stale(context: RankContext, *, path: str, face: str) -> None:
    """Parameters that were kept whole after a forward are those of before the load."""
    ranks = list(range(context.world_size))
    tokens = torch.arange(6).view(2, 3)
    source, model = plain(), made(face, ranks, seed=8)
    assert model is not None
    if context.rank == 0:
        checkpoint.save(
            path, source, process_group=dist.new_group([0], use_local_synchronization=True)
        )
    dist.barrier()
    before = model(tokens)  # a backward could follow, so whole parameters are kept
    checkpoint.load(path, model)
    with torch.no_grad():
        after, wanted = model(tokens), source(tokens)
    assert not torch.allclose(before, wanted)
    torch.testing.assert_close(after, wanted)


@pytest.mark.parametrize("face", ["flat_keep", "fully_keep", "original"])
def test_nothing_is_stale_after_a_load(face: str, tmp_path: Path) -> None:
    on_ranks(_stale, 2, path=str(tmp_path / "saved"), face=face)

"""Damaged, incomplete and foreign checkpoints: refused by name on every rank, nothing touched."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import Job, RankContext, RankVerdict, shared_pool
from fsdp import checkpoint, fully_shard
from fsdp.checkpoint import CheckpointError, directory, sharded
from fsdp.checkpoint.contents import state_of
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.reshard.faces import Counter, Marks, Odd, everything, fresh, made, marked, plain, same

FACES = pytest.mark.parametrize("face", ["flat", "fully"])
FORMS = pytest.mark.parametrize("form", ["sharded", "safetensors"])


def _saves(context: RankContext, *, path: str, face: str, seed: int = 7, form: str) -> None:
    model = made(face, list(range(context.world_size)), seed)
    assert model is not None
    checkpoint.save(path, model, marked(model), format=form)


def _refuses(context: RankContext, *, path: str, face: str) -> list[str]:
    model = made(face, list(range(context.world_size)), seed=8)
    assert model is not None
    optimizer = marked(model, lr=0.5)
    before = everything(model, optimizer)
    error = error_of(lambda: checkpoint.load(path, model, optimizer))
    same(everything(model, optimizer), before)
    return error


def _loads(context: RankContext, *, path: str, face: str, seed: int) -> None:
    ranks = list(range(context.world_size))
    model, wanted = made(face, ranks, seed=9), made(face, ranks, seed)
    assert model is not None
    assert wanted is not None
    optimizer, expected = fresh(model), marked(wanted)
    checkpoint.load(path, model, optimizer)
    same(everything(model, optimizer), everything(wanted, expected))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated": ("__1_0.distcp", cut, "was not written to its end"),
    "empty": ("__0_0.distcp", empty, "has 0 bytes"),
    "flipped": ("__1_0.distcp", flip, "its bits have changed"),
    "longer": ("__0_0.distcp", lengthen, "was changed since"),
    "missing": ("__1_0.distcp", Path.unlink, "is missing"),
    "metadata flipped": (".metadata", flip, "its bits have changed"),
    "metadata missing": (".metadata", Path.unlink, "is missing"),
    "digests missing": ("digests.json", Path.unlink, "which is written last"),
    "digests cut": ("digests.json", cut, "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    damaged(damage, "flat", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_dtensors(damage: str, tmp_path: Path) -> None:
    damaged(damage, "fully", tmp_path)


def damaged(damage: str, face: str, tmp_path: Path) -> None:
    name, change, fragment = DAMAGES[damage]
    path = tmp_path / "saved"
    on_ranks(_saves, 2, path=str(path), face=face, form="sharded")
    change(path / name)
    errors = on_ranks(_refuses, 2, path=str(path), face=face)
    named_on_every_rank(errors, CheckpointError, fragment)
    named_on_every_rank(errors, CheckpointError, str(path / name))


@pytest.mark.parametrize(
    ("name", "change", "fragment"),
    [
        ("model.safetensors", cut, "was not written to its end"),
        ("optimizer.safetensors", flip, "its bits have changed"),
        ("optimizer.safetensors", Path.unlink, "is missing"),
        ("digests.json", Path.unlink, "is missing"),
    ],
    ids=["truncated", "flipped", "missing", "digests"],
)
def test_damaged_safetensors_are_refused(
    name: str, change: Callable[[Path], None], fragment: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    on_ranks(_saves, 2, path=str(path), face="flat", form="safetensors")
    change(path / name)
    errors = on_ranks(_refuses, 2, path=str(path), face="flat")
    named_on_every_rank(errors, CheckpointError, fragment)
    named_on_every_rank(errors, CheckpointError, str(path / name))


def _foreign(context: RankContext, *, path: str) -> None:
    """As users of PyTorch save: no digest file."""
    writer = FileSystemWriter(path)
    save_with_torch({"model": plain().state_dict()}, storage_writer=writer)


@pytest.mark.parametrize(
    ("name", "change", "fragment"),
    [
        ("__0_0.distcp", cut, "was not written to its end"),
        ("__1_0.distcp", Path.unlink, "is missing"),
        (".metadata", empty, "is damaged"),
    ],
    ids=["short", "missing", "metadata"],
)
def test_foreign_checkpoints_lack_nothing(
    name: str, change: Callable[[Path], None], fragment: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    on_ranks(_foreign, 2, path=str(path))
    change(path / name)
    errors = on_ranks(_refuses, 2, path=str(path), face="fully")
    named_on_every_rank(errors, CheckpointError, fragment)
    named_on_every_rank(errors, CheckpointError, str(path / name))


def test_a_state_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    on_ranks(_foreign, 2, path=str(tmp_path / "saved"))
    errors = on_ranks(_refuses, 2, path=str(tmp_path / "saved"), face="fully")
    named_on_every_rank(errors, ValueError, "has no optimizer state")


def test_a_foreign_file_may_be_longer_than_what_is_known_of_it(tmp_path: Path) -> None:
    """How its tensors are stored is for its writer to say; only the least size is known."""
    on_ranks(_foreign, 2, path=str(tmp_path / "saved"))
    lengthen(tmp_path / "saved" / "__0_0.distcp")
    errors = on_ranks(_refuses, 2, path=str(tmp_path / "saved"), face="fully")
    named_on_every_rank(errors, ValueError, "has no optimizer state")


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    errors = on_ranks(_refuses, 2, path=str(tmp_path / "saved"), face="fully")
    named_on_every_rank(errors, FileNotFoundError, "there is no checkpoint at")


# Another model, other optimizers


def smaller(model: Odd) -> None:
    model.blocks[1] = torch.nn.Linear(6, 6)


def wider(model: Odd) -> None:
    model.gain = torch.nn.Parameter(torch.rand(2))


def larger(model: Odd) -> None:
    model.more = torch.nn.Parameter(torch.rand(2))


def one_group(model: Any) -> Marks:
    return Marks(model.parameters())


def _other_model(context: RankContext, *, path: str, face: str, change: Any) -> list[str]:
    ranks = list(range(context.world_size))
    inner = plain(seed=8)
    change(inner)
    model = made(face, ranks, model=inner)
    assert model is not None
    optimizer = marked(model)
    before = everything(model, optimizer)
    error = error_of(lambda: checkpoint.load(path, model, optimizer))
    same(everything(model, optimizer), before)
    return error


@FACES
@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (smaller, "the checkpoint has no 'blocks.1.weight'"),
        (wider, "'model.gain' has shape (1,) in the checkpoint, and (2,) in the model"),
        (larger, "the checkpoint has no 'more'"),
    ],
    ids=["names", "shape", "more"],
)
def test_another_model_is_refused(
    change: Callable[[Odd], None], fragment: str, face: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_saves, 2, path=path, face=face, form="sharded")
    errors = on_ranks(_other_model, 2, path=path, face=face, change=change)
    named_on_every_rank(errors, ValueError, fragment)


def _other_groups(context: RankContext, *, path: str, kind: str) -> list[str]:
    ranks = list(range(context.world_size))
    saved, model = made("original", ranks), made("original", ranks, seed=8)
    assert saved is not None
    assert model is not None
    params = list(saved.parameters())
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.2}]
    before = Marks(groups)
    before.step()
    checkpoint.save(path, saved, before)
    chosen = list(model.parameters())
    after = Marks(chosen if kind == "merged" else chosen[1:])
    untouched = everything(model, after)
    error = error_of(lambda: checkpoint.load(path, model, after))
    # Everything was read by then, and nothing was put where it belongs.
    same(everything(model, after), untouched)
    return error


@pytest.mark.parametrize(
    ("kind", "fragment"),
    [
        ("merged", "are in one parameter group here, and had other options before"),
        ("fewer", "none of the optimizers here trains"),
    ],
)
def test_other_groups_are_refused(kind: str, fragment: str, tmp_path: Path) -> None:
    errors = on_ranks(_other_groups, 2, path=str(tmp_path / "saved"), kind=kind)
    named_on_every_rank(errors, ValueError, fragment)


# Saving


def _cannot_save(context: RankContext, *, path: str) -> list[str]:
    model = made("flat", list(range(context.world_size)))
    assert model is not None
    return error_of(lambda: checkpoint.save(path, model))


def test_a_path_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    errors = on_ranks(_cannot_save, 2, path=str(tmp_path / "file" / "saved"))
    named_on_every_rank(errors, FileExistsError, str(tmp_path / "file"))


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    errors = on_ranks(_cannot_save, 2, path=str(tmp_path / "thesis"))
    named_on_every_rank(errors, FileExistsError, "is no checkpoint; it is not replaced")
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"


def _fails_on_one_rank(context: RankContext, *, path: str) -> list[str]:
    model = made("flat", list(range(context.world_size)))
    assert model is not None
    if context.rank == 1:
        FileSystemWriter.write_data = _disk_full  # type: ignore[method-assign]
    return error_of(lambda: checkpoint.save(path, model))


def _disk_full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def _dies(context: RankContext, *, path: str, face: str, where: str, way: str) -> None:
    ranks = list(range(context.world_size))
    model = made(face, ranks, seed=8)
    assert model is not None
    optimizer = marked(model)
    if where == "write" and context.rank == 1:
        FileSystemWriter.write_data = _killed  # type: ignore[method-assign]
    if where == "digest" and context.rank == 1:
        os.fsync = _killed
    if where == "rename" and context.rank == 0:
        rename = Path.rename

        def second(self: Path, target: Any) -> Path:
            # After the old checkpoint has left and before the new one has come.
            return _killed() if self.name.startswith(".saved.saving") else rename(self, target)

        Path.rename = second  # type: ignore[method-assign]
    if way == "save":
        checkpoint.save(path, model, optimizer)
    else:
        group = dist.new_group(backend="gloo")
        checkpoint.async_save(path, model, optimizer, process_group=group).result()


def _killed(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_cannot_write_spoils_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_saves, 2, path=path, face="flat", form="sharded")
    errors = on_ranks(_fails_on_one_rank, 2, fresh=True, path=path)
    named_on_every_rank(errors, CheckpointError, "cannot be written: OSError: [Errno 28] No space")
    assert errors[0][1].startswith("on rank 1: ")
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    on_ranks(_loads, 2, path=path, face="flat", seed=7)


@pytest.mark.parametrize("way", ["save", "async_save"])
@pytest.mark.parametrize("where", ["write", "digest", "rename"])
def test_a_rank_killed_in_a_save_leaves_the_previous_checkpoint(
    where: str, way: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_saves, 2, path=path, face="fully", form="sharded")
    pool = shared_pool(2, "cpu", preload=("tests.fsdp.preload",))
    outcome = pool.run(Job.of(_dies, path=path, face="fully", where=where, way=way), fresh=True)
    assert outcome.verdict is RankVerdict.CRASH, outcome.sentence
    on_ranks(_loads, 2, path=path, face="fully", seed=7)
    # And the next save clears up.
    on_ranks(_saves, 2, path=path, face="fully", seed=10, form="sharded")
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    on_ranks(_loads, 2, path=path, face="fully", seed=10)


def _unequal(context: RankContext, *, path: str) -> list[str]:
    ranks = list(range(context.world_size))
    inner = plain()
    if context.rank == 1:
        larger(inner)
    dist.barrier()
    model = made("plain", ranks, model=inner)
    assert model is not None
    return error_of(lambda: checkpoint.save(path, model))


def test_ranks_with_other_models_are_refused(tmp_path: Path) -> None:
    errors = on_ranks(_unequal, 2, path=str(tmp_path / "saved"))
    named_on_every_rank(errors, ValueError, "rank 0 has 'scale'")
    assert not list(tmp_path.iterdir())


# Who writes, and where


def _from_one_replica(context: RankContext, *, path: str, form: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    group = dist.new_group([0])
    model, again = plain(), plain(seed=8)
    fully_shard(model, mesh=mesh)
    if context.rank == 0:
        checkpoint.save(path, model, marked(model), process_group=group, format=form)
        checkpoint.load(path, again, other := fresh(again), process_group=group)
        wanted = plain()
        same(everything(again, other), everything(wanted, marked(wanted)))


@FORMS
def test_one_replica_saves_all_of_a_model(form: str, tmp_path: Path) -> None:
    on_ranks(_from_one_replica, 2, path=str(tmp_path / "saved"), form=form)


def _from_half_a_model(context: RankContext, *, path: str, form: str) -> list[str]:
    model = made("fully", [0, 1], seed=8)
    assert model is not None
    groups = [dist.new_group([0]), dist.new_group([1])]
    group = groups[context.rank]
    return error_of(lambda: checkpoint.save(path, model, process_group=group, format=form))


@FORMS
def test_ranks_without_a_whole_replica_save_nothing(form: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_saves, 2, path=path, face="fully", form="sharded")
    errors = on_ranks(_from_half_a_model, 2, path=path, form=form)
    named_on_every_rank(errors, ValueError, "'gain' of shape (1,), torch.float32, 2 shards on")
    named_on_every_rank(errors, ValueError, "which do not hold all of it")
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    on_ranks(_loads, 2, path=path, face="fully", seed=7)


def _omits(context: RankContext, *, path: str, key: str) -> list[str]:
    model = made("ddp", [0, 1], seed=8)
    assert model is not None
    optimizer = marked(model)

    def less(*args: Any, **kwargs: Any) -> Any:
        state = state_of(*args, **kwargs)
        if key == "model.gain":
            state["model"].pop("gain", None)
        else:
            state["optim"]["state"].get("gain", {}).pop("twice", None)
        return state

    with mock.patch("fsdp.checkpoint.saving.state_of", less):
        return error_of(lambda: checkpoint.save(path, model, optimizer))


@pytest.mark.parametrize("key", ["model.gain", "optim.state.gain.twice"])
def test_what_no_rank_has_written_is_missed_in_the_save(key: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_saves, 2, path=path, face="flat", form="sharded")
    errors = on_ranks(_omits, 2, path=path, key=key)
    named_on_every_rank(errors, CheckpointError, f"no rank has written '{key}'")
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    on_ranks(_loads, 2, path=path, face="flat", seed=7)


def _elsewhere(context: RankContext, *, path: str, way: str) -> list[str]:
    model = made("flat", [0, 1], seed=8)
    assert model is not None
    own = Path(path) / "local" if context.rank else Path(path)
    own.mkdir(exist_ok=True)
    if way == "save":
        return error_of(lambda: checkpoint.save(own / "saved", model))
    group = dist.new_group(backend="gloo")
    future = checkpoint.async_save(own / "saved", model, process_group=group)
    return error_of(future.result)


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_ranks_that_write_elsewhere_write_nothing(way: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_saves, 2, path=path, face="flat", form="sharded")
    errors = on_ranks(_elsewhere, 2, path=str(tmp_path), way=way)
    named_on_every_rank(errors, CheckpointError, f"{tmp_path}/local/.saved.saving-")
    named_on_every_rank(errors, CheckpointError, "which the first rank has made, is not there")
    named_on_every_rank(errors, CheckpointError, "do all ranks give the same path")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["local", "saved"]
    assert not list((tmp_path / "local").iterdir())
    on_ranks(_loads, 2, path=path, face="flat", seed=7)


def _does_not_begin(context: RankContext, *, path: str, what: str, error: Any) -> list[str]:
    model = made("flat", [0, 1])
    assert model is not None
    group = dist.new_group(backend="gloo")
    with mock.patch(what, side_effect=error):
        return error_of(lambda: checkpoint.async_save(path, model, process_group=group))


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("fsdp.checkpoint.saving.state_of", TypeError("no copy")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
    ids=["copy", "thread"],
)
def test_an_asynchronous_save_that_cannot_begin_leaves_nothing(
    what: str, error: Exception, tmp_path: Path
) -> None:
    errors = on_ranks(_does_not_begin, 2, path=str(tmp_path / "saved"), what=what, error=error)
    named_on_every_rank(errors, type(error), str(error))
    assert not list(tmp_path.iterdir())


def _loses_its_place(context: RankContext, *, path: str) -> list[str]:
    model = made("flat", [0, 1], seed=8)
    assert model is not None

    def write(directory: Path, state: Any, number: int) -> sharded.Part:
        part = written(directory, state, number)
        if not number:
            Path(path).mkdir()
            (Path(path) / "chapter").write_text("years of work")
        return part

    written = sharded.write
    with mock.patch("fsdp.checkpoint.sharded.write", write):
        return error_of(lambda: checkpoint.save(path, model))


def test_what_comes_to_the_path_during_a_save_is_kept_beside_it(tmp_path: Path) -> None:
    errors = on_ranks(_loses_its_place, 2, path=str(tmp_path / "thesis"))
    assert [*errors] == [["", ""]] * 2
    (aside,) = tmp_path.glob("thesis.replaced-*")
    assert (aside / "chapter").read_text() == "years of work"
    assert directory.is_checkpoint(tmp_path / "thesis")
    assert len([*tmp_path.iterdir()]) == 2


def _damaged_by_one_rank(context: RankContext, *, path: str, damage: str) -> list[str]:
    model = made("flat", [0, 1], seed=8)
    assert model is not None

    def write(directory: Path, state: Any, number: int) -> sharded.Part:
        part = written(directory, state, number)
        if number:
            file = directory / "__1_0.distcp"
            cut(file) if damage == "cut" else file.unlink()
        return part

    written = sharded.write
    with mock.patch("fsdp.checkpoint.sharded.write", write):
        return error_of(lambda: checkpoint.save(path, model))


@pytest.mark.parametrize(("damage", "found"), [("cut", "has "), ("removed", "is missing in ")])
def test_a_file_that_the_first_rank_does_not_see_in_full_is_no_checkpoint(
    damage: str, found: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_saves, 2, path=path, face="flat", form="sharded")
    errors = on_ranks(_damaged_by_one_rank, 2, path=path, damage=damage)
    said = "'__1_0.distcp', which rank 1 has written, "
    named_on_every_rank(errors, CheckpointError, f"{said}{found}")
    on_ranks(_loads, 2, path=path, face="flat", seed=7)


def _cannot_read(context: RankContext, *, path: str, form: str) -> list[str]:
    model = made("flat", [0, 1])
    assert model is not None
    broken = mock.patch("pickle.loads", side_effect=ValueError("another version"))
    with broken if context.rank == 0 else nullcontext():
        return error_of(lambda: checkpoint.save(path, model, format=form))


@FORMS
def test_what_the_first_rank_cannot_read_is_told_to_all(form: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    errors = on_ranks(_cannot_read, 2, fresh=True, timeout=60.0, path=path, form=form)
    named_on_every_rank(errors, ValueError, "another version")


@FORMS
def test_a_model_without_tensors_has_a_checkpoint(form: str, tmp_path: Path) -> None:
    model, again = Counter(), Counter()
    for model.count in (3, 4):
        checkpoint.save(tmp_path / "saved", model, format=form)
    checkpoint.load(tmp_path / "saved", again)
    assert again.count == 4


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of \('sharded', 'safetensors'\), got 'zip'"):
        checkpoint.save(tmp_path / "saved", plain(), format="zip")


def test_what_safetensors_cannot_say_is_refused(tmp_path: Path) -> None:
    model = plain()
    optimizer = fresh(model)
    assert optimizer is not None
    optimizer.param_groups[0]["when"] = {1: 2}
    with pytest.raises(TypeError, match="use format='sharded'"):
        checkpoint.save(tmp_path / "saved", model, optimizer, format="safetensors")
    assert not list(tmp_path.iterdir())

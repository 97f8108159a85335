"""What is read is what was checked; and what is saved is what was there. One process each."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

from fsdp import checkpoint
from fsdp.checkpoint import CheckpointError, loading, sharded
from tests.reshard.faces import everything, fresh, marked, plain, same


def saved(path: Path, form: str, seed: int = 7, *, optimizer: bool = True) -> None:
    model = plain(seed)
    checkpoint.save(path, model, marked(model) if optimizer else None, format=form)


def refused(path: Path, fragment: str, *, kind: type[Exception] = CheckpointError) -> None:
    model = plain(seed=8)
    optimizer = marked(model)
    before = everything(model, optimizer)
    with pytest.raises(kind) as caught:
        checkpoint.load(path, model, optimizer)
    assert fragment in str(caught.value)
    same(everything(model, optimizer), before)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    found = json.loads((path / "digests.json").read_text())
    change(found["files"])
    (path / "digests.json").write_text(json.dumps(found))


def test_a_planted_model_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path / "one", "sharded")
    saved(tmp_path / "other", "safetensors", seed=9)
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "one")
    model = plain(seed=8)
    checkpoint.load(tmp_path / "one", model)
    same(everything(model, None), everything(plain(), None))


def test_a_planted_optimizer_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path / "one", "safetensors", optimizer=False)
    saved(tmp_path / "other", "safetensors", seed=9)
    shutil.copy(tmp_path / "other" / "optimizer.safetensors", tmp_path / "one")
    refused(tmp_path / "one", "has no optimizer state", kind=ValueError)


def test_unlisted_files_are_not_read(tmp_path: Path) -> None:
    saved(tmp_path / "saved", "sharded")
    edit(tmp_path / "saved", lambda files: files.pop("__0_0.distcp"))
    refused(tmp_path / "saved", f"{tmp_path / 'saved' / '__0_0.distcp'} is not listed")
    edit(tmp_path / "saved", lambda files: files.pop(".metadata"))
    refused(tmp_path / "saved", "lists no files")
    edit(tmp_path / "saved", lambda files: files.update(other={"bytes": 0, "sha256": EMPTY}))
    (tmp_path / "saved" / "other").touch()
    refused(tmp_path / "saved", "lists neither .metadata nor model.safetensors")


EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def own(path: Path, seed: int = 7) -> None:
    saved(path, "sharded", seed)


def foreign(path: Path, seed: int = 7) -> None:
    """What torch alone writes; over what is there."""
    model = plain(seed)
    model_state, optimizer_state = get_state_dict(model, marked(model))
    state = {"model": model_state, "optim": optimizer_state}
    save_with_torch(state, checkpoint_id=path, no_dist=True)


REPLACED = "was replaced or changed while it was read"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize(
    ("write", "owner", "name", "fragment"),
    [
        (own, sharded.ShardedCatalog, "read", REPLACED),
        (foreign, sharded.ShardedCatalog, "read", REPLACED),
        (own, loading, "_inspected", "its bits have changed"),  # its digests tell at once
        (foreign, loading, "_inspected", REPLACED),
    ],
    ids=["own read", "foreign read", "own looked at", "foreign looked at"],
)
def test_a_checkpoint_that_is_replaced_meanwhile_is_refused(
    write: Callable[..., None],
    owner: Any,
    name: str,
    fragment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "saved")
    real = getattr(owner, name)

    def then_replaced(*args: Any) -> Any:
        found = real(*args)
        write(tmp_path / "saved", seed=9)
        return found

    monkeypatch.setattr(owner, name, then_replaced)
    refused(tmp_path / "saved", fragment)


def test_the_old_checkpoint_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "saved", "sharded")
    real = Path.rename

    def rename(self: Path, target: Any) -> Path:
        if self.name.startswith(".saved.saving"):
            raise OSError(5, "no luck")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no luck"):
        saved(tmp_path / "saved", "sharded", seed=9)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    model = plain(seed=8)
    optimizer = fresh(model)
    checkpoint.load(tmp_path / "saved", model, optimizer)
    source = plain()
    same(everything(model, optimizer), everything(source, marked(source)))


def test_what_a_save_left_that_was_killed_after_its_last_rename_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "saved", "sharded")
    shutil.copytree(tmp_path / "saved", tmp_path / ".saved.previous")
    saved(tmp_path / "saved", "sharded", seed=9)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    model = plain(seed=8)
    checkpoint.load(tmp_path / "saved", model)
    same(everything(model, None), everything(plain(seed=9), None))


class Live(nn.Module):
    """Hands out what it keeps."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), number))
        self.kept: Any = {"seen": [number], "mean": torch.tensor(number)}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kept", [torch.tensor([1, 2]), torch.tensor(0.5), torch.zeros(0)], ids=str)
def test_a_tensor_as_extra_state_comes_back(tmp_path: Path, kept: torch.Tensor) -> None:
    model, again = Live(1.0), Live(2.0)
    model.kept, again.kept = kept, None
    checkpoint.save(tmp_path / "saved", model)
    checkpoint.load(tmp_path / "saved", again)
    assert again.kept.dtype == kept.dtype
    assert torch.equal(again.kept, kept)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_asynchronous_save_shares_nothing_with_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trained = Live(1.0), threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["history"] = [1]
    real = sharded.write

    def late(*args: Any) -> Any:
        assert trained.wait(120)
        return real(*args)

    monkeypatch.setattr(sharded, "write", late)
    future = checkpoint.async_save(tmp_path / "saved", model, optimizer)
    model.kept["seen"][0] = 9.0
    model.kept["mean"].fill_(9.0)
    optimizer.param_groups[0]["history"][0] = 9
    trained.set()
    future.result(timeout=120)
    again = Live(2.0)
    checkpoint.load(tmp_path / "saved", again)
    assert again.kept == {"seen": [1.0], "mean": torch.tensor(1.0)}
    state: dict[str, Any] = {"optim": {"param_groups": [{"history": [0]}]}}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert state["optim"]["param_groups"][0]["history"] == [1]

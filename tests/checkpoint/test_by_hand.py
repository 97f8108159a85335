"""Who writes, how a file begins, and what a load leaves behind. One rank where one is enough."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import checkpoint
from fsdp.checkpoint.safe_file import Entry, SafeFile
from fsdp.checkpoint.states import _entries
from fsdp.checkpoint.wrapper_optimizers import _started
from tests.fsdp.ranks import agreed, on_ranks


@pytest.mark.parametrize("length", range(1, 9))
def test_tensors_begin_at_a_multiple_of_eight_bytes(length: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with ExitStack() as stack:
        file = SafeFile(path, {"n" * length: Entry(torch.float32, (2,))}, None, stack)
        file.put("n" * length, torch.ones(2))
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0
    assert path.stat().st_size == 8 + header + 2 * 4


def _files_made(context: RankContext, *, path: str) -> int:
    model = nn.Linear(3, 2)
    with mock.patch("fsdp.checkpoint.safe.SafeFile", wraps=SafeFile) as made:
        checkpoint.save(path, model, torch.optim.SGD(model.parameters()), format="safetensors")
    return made.call_count


def test_the_first_rank_alone_writes_whole_tensors(tmp_path: Path) -> None:
    assert on_ranks(_files_made, 2, path=str(tmp_path / "saved")) == (2, 0)


def test_an_optimizer_that_was_started_for_a_while_is_as_it_was() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(requires_grad=False)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, weight_decay=0.1)
    with _started(optimizer):
        assert list(optimizer.state) == [model.weight]
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert [param.grad for param in model.parameters()] == [None, None]
    assert all(map(torch.equal, model.parameters(), before))


def test_what_cannot_be_pickled_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    kept: Any = torch.optim.SGD(model.parameters())
    kept.param_groups[0]["made"] = lambda: 0
    with pytest.raises(TypeError, match="an optimizer or a module keeps cannot be pickled"):
        checkpoint.save(tmp_path / "saved", model, kept)


def _entries_of_the_first(context: RankContext) -> list[Any]:
    groups = [{"params": ["weight", "bias"], "lr": 0.5}]
    state = {"state": {"weight": {"step": 1}, "bias": {}}, "param_groups": groups}
    options, with_state = _entries(state if context.rank == 0 else {}, broadcast=True)
    return [options, sorted(with_state)]


def test_every_rank_hears_of_the_entries_that_the_first_one_has() -> None:
    assert agreed(_entries_of_the_first, 2) == [
        {"weight": {"lr": 0.5}, "bias": {"lr": 0.5}},
        ["weight"],
    ]

"""What is written is what is read, also when a rank dies in the middle."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from conformance.history import History, HistoryWriter, NotObserved, flatten
from conformance.ranks.records import CollectiveRecord


def write(directory: Path, rank: int, *, virtual: bool = False) -> HistoryWriter:
    writer = HistoryWriter(directory, rank, {"virtual": virtual})
    writer.begin_phase("build")
    writer.write("parameters", {"w": torch.arange(6.0).view(2, 3).t(), "none": None}, step=-1)
    writer.end_phase()
    writer.begin_phase("step 0")
    writer.write("loss", torch.tensor(1.5, dtype=torch.bfloat16), step=0, micro=0)
    return writer


def test_tensors_scalars_and_none_survive(tmp_path: Path) -> None:
    writer = write(tmp_path, 0)
    writer.end_phase("ValueError: no", "Traceback ...")
    writer.close()
    history = History.read(tmp_path, 1)
    value = history.get(0, "parameters", step=-1)
    assert torch.equal(value["w"], torch.arange(6.0).view(2, 3).t())
    assert value["none"] is None
    loss = history.get(0, "loss", step=0, micro=0)
    assert loss.dtype == torch.bfloat16
    assert float(loss) == 1.5
    assert [seen.moment for seen in history.ranks[0].observations] == [(0, 0), (1, 1)]


def test_a_phase_that_raised_is_found_with_its_rank(tmp_path: Path) -> None:
    for rank, error in enumerate([None, "ValueError: no"]):
        writer = write(tmp_path, rank)
        writer.end_phase(error)
        writer.close()
    failed = History.read(tmp_path, 2).failed_phase()
    assert failed is not None
    assert (failed[0], failed[1].name, failed[1].error) == (1, "step 0", "ValueError: no")


def test_a_killed_rank_leaves_its_numbers_but_not_its_tensors(tmp_path: Path) -> None:
    write(tmp_path, 0)._lines.close()  # as a dead process leaves it: no tensor file
    with (tmp_path / "rank0.jsonl").open("a") as lines:
        lines.write('{"kind": "observation", "what": "lo')
    history = History.read(tmp_path, 1)
    assert [phase.name for phase in history.ranks[0].phases] == ["build", "step 0"]
    assert not history.ranks[0].phases[1].ended
    assert history.get(0, "loss", step=0, micro=0) == 1.5
    with pytest.raises(NotObserved, match="parameters"):
        history.get(0, "parameters", step=-1)


@pytest.mark.parametrize("number", [1 / 3, -0.0, torch.inf, 2**53 + 1, True, 1 + 2j])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.int64])
def test_a_number_comes_back_bit_for_bit(
    tmp_path: Path, number: complex, dtype: torch.dtype | None
) -> None:
    value = torch.tensor(number)
    if dtype is not None and value.isfinite() and not value.is_complex():
        value = value.to(dtype)
    with HistoryWriter(tmp_path, 0, {"world": 1}) as writer:
        writer.begin_phase("build")
        writer.write("one", value)
        writer.write("several", {"a": value})
    read = History.read(tmp_path, 1)
    for found in (read.get(0, "one"), read.get(0, "several")["a"]):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value)
        assert bool(found.real.signbit()) == bool(value.real.signbit())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stands_in_lines_that_every_reader_takes(
    tmp_path: Path, number: float
) -> None:
    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = [number, {"lr": 0.5, "betas": (0.9, number)}, None]
    writer = HistoryWriter(tmp_path, 0, {"world": 1, "timeout": number})
    writer.write("loss", torch.tensor(number, dtype=torch.bfloat16))
    writer.write("scale", number, limit=number)
    writer.write("hyperparameters", value)
    writer.write("state", {"step": number, "text": json.dumps(number)})
    own = {"op": "barrier", "group": "0", "group_ranks": (0,), "stream": "0"}
    writer.collectives([CollectiveRecord(index=0, nth=1, left=number, **own)])
    for line in (tmp_path / "rank0.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refused)
    (rank,) = History.read(tmp_path, 1).ranks  # one that was killed
    loss, scale, options, state = rank.observations
    assert loss.value.dtype == torch.bfloat16
    read = [loss.value.item(), scale.value, scale.where["limit"], options.value[0]]
    read += [options.value[1]["betas"][1], state.value["step"], rank.collectives[0]["left"]]
    assert [repr(found) for found in [*read, rank.header["timeout"]]] == [repr(number)] * 8
    assert options.value[1]["lr"] == 0.5
    assert state.value["text"] == json.dumps(number)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_read_in_the_words_of_earlier_versions(
    tmp_path: Path, number: float
) -> None:
    seen = {"kind": "observation", "where": {}, "moment": [0, 0]}
    lines = [
        {"kind": "header", "schema": 1, "rank": 0, "world": 1},
        {**seen, "what": "loss", "value": {"json": json.dumps(number), "dtype": "float32"}},
        {**seen, "what": "scale", "value": {"json": number}},
    ]
    (tmp_path / "rank0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    history = History.read(tmp_path, 1)
    assert repr(history.get(0, "loss").item()) == repr(history.get(0, "scale")) == repr(number)


def test_a_rank_that_wrote_nothing_is_empty(tmp_path: Path) -> None:
    write(tmp_path, 0).close()
    assert History.read(tmp_path, 2).ranks[1].observations == ()


def test_a_virtual_history_answers_for_every_rank(tmp_path: Path) -> None:
    write(tmp_path, 0, virtual=True).close()
    second = HistoryWriter(tmp_path, 1, {"virtual": True})
    second.begin_phase("build")
    second.skip()
    second.write("loss", torch.tensor(7.0), step=0, micro=0)
    second.close()
    history = History.read(tmp_path, 2)
    assert torch.equal(
        history.get(1, "parameters", step=-1)["w"], history.get(0, "parameters", step=-1)["w"]
    )
    assert float(history.get(1, "loss", step=0, micro=0)) == 7.0
    assert history.find(1, "loss", {"step": 0, "micro": 0}).moment[1] == 1  # type: ignore[union-attr]


def test_nested_trees_become_flat_keys() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}

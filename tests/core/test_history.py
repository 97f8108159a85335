"""What is written is what is read, also when a rank dies in the middle."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance import history as history_module
from conformance.gather import Cut
from conformance.history import History, HistoryWriter, NotObserved, flatten
from conformance.ranks.records import CollectiveRecord
from conformance.report.lines import schema


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


@pytest.mark.parametrize(
    "names", [(), ("w",), ("w", "v")], ids=["alone", "tree of one", "tree of two"]
)
def test_a_later_change_in_place_does_not_reach_what_was_written(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """A wrapper goes on with what it has handed out, often before the phase is over."""
    with HistoryWriter(tmp_path, 0, {}) as writer:
        writer.begin_phase("step 0")
        given = torch.ones(2, 3, requires_grad=True)
        writer.write("gradients", dict.fromkeys(names, given) if names else given, step=0)
        with torch.no_grad():
            given.fill_(7.0)
        writer.write("parameters", given, step=0)
        writer.end_phase()
    history = History.read(tmp_path, 1)
    found = history.get(0, "gradients", step=0)
    for value in [found[name] for name in names] if names else [found]:
        assert torch.equal(value, torch.ones(2, 3))
    assert torch.equal(history.get(0, "parameters", step=0), torch.full((2, 3), 7.0))


def test_tensors_that_are_not_contiguous_or_empty_keep_their_elements_and_their_order(
    tmp_path: Path,
) -> None:
    tree = {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "integers": torch.arange(4),
        "empty": torch.empty(0, 3),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "complex": torch.tensor(1.0 + 2.0j),
    }
    with HistoryWriter(tmp_path, 0, {}) as writer:
        writer.begin_phase("step 0")
        for step in range(2):
            writer.write("optimizer_state", {k: v + step for k, v in tree.items()}, step=step)
        writer.end_phase()
    history = History.read(tmp_path, 1)
    for step in range(2):
        found = history.get(0, "optimizer_state", step=step)
        assert found.keys() == tree.keys()
        for key, value in tree.items():
            assert torch.equal(found[key], value + step)


def test_a_phase_that_raised_is_found_with_its_rank(tmp_path: Path) -> None:
    for rank, error in enumerate([None, "ValueError: no"]):
        writer = write(tmp_path, rank)
        writer.end_phase(error)
        writer.close()
    failed = History.read(tmp_path, 2).failed_phase()
    assert failed is not None
    assert (failed[0], failed[1].name, failed[1].error) == (1, "step 0", "ValueError: no")


@pytest.mark.parametrize("virtual", [False, True])
def test_tensors_are_read_when_a_value_is_first_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, virtual: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(history_module, "load_file", lambda p: opened.append(p) or load_file(p))
    writer = write(tmp_path, 0, virtual=virtual)
    writer.write("gradients", {"w": Cut(torch.ones(2), (2,), 0, (0,))}, step=0)
    writer.close()
    history = History.read(tmp_path, 1)
    history.get(0, "loss", step=0, micro=0)
    assert [seen.where for seen in history.every("gradients")] == [{"step": 0}]
    assert opened == []
    for _ in range(2):
        assert torch.equal(history.get(0, "gradients", step=0)["w"], torch.ones(2))
        assert history.get(0, "parameters", step=-1)["none"] is None
    assert len(opened) == (1 if virtual else 2)


def test_a_killed_rank_leaves_its_numbers_and_the_tensors_of_all_phases_but_the_last(
    tmp_path: Path,
) -> None:
    writer = write(tmp_path, 0)
    writer.write("gradients", {"w": torch.ones(2)}, step=0)
    writer._lines.close()  # as a dead process leaves it: the last phase has no tensor file
    with (tmp_path / "rank0.jsonl").open("a") as lines:
        lines.write('{"kind": "observation", "what": "lo')
    history = History.read(tmp_path, 1)
    assert [phase.name for phase in history.ranks[0].phases] == ["build", "step 0"]
    assert not history.ranks[0].phases[1].ended
    assert history.get(0, "loss", step=0, micro=0) == 1.5
    assert torch.equal(history.get(0, "parameters", step=-1)["w"], torch.arange(6.0).view(2, 3).t())
    with pytest.raises(NotObserved, match="gradients"):
        history.get(0, "gradients", step=0)


def test_tensors_of_several_phases_are_not_confused(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, 0, {}) as writer:
        for phase in range(3):
            writer.begin_phase(f"step {phase}")
            writer.write("a", torch.full((2,), phase), step=phase)
            writer.write("b", {"c": torch.full((3,), phase + 10)}, step=phase)
            writer.end_phase()
            writer.write("after", torch.full((1,), phase + 20), step=phase)
    history = History.read(tmp_path, 1)
    read = [history.get(0, what, step=s) for s in range(3) for what in ("a", "b", "after")]
    assert [len(t["c"] if isinstance(t, dict) else t) for t in read] == [2, 3, 1] * 3
    found = [(t["c"] if isinstance(t, dict) else t)[-1].item() for t in read]
    assert found == [0, 10, 20, 1, 11, 21, 2, 12, 22]


def test_a_history_does_not_find_what_another_left_in_its_folder(tmp_path: Path) -> None:
    for rank in (0, 10):
        write(tmp_path, rank).close()
    again = HistoryWriter(tmp_path, 0, {})
    again.begin_phase("build")
    again.write("parameters", {"w": torch.ones(6)}, step=-1)
    again._lines.close()  # killed
    assert History.read(tmp_path, 1).ranks[0].observations == ()
    assert History.read(tmp_path, 11).get(10, "parameters", step=-1)["w"].shape == (3, 2)


def test_one_tensor_file_for_all_phases_is_read_as_earlier_versions_wrote_it(
    tmp_path: Path,
) -> None:
    seen = {"kind": "observation", "what": "parameters"}
    lines: list[dict[str, object]] = [{"kind": "header", "schema": 1, "rank": 0, "world": 1}]
    for phase in range(2):
        lines.append({"kind": "phase", "ordinal": phase, "name": f"step {phase}"})
        stored = {"w": {"tensor": "float32", "offset": 4 * phase, "shape": [2, 2]}}
        where = {"where": {"step": phase}, "moment": [phase, phase]}
        lines.append({**seen, **where, "tree": stored})
    (tmp_path / "rank0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    save_file({"float32": torch.arange(8.0)}, tmp_path / "rank0.safetensors")
    history = History.read(tmp_path, 1)
    for phase in range(2):
        found = history.get(0, "parameters", step=phase)["w"]
        assert torch.equal(found, torch.arange(8.0).view(2, 2, 2)[phase])


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


WHOLE = torch.arange(1.0, 22.0).view(7, 3)


def piece(rank: int, dim: int = 0, ranks: tuple[int, ...] = (0, 1, 2)) -> Cut:
    """What one of several ranks holds of `WHOLE`."""
    pieces = torch.chunk(WHOLE, len(ranks), dim)
    return Cut(pieces[ranks.index(rank)], (7, 3), dim, ranks)


def write_each(directory: Path, trees: list[dict[str, object] | None]) -> list[HistoryWriter]:
    """The open histories of ranks, each with a tree as its parameters, or nothing."""
    writers = []
    for rank, tree in enumerate(trees):
        writer = HistoryWriter(directory, rank, {"world": len(trees)})
        writer.begin_phase("build")
        if tree is not None:
            writer.write("parameters", tree, step=0)
        writer.write("loss", 1.5 + rank, step=0)
        writers.append(writer)
    return writers


def read_each(directory: Path, trees: list[dict[str, object] | None]) -> History:
    for writer in write_each(directory, trees):
        writer.close()
    return History.read(directory, len(trees))


@pytest.mark.parametrize("dim", [0, 1])
def test_every_rank_has_observed_the_whole_of_its_piece(tmp_path: Path, dim: int) -> None:
    trees = [{"cut": piece(rank, dim), "own": torch.tensor([rank]), "k": None} for rank in range(3)]
    history = read_each(tmp_path, trees)
    read = [history.get(rank, "parameters", step=0) for rank in range(3)]
    assert [tree["own"].item() for tree in read] == [0, 1, 2]
    for tree in read:
        assert list(tree) == ["cut", "own", "k"]
        assert torch.equal(tree["cut"], WHOLE)
        assert tree["cut"] is read[0]["cut"], "it is put together once for all ranks"


def test_replicas_are_put_together_apart(tmp_path: Path) -> None:
    trees = [{"cut": piece(rank, ranks=ranks)} for ranks in ((0, 1), (2, 3)) for rank in ranks]
    trees[3]["cut"] = trees[3]["cut"]._replace(piece=trees[3]["cut"].piece + 1)
    history = read_each(tmp_path, trees)
    read = [history.get(rank, "parameters", step=0)["cut"] for rank in range(4)]
    other = WHOLE.clone()
    other[4:] += 1
    for whole, expected in zip(read, (WHOLE, WHOLE, other, other), strict=True):
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("gone", ["killed", "not so far", "no such rank"])
def test_a_piece_that_a_rank_has_not_written_leaves_the_whole_unobserved(
    tmp_path: Path, gone: str
) -> None:
    ranks = (0, 1) if gone == "not so far" else (0, 1, 2)
    trees = [{"cut": piece(0, ranks=ranks)}, None if gone == "not so far" else {"cut": piece(1)}]
    first, second = write_each(tmp_path, trees)
    first.close()
    if gone == "killed":
        third = HistoryWriter(tmp_path, 2, {})
        third.begin_phase("build")
        third.write("parameters", {"cut": piece(2)}, step=0)
        third._lines.close()  # as a dead process leaves it: no tensor file
    second.close()
    history = History.read(tmp_path, 3 if gone == "killed" else 2)
    for rank in range(2):
        with pytest.raises(NotObserved, match=r"^parameters at step 0 was not observed$"):
            history.get(rank, "parameters", step=0)
        assert history.get(rank, "loss", step=0) == 1.5 + rank


def test_another_ranks_piece_is_seen_in_the_whole(tmp_path: Path) -> None:
    wrong = piece(1)._replace(piece=piece(0).piece)
    history = read_each(tmp_path, [{"cut": piece(0)}, {"cut": wrong}, {"cut": piece(2)}])
    expected = WHOLE.clone()
    expected[3:6] = WHOLE[:3]
    for rank in range(3):
        assert torch.equal(history.get(rank, "parameters", step=0)["cut"], expected)


@pytest.mark.parametrize(
    "other",
    [
        WHOLE,
        2.5,
        piece(1, 1),
        piece(1)._replace(shape=(8, 3)),
        piece(1)._replace(ranks=(1, 0, 2)),
        piece(1)._replace(piece=piece(1).piece.double()),
        piece(1)._replace(piece=piece(1).piece[:-1]),
        piece(1)._replace(piece=WHOLE),
    ],
    ids=["whole", "number", "dim", "shape", "ranks", "dtype", "short", "long"],
)
def test_what_is_no_such_piece_is_no_number_in_the_whole(tmp_path: Path, other: object) -> None:
    history = read_each(tmp_path, [{"cut": piece(0)}, {"cut": other}, {"cut": piece(2)}])
    for rank in (0, 2):
        whole = history.get(rank, "parameters", step=0)["cut"]
        assert whole.shape == WHOLE.shape
        assert whole[3:6].isnan().all()
        assert torch.equal(whole[:3], WHOLE[:3])
        assert torch.equal(whole[6:], WHOLE[6:])


@pytest.mark.parametrize("other", [{}, {"cut": None}])
def test_a_rank_that_has_nothing_leaves_zeros_in_the_whole(
    tmp_path: Path, other: dict[str, object]
) -> None:
    history = read_each(tmp_path, [{"cut": piece(0)}, other, {"cut": piece(2)}])
    whole = history.get(0, "parameters", step=0)["cut"]
    assert torch.equal(whole[:, 0] == 0, torch.tensor([False] * 3 + [True] * 3 + [False]))
    assert history.get(1, "parameters", step=0) == other


def test_pieces_are_as_the_schema_says(tmp_path: Path) -> None:
    read_each(tmp_path, [{"cut": piece(rank)} for rank in range(3)])
    for line in (tmp_path / "rank1.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(line), schema("history"))


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
    assert [history.holder(rank, "parameters", {"step": -1}) for rank in range(2)] == [0, 0]
    assert [history.holder(rank, "loss", {"step": 0, "micro": 0}) for rank in range(2)] == [0, 1]
    assert history.every("parameters", 1) == history.every("parameters") != []
    losses = [float(seen.value) for rank in range(2) for seen in history.every("loss", rank)]
    assert losses == [1.5, 7.0]
    assert history.every("gradients") == history.every("gradients", 1) == []


def test_where_ranks_are_real_each_holds_its_own_and_rank_0_is_asked_first(tmp_path: Path) -> None:
    write(tmp_path, 0).close()
    second = HistoryWriter(tmp_path, 1, {})
    second.begin_phase("build")
    second.write("loss", torch.tensor(7.0), step=0, micro=0)
    second.close()
    history = History.read(tmp_path, 2)
    assert history.find(1, "parameters", {"step": -1}) is None
    assert [history.holder(rank, "parameters", {"step": -1}) for rank in range(2)] == [0, 1]
    assert (len(history.every("parameters")), history.every("parameters", 1)) == (1, [])
    assert [float(seen.value) for seen in history.every("loss")] == [1.5]


def test_nested_trees_become_flat_keys() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}

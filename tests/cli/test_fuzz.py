"""The command ``fuzz`` as a user runs it: what it finds, says and returns."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis.strategies import integers

from conformance.case import Case
from conformance.cli.fuzzing import Hunt, Judged, deviation_text, where
from conformance.cli.options import worlds_of
from conformance.cli.show import Ticker
from conformance.drawing import Example
from conformance.fuzz import Deviation, Search
from conformance.plan import Planned
from conformance.subject import Subject
from conformance.verdicts import EXIT_BAD, Finding, Verdict
from tests.cli.here import Done, command

DDP = ["torch.DistributedDataParallel", "--variant", "default", "--device", "cpu"]
MUTANT = ["--mutant", "summed_not_averaged"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, forkserver: None) -> Done:
    folder = tmp_path_factory.mktemp("found")
    return command(folder, "fuzz", *DDP, "--world", "2", "--examples", "1", *MUTANT, "--quiet")


def test_a_planted_defect_is_found_and_named(found: Done) -> None:
    assert found.returncode == 1, found.stdout + found.stderr
    first, *_ = found.stdout.splitlines()
    smallest = "drawn:1.1/sequence/accumulation=1,acts=ss,optimizer=sgd#0"
    assert first == f"FAIL  gradients.scale@torch.DistributedDataParallel/{smallest}"
    assert "cause: summed-not-averaged" in found.stdout
    assert re.search(r"\n1 example, 1 deviation, \d+ checks? passed in ", found.stdout)
    assert "examples a second (2 ranks on cpu, seed 0)" in " ".join(found.stdout.split())
    assert not found.stderr


@pytest.mark.long
def test_its_repro_line_repeats_it(tmp_path: Path, found: Done) -> None:
    line = next(x.strip() for x in found.stdout.splitlines() if " repro " in x)
    again = command(tmp_path, *shlex.split(line)[1:])
    assert again.returncode == 1, again.stdout + again.stderr
    assert "FAIL  gradients.scale@torch.DistributedDataParallel/drawn:1.1/" in again.stdout


def test_a_defect_that_needs_two_ranks_is_found_among_one_and_two(
    tmp_path: Path, forkserver: None
) -> None:
    worlds = ["--world", "1,2", "--examples", "4"]
    done = command(tmp_path, "fuzz", *DDP, *worlds, *MUTANT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\n4 examples, 1 deviation, " in done.stdout
    assert "(1 or 2 ranks on cpu, seed 0)" in " ".join(done.stdout.split())
    (line,) = (x for x in done.stdout.splitlines() if " repro " in x)
    assert " --world 2 --device cpu" in line


NOT_SHARDED = [
    # (what it does, wrapper, what says so, of which smallest example, on how many ranks)
    (
        "full_copy_on_every_rank",
        "torch.DistributedDataParallel",
        "sharding.bytes",
        "drawn:1.6/sequence/accumulation=1,acts=ss,optimizer=sgd",
        2,
    ),
    (
        "full_state_for_a_sharded",
        "fsdp.fully_shard",
        "sharding.saved",
        "drawn:1.5/checkpoint/kind=sharded,options=default",
        4,
    ),
    (
        "gradients_reduced_whole",
        "torch.fully_shard",
        "collectives.bytes",
        "drawn:1.9/sequence/accumulation=1,acts=ss,optimizer=sgd",
        2,
    ),
]


@pytest.mark.parametrize(("mutant", "adapter", "check", "case", "world"), NOT_SHARDED)
def test_a_drawn_example_tells_who_does_not_shard(  # noqa: PLR0913 - a row's columns
    tmp_path: Path, forkserver: None, mutant: str, adapter: str, check: str, case: str, world: int
) -> None:
    id = f"{check}@{adapter}/{case}#0"
    where = ["--world", str(world), "--device", "cpu"]
    done = command(tmp_path, "repro", id, *where, "--mutant", mutant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith(f"FAIL  {id}"), done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("mutant", "adapter", "check", "variants"),
    [
        (*NOT_SHARDED[0][:3], ["--variant", "default"]),
        ("full_state_for_a_sharded", "fsdp.fully_shard", "state_dict.keys", []),
    ],
)
def test_who_does_not_shard_is_found_among_a_few_examples(
    tmp_path: Path, forkserver: None, mutant: str, adapter: str, check: str, variants: list[str]
) -> None:
    searched = ["--examples", "8", "--device", "cpu", *variants]
    done = command(tmp_path, "fuzz", adapter, *searched, "--mutant", mutant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAIL  {check}@{adapter}/drawn:" in done.stdout, done.stdout


FOUND = Finding(
    check="losses.value",
    adapter="a:A",
    variant="default",
    case="mlp/train",
    seed=0,
    verdict=Verdict.FAIL,
    sentence="another loss",
    repro="repeat me",
)
PLANNED = Planned(case=Case.parse("mlp/train"), checks=())
SMALLEST = Example(world=1, subject=Subject(adapter="a:A"), planned=PLANNED)
LARGER = replace(SMALLEST, world=4)


def test_where_a_deviation_was_first_met_is_told_with_its_ranks() -> None:
    found = Deviation(finding=FOUND, example=SMALLEST, met=LARGER, tried=3, steady=True)
    told = "\n      first met after 3 examples: a:A/mlp/train of 4 ranks\n"
    assert told in deviation_text(found)
    assert "first met" not in deviation_text(replace(found, met=SMALLEST))


class Wrong(Judged):
    """Judges without ranks that all of four ranks and more is wrong; asks at every example."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self.checks, self.faults, self._ask = 0, {}, ask

    def __call__(self, example: Example) -> Sequence[Finding]:
        self._ask()
        return [FOUND] if example.world >= 4 else []


def hunt(quiet: bool, ask: Callable[[Hunt], None]) -> Hunt:  # noqa: FBT001
    judged = Wrong(lambda: ask(made))
    worlds = integers(0, 64).map(lambda world: replace(SMALLEST, world=world))
    search = Search(judge=judged, strategy=worlds, examples=40)
    made = Hunt(search, judged, "as many ranks as that", Ticker(quiet=quiet))
    return made


def test_a_search_that_is_ended_shows_what_it_was_making_smaller(monkeypatch, capsys) -> None:
    monkeypatch.setattr("conformance.cli.show.EVERY", 0.0)  # what is quiet says nothing even so
    asked: list[str] = []
    assert hunt(True, lambda hunt: asked.append(hunt.rest())).follow() == EXIT_BAD
    shown = capsys.readouterr()
    at_its_end = shown.out[: shown.out.index("\n\n")]
    assert "0 deviations" in asked[0]
    assert "FAIL" not in asked[0]
    ended = "\n      the search was ended before this was as small as it gets\n      repeat me\n"
    unfinished = [text for text in asked if ended in text]
    assert unfinished
    assert {text.partition("\n")[0] for text in unfinished} == {f"FAIL  {FOUND.id}"}
    assert all("\n\n" in text and ", 1 deviation, " in text for text in unfinished)
    assert "was ended" not in shown.out  # it came to its end, and what was found was shown
    assert at_its_end.startswith(f"FAIL  {FOUND.id}")
    assert asked[-1].startswith("39 examples, 1 deviation, ")
    assert not shown.err


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_search_says_how_far_it_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr("conformance.cli.show.EVERY", 0.0)
    hunt(False, lambda _: None).follow()
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("fsdp-conformance: 0 of 40 examples, 0 deviations in ")
    smaller = re.compile(
        r"fsdp-conformance: \d+ of 40 examples, 1 deviation in .*; making the last"
    )
    assert any(map(smaller.match, lines))
    assert lines[-1].startswith("fsdp-conformance: 39 of 40 examples, 1 deviation in ")
    monkeypatch.setattr("conformance.cli.show.EVERY", 600.0)
    hunt(False, lambda _: None).follow()
    assert not capsys.readouterr().err


def test_on_a_terminal_one_line_is_written_over_that_says_how_far_a_search_is(
    monkeypatch, capsys
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", terminal)
    hunt(False, lambda _: None).follow()
    text = terminal.getvalue()
    assert re.match("\r\x1b\\[K0 of 40 examples, 0 deviations in \\d+ s\r\x1b\\[K", text)
    stays = [line.rpartition("\r\x1b[K")[2] for line in text.split("\n")]
    assert stays[0] == f"FAIL  {FOUND.id}"
    assert not [line for line in stays if " of 40 examples" in line]


def test_worlds_are_tried_from_the_smallest_on_and_named_by_their_device() -> None:
    assert worlds_of("4,1,2,4") == [1, 2, 4]
    assert where({2: "cpu"}) == "2 ranks on cpu"
    assert where({1: "cpu"}) == "1 rank on cpu"
    assert where({1: "npu", 2: "npu", 4: "cpu"}) == "1 or 2 ranks on npu, 4 ranks on cpu"
    assert where({1: "cpu", 2: "cpu", 4: "cpu"}) == "1 or 2 or 4 ranks on cpu"

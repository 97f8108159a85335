"""What the cases of a model have in common is run once by the oracle, and written in each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance import execute
from conformance.adapter import Conventions, Wrapped
from conformance.execute import OracleRequest, run_oracle
from conformance.oracle import VirtualRanks
from conformance.scenarios import SCENARIOS, Run, Scenario

ALONE: Any = SimpleNamespace(
    rank=0,
    world_size=1,
    device=torch.device("cpu"),
    recorder=SimpleNamespace(off=nullcontext),
)
"""The only rank of a pool: it runs every flavour."""

SAVED = "kind=save"
KINDS = ("kind=sharded,options=default", "kind=full,options=explicit", SAVED)
KINDS_AGAIN = (SAVED, "kind=local,options=default", "kind=full,options=default")


def asked(case: str, folder: Path, **other: Any) -> OracleRequest:
    request = OracleRequest(
        world=2,
        conventions=Conventions(),
        capabilities=(),
        case=case,
        seed=0,
        directory=str(folder / case.replace("/", "~")),
    )
    return replace(request, **other)


def written(request: OracleRequest) -> dict[str, object]:
    """Every file that the oracle writes for a request, without the clock."""
    run_oracle(ALONE, request=request)
    folder = Path(request.directory)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.suffix == ".safetensors"
        else [json.loads(line) | {"at": 0} for line in path.read_text().splitlines()]
        for path in sorted(folder.rglob("rank*"))
    }


def differing(left: dict[str, object], right: dict[str, object]) -> list[str]:
    """Names of the files that are not alike."""
    return [name for name in sorted(left | right) if left.get(name) != right.get(name)]


def written_alone(request: OracleRequest) -> dict[str, object]:
    """The same where no other case was run before."""
    execute._parts_of_run.cache_clear()
    return written(request)


@pytest.fixture(autouse=True)
def nothing_run_before() -> Iterator[None]:
    execute._parts_of_run.cache_clear()
    yield
    execute._parts_of_run.cache_clear()


@pytest.mark.parametrize(
    ("model", "kinds", "reduced_as"),
    [
        ("tiny", KINDS, "bfloat16"),  # has a run with random numbers of its own
        ("recomputed", KINDS, "parameter"),
        ("batchnorm", KINDS, "parameter"),
        ("batchnorm", KINDS_AGAIN, "parameter"),
    ],
)
def test_a_case_is_written_alike_whatever_was_run_before(
    model: str, kinds: tuple[str, ...], reduced_as: str, tmp_path: Path
) -> None:
    cases = [f"{model}/checkpoint/{kind}" for kind in kinds]
    requests = [asked(case, tmp_path) for case in cases]
    requests.append(asked(f"{model}/resume/kind=full,ranks=half", tmp_path, second_world=1))
    conventions = Conventions(reduced_as=reduced_as)
    requests = [replace(request, conventions=conventions) for request in requests]
    alone = [written_alone(request) for request in requests]
    execute._parts_of_run.cache_clear()
    for request, own in zip(requests, alone, strict=True):
        assert differing(written(request), own) == [], request.case


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"world": 3},
        {"conventions": Conventions(gradients="sum")},
        {"conventions": Conventions(buffers="rank0")},
        {"conventions": Conventions(reduced_as="bfloat16")},
        {"case": f"batchnorm/checkpoint/{SAVED},optimizer=sgd"},
        {"case": f"batchnorm/checkpoint/accumulation=2,{SAVED}"},
    ],
    ids=["seed", "world", "sum", "buffers", "bfloat16", "sgd", "accumulation"],
)
def test_what_is_computed_in_another_way_is_not_taken_over(
    other: dict[str, Any], tmp_path: Path
) -> None:
    request = asked(f"batchnorm/checkpoint/{SAVED}", tmp_path)
    alone = written_alone(replace(request, **other))
    execute._parts_of_run.cache_clear()
    assert differing(written(request), alone)
    assert differing(written(replace(request, **other)), alone) == []


def test_what_cases_have_in_common_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = VirtualRanks.step

    def counted(self: VirtualRanks, *args: Any, **options: Any) -> Any:
        steps.append(1)
        return step(self, *args, **options)

    monkeypatch.setattr(VirtualRanks, "step", counted)
    for kind in KINDS:
        run_oracle(ALONE, request=asked(f"tiny/checkpoint/{kind}", tmp_path))
    # two flavours; two steps before the save, two after it, and one more of a saved directory
    assert len(steps) == 2 * (2 + 2 + 1)


def test_what_follows_a_part_knows_the_weights_before_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(run: Run) -> Wrapped:
        with run.phase("build"):
            w = run.build()
            run.train_step(w, 0)
        return w

    def program(run: Run) -> None:
        w = run.shared("begun", begun)
        with run.phase("stale losses"):
            run.train_step(w, 1)

    monkeypatch.setitem(SCENARIOS, "train", Scenario(name="train", program=program, why=""))  # type: ignore[arg-type]
    request = asked("mlp/train", tmp_path)
    alone = written_alone(request)
    assert "stale_loss" in str(alone)
    assert differing(written(request), alone) == []

"""What a run says of its mutant: nothing is hidden, and nothing counts as killed that was not."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.package.tree import ROOT

HERE = ROOT / ".ci" / "mutation"
TEST = "tests/a/test_a.py::test_one"
MODULE = "fsdp/engine/layout.py"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import modules of the tool by name; the source of mutants is no part of it."""
    own = {path.stem for path in HERE.glob("*.py")}
    monkeypatch.syspath_prepend(HERE)
    sites = ModuleType("sites")
    for name in ("Mutant", "Place", "places_of"):
        setattr(sites, name, None)
    monkeypatch.setitem(sys.modules, "sites", sites)
    yield importlib.import_module
    for name in own - {"sites"}:
        if (getattr(sys.modules.get(name), "__file__", None) or "").startswith(str(HERE)):
            del sys.modules[name]


def failure(text: str = "E   assert 1 == 2", **more: str) -> dict[str, str]:
    return {"test": TEST, "when": "call", "ranks": "", "text": text} | more


def answer(load: Any, *failures: dict[str, str], **more: Any) -> Any:
    crew = load("crew")
    order = crew.Order(key="key", files=("tests/a/test_a.py",), limit=1.0, module=MODULE)
    given = {"exit": 1, "seconds": 0.1, "output": "", "failures": failures} | more
    return crew.Answer(order=order, **given)


@pytest.mark.parametrize(
    ("failures", "more", "expected"),
    [
        ([], {"exit": 0}, "survived"),
        ([failure()], {}, "killed"),
        ([failure()], {"exit": 3}, "harness"),
        ([failure()], {"exit": -9}, "harness"),
        ([], {"exit": None}, "time-out"),
        ([], {"exit": 5}, "harness"),
        ([failure(ranks="HANG")], {}, "time-out"),
        ([failure(ranks="CRASH")], {}, "harness"),
        ([failure(ranks="TRANSPORT")], {}, "harness"),
        ([failure("E   hypothesis.errors.FlakyFailure: x")], {}, "harness"),
        ([failure("E   subprocess.TimeoutExpired: 'python' in 9 s")], {}, "time-out"),
        ([failure("E   TimeoutError")], {}, "time-out"),
        ([failure("    with raises(TimeoutError):\nE   assert 0")], {}, "killed"),
        # The package is there: it is the tests that did not see the mutant.
        ([failure(when="collect")], {}, "harness"),
        ([failure(when="collect"), failure()], {}, "killed"),
        ([failure(when="collect")], {"imports": False}, "unimportable"),
        ([], {"exit": 4, "imports": False}, "unimportable"),
    ],
)
def test_only_a_test_that_fails_by_itself_has_killed(
    load: Any, failures: list[dict[str, str]], more: dict[str, Any], expected: str
) -> None:
    found, _ = load("verdict").outcome(answer(load, *failures, **more))
    assert found == expected


class Bench:
    """Answers each order at once: tests fail with the mutant, and the first one without it too."""

    def __init__(self, load: Any) -> None:
        self._load = load
        self._orders: list[Any] = []

    def put(self, order: Any) -> None:
        self._orders.append(order)

    def answers(self, deadline: float) -> Iterator[Any]:
        while self._orders:
            order = self._orders.pop(0)
            yield self._load("crew").Answer(
                order=order, exit=1, seconds=0.1, output="", failures=[failure(test=order.tests[0])]
            )


def session(load: Any, *, canaries: Any = (), lines: tuple[int, ...] = (1,)) -> Any:
    cover = load("cover").Cover()
    source = (ROOT / MODULE).read_text(encoding="utf-8")
    last = len(source.splitlines())
    text = f"1-{last}" if lines else ""
    cover.add({TEST: {"outcome": "passed", "seconds": 0.1, "lines": {MODULE: text}}}, [])
    mutant = SimpleNamespace(key="key", place=SimpleNamespace(module=MODULE), line=last, text="")
    asked = {"canaries": canaries, "seconds": 1.0, "long": False}
    return load("session").Session(Bench(load), cover, [mutant], **asked)


def test_a_mutant_whose_only_test_fails_by_itself_has_survived(load: Any) -> None:
    made = session(load)
    told = [(how, what) for _, how, what, _ in made.answers(time.monotonic() + 60)]
    assert told == [("killed", TEST), ("survived", "no test runs this line")]
    assert set(made.unsteady) == {TEST}
    assert not made.left


def test_a_mutant_that_was_not_run_in_time_is_left(load: Any) -> None:
    made = session(load)
    made._crew.answers = lambda deadline: iter(())
    assert not list(made.answers(0.0))
    assert made.left == {"key"}


def test_a_canary_that_no_test_runs_spoils_the_run(load: Any) -> None:
    canary = SimpleNamespace(module=MODULE, changed=lambda root: (1, ""))
    with pytest.raises(load("session").SpoiltError, match="no test runs this line"):
        session(load, canaries=[canary], lines=())


def test_a_module_that_is_there_is_told_from_one_that_cannot_be_imported(load: Any) -> None:
    imports = load("bench")._imports
    assert [imports(name) for name in (MODULE, "", "fsdp/nothing.py")] == [True, True, False]

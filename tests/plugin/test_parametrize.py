"""A downstream project's own test file, decorated, run by two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import conformance
from conformance import Adapter, parametrize_with_checks
from conformance.causes import Cause
from conformance.errors import UsageError
from conformance.expectations import Expectation, Expectations
from conformance.names import Depth
from conformance.parametrize import settle
from conformance.report.lines import Role
from conformance.report.words import WIDTH
from conformance.scenarios import SCENARIOS
from conformance.work import Selection, work_of
from tests.cli.literal import judged

NAMED = [name for name in conformance.__all__ if name != "CAPABILITIES"]
TEST_FILE = '''
import os
import pathlib

from torch.nn.parallel import DistributedDataParallel

from conformance import Adapter, Wrapped, parametrize_with_checks


class Mine(Adapter):
    """Halves the threshold of clipping; says where and how often it is built."""

    capabilities = frozenset({"gradients", "clip.p2", "clip.gradients"})

    def build(self, model, make_optimizer, config):
        built = pathlib.Path(os.environ["BUILT"]) / f"{os.getpid()}"
        built.open("a").write("built ")
        module = DistributedDataParallel(model)
        return Wrapped(module=module, optimizer=make_optimizer(module.parameters()))

    def bare(self, w):
        return w.module.module

    def clip_grad_norm(self, w, max_norm, norm_type):
        return super().clip_grad_norm(w, max_norm / 2, norm_type)


CHECKS = ["gradients.scale", "clip.gradients", "clip.norm", "two_forwards.gradients"]


@parametrize_with_checks(Mine, models="mlp", checks=CHECKS, device="cpu", expect="expected.txt")
def test_mine(check):
    check()
'''
EXPECTED = "clip.gradients@test_mine:Mine/*adamw#0: halves the threshold\n"
CONFIGURATION = (
    "[pytest]\naddopts = --strict-markers\nfilterwarnings = error::pytest.PytestWarning\n"
)


@pytest.fixture(
    scope="module", params=["one process", pytest.param("two workers", marks=pytest.mark.long)]
)
def processes(request: pytest.FixtureRequest) -> list[str]:
    """Two workers share what one has run; each imports torch and starts ranks of its own."""
    return ["-n", "2"] if request.param == "two workers" else ["-n", "0"]


@pytest.fixture(scope="module")
def project(tmp_path_factory, processes: list[str]) -> Path:
    folder: Path = tmp_path_factory.mktemp("project")
    (folder / "test_mine.py").write_text(TEST_FILE)
    (folder / "expected.txt").write_text(EXPECTED)
    (folder / "pytest.ini").write_text(CONFIGURATION)
    (folder / "built").mkdir()
    return folder


def start(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        # -P: the project's folder is not importable unless pytest or the suite makes it so
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        env={**environment, "BUILT": str(project / "built")},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def done(project: Path, processes: list[str]) -> subprocess.CompletedProcess[str]:
    # the mode in which a test file cannot be imported by its name, which is the hard one for ranks
    arguments = ["--import-mode=importlib", "--junitxml=report.xml", "--basetemp=base"]
    return start(project, *processes, "-rsx", *arguments)


@pytest.fixture(scope="module")
def outcomes(project: Path, done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Finding id to failure, skipped or passed."""
    assert (project / "report.xml").exists(), done.stdout + done.stderr
    found: dict[str, str] = {}
    for case in ET.parse(project / "report.xml").getroot().iter("testcase"):
        name = re.fullmatch(r"test_mine\[(.*)\]", case.get("name", ""))
        assert name
        found[name[1]] = next((child.tag for child in case if child.tag != "system-out"), "passed")
    return found


def of(outcomes: dict[str, str], check: str) -> dict[str, str]:
    return {id: outcome for id, outcome in outcomes.items() if id.startswith(f"{check}@")}


def test_the_ids_are_those_of_the_findings(outcomes: dict[str, str]) -> None:
    assert "gradients.scale@test_mine:Mine/mlp/train/accumulation=1,optimizer=sgd#0" in outcomes


def test_what_passes_passes(outcomes: dict[str, str]) -> None:
    found = of(outcomes, "gradients.scale") | of(outcomes, "run.completed")
    assert len(found) == 6
    assert set(found.values()) == {"passed"}


def test_what_fails_fails_with_sentence_and_repro(
    outcomes: dict[str, str], done: subprocess.CompletedProcess[str]
) -> None:
    found = of(outcomes, "clip.gradients")
    assert {id for id, outcome in found.items() if outcome == "failure"} == {
        id for id in found if "sgd" in id
    }
    assert "FAIL  clip.gradients@test_mine:Mine/mlp/train/accumulation=1,optimizer=sgd#0\n" in (
        done.stdout
    )
    assert "fsdp-conformance repro 'clip.gradients@test_mine:Mine/mlp/train" in done.stdout


def test_what_is_expected_to_fail_is_xfailed_with_its_reason(
    outcomes: dict[str, str], done: subprocess.CompletedProcess[str]
) -> None:
    found = of(outcomes, "clip.gradients")
    assert {id for id, outcome in found.items() if outcome == "skipped"} == {
        id for id in found if "adamw" in id
    }
    assert re.search(r"XFAIL .*clip.gradients@.* halves the threshold", done.stdout)


def test_one_run_of_a_case_serves_all_tests(
    project: Path, outcomes: dict[str, str], done: subprocess.CompletedProcess[str]
) -> None:
    built = [path.read_text().count("built") for path in (project / "built").iterdir()]
    cases = {id.partition("@")[2] for id in outcomes}
    assert sum(built) == 2 * len(cases)  # once on each of two ranks
    histories = list((project / "base" / "conformance").rglob("case.json"))
    assert len(histories) == len(cases)


DDP = "torch.DistributedDataParallel"


def ids_of(**options: object) -> list[str]:
    """Of the tests that a decorated function becomes."""

    @parametrize_with_checks(DDP, variant="default", device="cpu", **options)  # type: ignore[arg-type]
    def decorated(check: object) -> None:
        pass

    marks = decorated.pytestmark  # type: ignore[attr-defined]
    return next(mark.kwargs["ids"] for mark in marks if mark.name == "parametrize")


def test_cases_and_depth_choose_as_those_of_the_command_do() -> None:
    def selected(**fields: object) -> set[str]:
        selection = Selection(adapters=(DDP,), variants=("default",), **fields)  # type: ignore[arg-type]
        items = work_of(selection).items
        return {str(i.planned.case) for i in items if i.role is Role.JUDGED}

    def cases(**options: object) -> set[str]:
        return {id.partition("/")[2].partition("#")[0] for id in ids_of(**options)}

    pattern = "*/train/*"
    assert cases(cases=pattern) == cases(cases=[pattern]) == selected(cases=(pattern,))
    assert cases(depth="narrow") == selected(depth=Depth.NARROW) < selected() == cases()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ["mpl"]}, "no model 'mpl'; did you mean mlp"),
        ({"cases": "mlp/trian/*"}, r"no case 'mlp/trian/\*'; did you mean 'mlp/train/\*'"),
        ({"depth": "ful"}, "no depth 'ful'; did you mean full"),
        ({"world": 0}, r"^world=0: a run needs at least 1 rank"),
        ({"expect": "missing.txt"}, r"^expect 'missing.txt': No such file"),
        ({"expect": "the--old.txt"}, r"^expect 'the--old.txt': No such file"),
        ({"world": 10**6}, r"^world=1000000: a rank takes at least"),
    ],
)
def test_a_wrong_name_is_an_error_of_the_decorator(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        ids_of(**options)
    # what pytest shows: the lines of who calls it
    shown = refused.traceback.filter(refused)
    assert {Path(entry.path) for entry in shown} == {Path(__file__)}
    assert refused.value.__suppress_context__
    assert refused.value.__cause__ is None


def test_a_failure_says_what_the_case_does_and_how_to_repeat_it() -> None:
    long = "rank 1: gradient of 0.weight is " + "0.5 times the oracle's, " * 6
    found = judged("FAIL", sentence=long, cause=Cause.STALE)
    with pytest.raises(pytest.fail.Exception) as failed:
        settle(found, Expectations())
    lines = str(failed.value).splitlines()
    assert lines[0] == f"FAIL  {found.finding.id}"
    assert f"      cause: {Cause.STALE}" in lines
    assert f"      train: {SCENARIOS['train'].why}" in lines
    assert lines[-1] == f"      {found.finding.repro}"
    assert max(map(len, lines[:-1])) <= WIDTH


def test_an_adapter_that_ranks_cannot_import_is_refused() -> None:
    class Local(Adapter):
        pass

    with pytest.raises(UsageError, match="define it at module level"):
        parametrize_with_checks(Local)


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        ("PASS", None),
        ("FAIL", pytest.fail.Exception),
        ("HANG", pytest.fail.Exception),
        ("DESYNC", pytest.fail.Exception),
        ("CRASH", pytest.fail.Exception),
        ("ERROR", pytest.fail.Exception),
        ("VACUOUS", pytest.fail.Exception),
        ("UNSUPPORTED", pytest.skip.Exception),
        ("NO_POWER", pytest.skip.Exception),
        ("BLOCKED", pytest.skip.Exception),
    ],
)
def test_every_verdict_has_its_outcome(verdict: str, outcome: type[BaseException] | None) -> None:
    # by hand: a skip that `pytest.raises` does not expect would skip this test
    came: BaseException | None = None
    try:
        settle(judged(verdict, sentence="what was seen"), Expectations())
    except (pytest.fail.Exception, pytest.skip.Exception) as error:
        came = error
    assert type(came) is (outcome or type(None))
    assert came is None or "what was seen" in str(came)


def test_an_unexpected_pass_fails() -> None:
    expected = Expectations([Expectation(pattern="*", reason="was wrong once")])
    with pytest.raises(pytest.fail.Exception, match=r"XPASS(.|\n)*was wrong once"):
        settle(judged("PASS"), expected)


def test_importing_the_package_imports_neither_torch_nor_pytest() -> None:
    code = "import sys, conformance; print([n for n in ('torch', 'pytest') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    assert {name: getattr(conformance, name).__name__ for name in NAMED} == {n: n for n in NAMED}
    assert set(NAMED) | {"CAPABILITIES"} == set(conformance.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'parametrise'"):
        _ = conformance.parametrise

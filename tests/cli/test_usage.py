"""Wrong usage: one line with the near match, status 64, and nothing written."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import pytest

from conformance import machine
from conformance.cli import main
from conformance.cli.running import _folder
from conformance.errors import UsageError
from conformance.machine import default_jobs, device_for
from conformance.verdicts import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE

RUN = ["run", "torch.fully_shard"]


def command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fsdp-conformance", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "torch.fuly_shard"], "did you mean torch.fully_shard"),
        (["run", "no_such_module:Adapter"], "cannot import no_such_module"),
        ([*RUN, "--variant", "defalt"], "did you mean default"),
        ([*RUN, "--check", "gradients.valu"], "did you mean gradients.value"),
        ([*RUN, "--model", "mpl"], "did you mean mlp"),
        ([*RUN, "--profile", "cor"], "did you mean core? known: checkpoint, communication, core"),
        ([*RUN, "--profile", "xyz"], "no profile 'xyz'; known: checkpoint, communication, core"),
        ([*RUN, "--check", "zzz"], " all 29: fsdp-conformance list checks"),
        ([*RUN, "--baseline", "dpd"], "no baseline 'dpd'; did you mean ddp? known: ddp, oracle"),
        ([*RUN, "--depth", "ful"], "no depth 'ful'; did you mean full? known: full, narrow, wide"),
        ([*RUN, "--case", "*/trian/*"], "fsdp-conformance list cases shows all"),
        ([*RUN, "--world", "0"], "--world 0: a run needs at least 1 rank"),
        ([*RUN, "--world", "two"], "--world"),
        ([*RUN, "--device", "cpuu"], "no device 'cpuu'; did you mean cpu? known: auto, cpu"),
        ([*RUN, "--jobs", "0"], "--jobs 0: at least 1"),
        ([*RUN, "--timeout", "0"], "--timeout 0: more than 0 seconds"),
        ([*RUN, "--expect", "missing.txt"], "--expect missing.txt: No such file"),
        ([*RUN, "--devise", "cpu"], "--device"),
        (["run"], "Missing argument"),
        (["rnu", "torch.fully_shard"], "no command 'rnu'; did you mean run"),
        (["list", "chekcs"], "no list 'chekcs'; did you mean checks"),
        (["repro", "losses.value"], "is not a finding id"),
        (["repro", "losses.valu@torch.fully_shard/mlp/train#0"], "did you mean losses.value"),
        (["repro", "losses.value@torch.fully_shard/mpl/train#0"], "did you mean mlp"),
        (["repro", "losses.value@torch.fully_shard/mlp/trian#0"], "did you mean train"),
        (["repro", "losses.value@torch.fully_shard[x]/mlp/train#0"], "no variant"),
        (["repro", "state_dict.keys@torch.fully_shard/mlp/train#0"], "says nothing about"),
        (
            ["repro", "losses.value@torch.fully_shard/mlp/train#0", "--mutant", "last_step_los"],
            "did you mean last_step_lost",
        ),
        (["selftest", "--mutant", "last_step_los"], "did you mean last_step_lost"),
        (["recheck", "."], "holds no run.jsonl"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run":
        arguments = [*arguments, "--out", "result"]
    assert command(monkeypatch, *arguments) == EXIT_USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


ADAPTERS = """
import conformance


class Mine(conformance.Adapter):
    def build(self, model, make_optimizer, config):
        raise AssertionError


class Unfinished(conformance.Adapter):
    pass


def wrap(model):
    return model
"""


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (ADAPTERS, "{}", "no adapter '{}'; did you mean {}:Mine?"),
        (ADAPTERS, "{}.Mine", "no adapter '{}.Mine'; did you mean {}:Mine?"),
        (ADAPTERS, "{}.py", "no adapter '{}.py'; did you mean {}:Mine?"),
        (ADAPTERS, "{}:Nope", "adapter '{}:Nope': no adapter class 'Nope'; known: Mine"),
        (ADAPTERS, "{}:", "adapter '{}:': no adapter class ''; known: Mine"),
        (
            ADAPTERS,
            "{}:wrap",
            "adapter '{}:wrap': wrap is not a subclass of conformance.Adapter; {} has Mine",
        ),
        (
            ADAPTERS,
            "{}:Unfinished",
            "adapter '{}:Unfinished': Unfinished does not define build(self, model,"
            " make_optimizer, config), which wraps the model and returns a conformance.Wrapped",
        ),
        (
            "from conformance import Adapter",
            "{}:Nope",
            "adapter '{}:Nope': {} holds no subclass of conformance.Adapter that defines build()",
        ),
        (
            "from conformance import Adapter",
            "{}",
            "(your own: package.module:Class; the module {} holds none)",
        ),
        ("", "zzz{}", "torch.fully_shard (your own: package.module:Class)"),
        ("1 / 0", "{}:Mine", "importing {} raised ZeroDivisionError: division by zero ("),
        ("def f(:", "{}:Mine", "importing {} raised SyntaxError: invalid syntax ({}.py, line 1)"),
        ("import nonsense_", "{}", "cannot import {}: No module named 'nonsense_'"),
    ],
)
def test_a_name_that_leads_to_no_adapter_is_answered_with_those_that_are_there(
    tmp_path: Path, monkeypatch, capsys, module: str, name: str, message: str
) -> None:
    own = f"adapters_{zlib.crc32(str(tmp_path).encode())}"  # imported once in a process
    (tmp_path / f"{own}.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert command(monkeypatch, "run", name.replace("{}", own), "--out", "result") == EXIT_USAGE
    shown = capsys.readouterr().err
    assert message.replace("{}", own) in shown
    assert len(shown.splitlines()) == 1
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize("name", [".hidden", "notes.txt"])
def test_a_folder_that_holds_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError) as refused, _folder(tmp_path):
        pass
    assert str(refused.value) == (
        f"--out {tmp_path}: holds what is not of a run, such as {name};"
        " name a new or an empty folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    with _folder(tmp_path) as folder:
        assert folder == tmp_path.resolve()
        assert [path.name for path in tmp_path.iterdir()] == ["histories"]


@pytest.mark.parametrize("name", ["run.jsonl", "histories"])
def test_a_folder_that_holds_a_run_is_refused(
    tmp_path: Path, monkeypatch, capsys, name: str
) -> None:
    (tmp_path / name).mkdir()
    assert command(monkeypatch, *RUN, "--out", str(tmp_path)) == EXIT_USAGE
    assert "holds a run already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_is_no_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert command(monkeypatch, *RUN, "--out", str(path)) == EXIT_USAGE
    assert "not a folder" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "what", ["checks", "adapters", "models", "cases", "mutants", "capabilities"]
)
def test_every_list_has_names_as_text_and_as_json(monkeypatch, capsys, what: str) -> None:
    assert command(monkeypatch, "list", what, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert command(monkeypatch, "list", what) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [next(iter(row.values())) for row in rows]
    assert names
    assert [line for line in lines if not line.startswith(" ")] == names
    assert max(len(line) for line in lines) <= 100


def test_a_fault_of_ours_has_a_status_of_its_own(monkeypatch, capsys) -> None:
    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("conformance.cli.listing.listing", broken)
    assert command(monkeypatch, "list", "checks") == EXIT_INTERNAL
    assert "internal fault" in capsys.readouterr().err


def test_an_interrupt_has_a_status_of_its_own(monkeypatch, capsys) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("conformance.cli.listing.listing", interrupted)
    assert command(monkeypatch, "list", "checks") == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "fsdp-conformance: interrupted\n"


# -- machines that are not here -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "asked", "world", "device"),
    [
        (0, "auto", 2, "cpu"),
        (4, "auto", 4, "xpu"),
        (4, "auto", 5, "cpu"),
        (4, "cpu", 2, "cpu"),
        (4, "xpu", 2, "xpu"),
    ],
)
def test_auto_takes_accelerators_if_there_is_one_a_rank(
    monkeypatch, count: int, asked: str, world: int, device: str
) -> None:
    here = ("xpu", count) if count else ("cpu", 0)
    monkeypatch.setattr(machine, "accelerator", lambda: here)
    assert device_for(asked, world) == device


def test_more_ranks_than_accelerators_are_refused_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: ("xpu", 1))
    with pytest.raises(UsageError, match="--world 2: 1 xpu device here; use --world 1 or --device"):
        device_for("xpu", 2)


@pytest.mark.parametrize(
    ("device", "world", "jobs"), [("cpu", 2, 4), ("cpu", 8, 1), ("xpu", 2, 2), ("xpu", 4, 1)]
)
def test_jobs_share_cores_or_accelerators(monkeypatch, device: str, world: int, jobs: int) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: ("xpu", 4))
    monkeypatch.setattr(machine, "cores", lambda: 6)
    assert default_jobs(world, device) == jobs

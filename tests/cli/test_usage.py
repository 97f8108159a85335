"""Wrong usage: one line with the near match, status 64, and nothing written."""

from __future__ import annotations

import json
import linecache
import logging
import platform
import re
import sys
import zlib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from conformance import machine
from conformance.adapters import make_adapter
from conformance.checks import CHECKS
from conformance.cli import main
from conformance.cli.app import WithRanks, app
from conformance.cli.fuzzing import _rate
from conformance.cli.running import _folder
from conformance.errors import UsageError
from conformance.machine import default_jobs, device_for, notes
from conformance.models import drawn
from conformance.names import PROFILES
from conformance.scenarios.sequence import ACTS
from conformance.verdicts import EXIT_INTERNAL, EXIT_UNDECIDED, EXIT_USAGE
from conformance.versions import versions

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
        (["run", "no_such_module:Adapter"], "nor where else Python looks\n"),
        ([*RUN, "--variant", "defalt"], "did you mean default"),
        ([*RUN, "--variant", "zzz"], " of torch.fully_shard; known: default; hybrid; hybrid,rep"),
        ([*RUN, "--check", "gradients.valu"], "did you mean gradients.value"),
        ([*RUN, "--model", "mpl"], "did you mean mlp"),
        ([*RUN, "--profile", "cor"], "did you mean core? known: checkpoint, communication, core"),
        ([*RUN, "--profile", "xyz"], "no profile 'xyz'; known: checkpoint, communication, core"),
        ([*RUN, "--check", "zzz"], f" all {len(CHECKS)}: fsdp-conformance list checks"),
        ([*RUN, "--baseline", "dpd"], "no baseline 'dpd'; did you mean ddp? known: ddp, oracle"),
        ([*RUN, "--depth", "ful"], "no depth 'ful'; did you mean full? known: full, narrow, wide"),
        ([*RUN, "--case", "*/trian/*"], "fsdp-conformance list cases shows all"),
        ([*RUN, "--case", "mpl/tr*"], "no model 'mpl' of --case 'mpl/tr*'; did you mean mlp?"),
        ([*RUN, "--world", "0"], "--world 0: a run needs at least 1 rank"),
        ([*RUN, "--world", "two"], ": --world 'two': expected a number of ranks, such as 2\n"),
        ([*RUN, "--jobs", "1.5"], ": --jobs '1.5': expected a whole number\n"),
        ([*RUN, "--timeout", "soon"], ": --timeout 'soon': expected a number of seconds\n"),
        ([*RUN, "--device", "cpuu"], "no device 'cpuu'; did you mean cpu? known: auto, cpu"),
        (
            ["selftest", "--page", "none/page.md"],
            "--page 'none/page.md': there is no folder 'none'",
        ),
        (["selftest", "--page", "."], "--page '.': is a folder; name a file"),
        ([*RUN, "--jobs", "0"], "--jobs 0: at least 1"),
        ([*RUN, "--seed", "-1"], "--seed -1: at least 0"),
        (["fuzz", "torch.fully_shard", "--seed", "-1"], "--seed -1: at least 0"),
        ([*RUN, "--timeout", "0"], "--timeout 0: more than 0 seconds"),
        ([*RUN, "--timeout", "nan"], "--timeout nan: more than 0 seconds"),
        (["selftest", "--timeout", "-1"], "--timeout -1: more than 0 seconds"),
        (["selftest", "--jobs", "0"], "--jobs 0: at least 1"),
        (
            ["repro", "losses.value@torch.fully_shard/mlp/train#0", "--timeout", "0"],
            "--timeout 0: more than 0 seconds",
        ),
        ([*RUN, "--expect", "missing.txt"], "--expect 'missing.txt': No such file"),
        ([*RUN, "--expect", ""], ": --expect '': expected a name\n"),
        (["selftest", "--page", ""], ": --page '': expected a name\n"),
        (["recheck", ""], ": directory '': expected a name\n"),
        ([*RUN, "--devise", "cpu"], "--device"),
        (["run"], "Missing argument 'ADAPTER'; see fsdp-conformance run --help\n"),
        (["selftest", "all"], "argument(s) (all); see fsdp-conformance selftest --help\n"),
        (["rnu", "torch.fully_shard"], "no command 'rnu'; did you mean run"),
        (["list", "chekcs"], "no list 'chekcs'; did you mean checks"),
        (["repro", "losses.value"], "is not a finding id"),
        (["repro", "losses.valu@torch.fully_shard/mlp/train#0"], "did you mean losses.value"),
        (["repro", "losses.value@torch.fully_shard/mpl/train#0"], "did you mean mlp"),
        (["repro", "losses.value@torch.fully_shard/mlp/trian#0"], "did you mean train"),
        (["repro", "losses.value@torch.fully_shard[x]/mlp/train#0"], "no variant"),
        (
            ["repro", "state_dict.keys@torch.fully_shard/mlp/train#0"],
            "check 'state_dict.keys' says nothing about the case 'mlp/train'\n",
        ),
        (
            ["repro", "losses.value@torch.fully_shard/mlp/train#0", "--mutant", "last_step_los"],
            "did you mean last_step_lost",
        ),
        (["selftest", "--mutant", "last_step_los"], "did you mean last_step_lost"),
        (["fuzz", "torch.fuly_shard"], "did you mean torch.fully_shard"),
        (["fuzz", "torch.fully_shard", "--examples", "0"], "--examples 0: at least 1"),
        (["fuzz", "torch.fully_shard", "--variant", "defalt"], "did you mean default"),
        (["fuzz", "torch.fully_shard", "--world", "1,two"], "--world '1,two': expected numbers"),
        (["fuzz", "torch.fully_shard", "--world", "2,0"], "--world 0: a run needs at least 1 rank"),
        (
            ["fuzz", "torch.fully_shard", "--world", "1", "--variant", "*replicas=2"],
            "--world '1': too few ranks for the replicas of any variant",
        ),
        (
            ["fuzz", "torch.fully_shard", "--mutant", "last_step_los"],
            "did you mean last_step_lost",
        ),
        (["repro", "losses.value@torch.fully_shard/drawn:6.7z/train#0"], "letters 'z' of 7z"),
        (["repro", "losses.value@torch.fully_shard/drwn:6.7/train#0"], "no model 'drwn:6.7'"),
        (
            ["repro", "losses.value@torch.fully_shard/mlp/sequence/acts=sx#0"],
            "acts='sx' is not a sequence of letters 'sceimdnw'",
        ),
        (
            ["repro", "losses.value@torch.fully_shard/mlp/sequence#0"],
            "acts='' is not a sequence of letters",
        ),
        (["recheck", "."], "holds no run.jsonl"),
        (["recheck", "nowhere"], ": recheck: there is no folder 'nowhere'\n"),
        (["recheck", __file__], f": recheck: {__file__!r} is no folder\n"),
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


STARTS_RANKS = {
    "run": ["torch.fully_shard"],
    "fuzz": ["torch.fully_shard"],
    "selftest": [],
    "repro": ["losses.value@torch.fully_shard/mlp/train#0"],
}


@pytest.mark.parametrize("name", STARTS_RANKS)
def test_ranks_of_torchrun_are_told_to_stay_away(monkeypatch, capsys, name: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command(monkeypatch, name, *STARTS_RANKS[name]) == EXIT_USAGE
    assert "start it once, without torchrun, and with --world 2" in capsys.readouterr().err


def test_what_starts_no_ranks_may_be_one_of_several(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command(monkeypatch, "list", "capabilities") == 0
    starting = [c.callback.__name__ for c in app.registered_commands if c.cls is WithRanks]
    assert sorted(starting) == sorted(STARTS_RANKS)


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

CANNOT_BE_SET_UP = """
import functools; from conformance import Adapter


class Base(Adapter):
    def build(self, model, make_optimizer, config):
        raise AssertionError


class Init(Base):
    def __init__(self):
        raise KeyError("home")


class Leaves(Base):
    def __init__(self):
        raise SystemExit(0)


class Argument(Base):
    def __init__(self, where):
        pass


class Configure(Base):
    def configure(self, options):
        options["depth"]


class Raising(Base):
    @property
    def capabilities(self):
        raise RuntimeError


class Fixed(Base):
    @property
    def capabilities(self):
        return {"gradients"}


class Listed(Base):
    capabilities = ["gradients"]


class NoSet(Base):
    capabilities = "gradients"


class Claims(Base):
    capabilities = frozenset({"gradient"})


class NoMapping(Base):
    variants = ["default"]


class NoOptions(Base):
    variants = {"default": None}


class NoVariant(Base):
    variants = {}


class Choices(Base):
    conventions = {"buffers": "rank0"}


class Replicas(Base):
    replicas = "2"


class Misspelt(Base):
    def no_snyc(self, w):
        raise AssertionError


class Claim(Base):
    capabilites = frozenset()


class Choice(Base):
    def configure(self, options):
        self.conventons = {}


class Half(Base):
    capabilities = frozenset({"gradients", "save"})

    def save(self, w, directory):
        raise AssertionError


class Sharded(Base):
    capabilities = frozenset({"gradients", "model_state.sharded"})


class Value(Base):
    no_sync = True


class Yields(Base):
    def no_sync(self, w):
        yield


class Property(Base):
    @property
    def no_sync(self, w: object) -> object:
        raise AssertionError


class Cached(Base):
    @functools.cached_property
    def zero_grad(self, w):
        raise AssertionError


class NotSelf(Base):
    @property
    def weights():
        raise AssertionError


class Wraps(Base):
    def inner(self, w): ...

    @functools.wraps(inner)
    def backward(self, w): ...


class Scaler(Base):
    capabilities = frozenset({"scaler"})

    def make_scaler(self, w): ...


class Signature(Adapter):
    def build(self, model, make_optimizer=None, *, config):
        raise AssertionError


class NoSelf(Base):
    def zero_grad():
        raise AssertionError


class Short(Base):
    capabilities = frozenset({"model_state.full"})

    def model_state(self, w, kind, *, cpu=False):
        raise AssertionError


class Engine:
    def zero_grads(self):
        raise AssertionError


class Helpers(Base, Engine):
    replicas = "no slip above, so this is told"
    steps = 2
    saved = ()
    variant = "of this class"

    def build(self, model, *given, **named):
        self.zero_grads, self.variant, getattr(self, "weight")

    def no_sync(self, wrapped):
        return self.forwards(wrapped)

    def step(*everything, **besides):
        raise AssertionError

    save = print

    def weight(self, w):
        raise AssertionError

    def forwards(self, w):
        raise AssertionError

    def step_optimizer(w):
        raise AssertionError

    def evaluate(self, w, batch, loss_fn, steps=1):
        self.step_optimizer(w)

    def _nosync(self, w):
        raise AssertionError

    def load_optimizer_state(self, w):
        raise AssertionError

    def plain(self, w):
        raise AssertionError

    def full_parameter(self, w):
        raise AssertionError

    def full_parameters(self, w):
        raise AssertionError
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
        (CANNOT_BE_SET_UP, "{}:Init", "Init() raised KeyError: 'home' (TMP/{}.py, line 12)"),
        (CANNOT_BE_SET_UP, "{}:Leaves", "Leaves() raised SystemExit: 0 (TMP/{}.py, line 17)"),
        (CANNOT_BE_SET_UP, "{}:Argument", "missing 1 required positional argument: 'where'\n"),
        (
            CANNOT_BE_SET_UP,
            "{}:Configure",
            "configure() for variant 'default' raised KeyError: 'depth' (TMP/{}.py, line 27)",
        ),
        (CANNOT_BE_SET_UP, "{}:Raising", "capabilities raised RuntimeError (TMP/{}.py, line 33)"),
        (CANNOT_BE_SET_UP, "{}:Fixed", "setting capabilities raised AttributeError: "),
        (CANNOT_BE_SET_UP, "{}:Listed", "must be a frozenset of names; got ['gradients']"),
        (CANNOT_BE_SET_UP, "{}:NoSet", "must be a frozenset of names; got 'gradients'"),
        (
            CANNOT_BE_SET_UP,
            "{}:Claims",
            "no capability 'gradient' (claimed by {}:Claims); did you mean gradients",
        ),
        (CANNOT_BE_SET_UP, "{}:NoMapping", "on the class, such as"),
        (
            CANNOT_BE_SET_UP,
            "{}:NoOptions",
            "variants['default'] must be a mapping of options; got None",
        ),
        (CANNOT_BE_SET_UP, "{}:NoVariant", "variants is empty, so there is nothing to judge"),
        (
            CANNOT_BE_SET_UP,
            "{}:Choices",
            "must be a conformance.Conventions; got {'buffers': 'rank0'}",
        ),
        (
            CANNOT_BE_SET_UP,
            "{}:Misspelt",
            "adapter '{}:Misspelt': nothing asks for 'no_snyc'; did you mean no_sync? (a helper of"
            " yours: name it _no_snyc)",
        ),
        (CANNOT_BE_SET_UP, "{}:Choice", "for 'conventons'; did you mean conventions? ("),
        (CANNOT_BE_SET_UP, "{}:Half", "claims 'save', but does not define load()\n"),
        (
            CANNOT_BE_SET_UP,
            "{}:Sharded",
            "claims 'model_state.sharded', but does not define model_state()\n",
        ),
        (
            CANNOT_BE_SET_UP,
            "{}:Yields",
            "no_sync() yields; it lacks the decorator @contextlib.contextmanager\n",
        ),
        (CANNOT_BE_SET_UP, "{}:Value", "no_sync must be a method; got True\n"),
        (
            CANNOT_BE_SET_UP,
            "{}:Signature",
            "adapter '{}:Signature': build(self, model, make_optimizer=None, *, config) is called"
            " as build(self, model, make_optimizer, config): too many positional arguments\n",
        ),
        (
            CANNOT_BE_SET_UP,
            "{}:NoSelf",
            "zero_grad() is called as zero_grad(self, w): too many positional arguments\n",
        ),
        (
            CANNOT_BE_SET_UP,
            "{}:Short",
            "model_state(self, w, kind, *, cpu=False) is called as model_state(self, w, kind,"
            " cpu=..., rank0_only=...): got an unexpected keyword argument 'rank0_only'\n",
        ),
        (
            CANNOT_BE_SET_UP,
            "{}:Wraps",
            "backward(self, w) is called as backward(self, w, loss): too many positional",
        ),
        (
            CANNOT_BE_SET_UP,
            "{}:Property",
            "adapter '{}:Property': Property.no_sync(self, w) is a property, which is given self"
            " alone: make it a method, without @property\n",
        ),
        (
            CANNOT_BE_SET_UP,
            "{}:Cached",
            "Cached.zero_grad(self, w) is a property, which is given self alone: make it a method,"
            " without @cached_property\n",
        ),
        (CANNOT_BE_SET_UP, "{}:NotSelf", "NotSelf.weights() is a property, which is given self"),
        (CANNOT_BE_SET_UP, "{}:Scaler", "make_scaler(self, w) is called as make_scaler(self, w, d"),
        (CANNOT_BE_SET_UP, "{}:Claim", "for 'capabilites'; did you mean capabilities? ("),
        (CANNOT_BE_SET_UP, "{}:Helpers", "replicas must be an int of at least 1; got 'no slip"),
        (CANNOT_BE_SET_UP, "{}:Replicas", "replicas must be an int of at least 1; got '2'"),
        (
            "import conformance\nconformance.Conventions(buffers='rank1')",
            "{}:Mine",
            "importing {} raised UsageError: no choice 'rank1' of Conventions.buffers; did you"
            " mean rank0? known: local, rank0 (TMP/{}.py, line 2)",
        ),
        ("raise SystemExit(0)", "{}:Mine", "importing {} raised SystemExit: 0 (TMP/{}.py, line 1)"),
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
    assert message.replace("{}", own).replace("TMP", str(tmp_path)) in shown
    assert len(shown.splitlines()) == 1
    assert not (tmp_path / "result").exists()


RIGHT = """
import functools
from dataclasses import dataclass

from conformance import Adapter


class Base(Adapter):
    def build(self, model, make_optimizer, config):
        raise AssertionError


def grouped(verb):
    @functools.wraps(verb)
    def called(self, *given):
        return verb(self, None, *given)

    return called


class Injected(Base):
    @grouped
    def backward(self, group, w, loss):
        raise AssertionError


class Generator(Base):
    def weights(self, w):
        yield from w.module.parameters()


class OfTheEngine(Base):
    @property
    def zero_grad(self):
        return self.engine.zero_grad

    @functools.cached_property
    def backward(self, how="fast"):
        return self.engine.backward

    forward = property()


class Dispatched(Base):
    @functools.singledispatchmethod
    def evaluate(self, w, batch, loss_fn):
        raise AssertionError


class Unreadable(Base):
    step = staticmethod(min)
    def clip_grad_norm(self): ...
    clip_grad_norm.__signature__ = "of a generator of code"
    save = classmethod(print)
    forward = print
    load = functools.partialmethod(print, 1, 2)


class Plural(Base):
    def zero_grads(self, w):
        raise AssertionError


class NotPlural(Plural):
    zero_grads = None


class NoMethod(Base):
    zero_grads = print


class Raises:
    def __get__(self, held, owner):
        raise AttributeError


class Descriptor(Base):
    anything = Raises()
    zero_grad = Raises()


@dataclass
class Words(Base):
    replica: int = 1
    convention: str = "mine"
    variant: str = "small"
    buffer: object = print
    weight: object = Base
    local_tensor: object = None
    configured: bool = False
    evaluates: bool = False


class Methods(Base):
    def weight(self, w):
        raise AssertionError

    def evaluates(self):
        raise AssertionError

    def parameters_full(self):
        raise AssertionError


class NeverCalled(Base):
    def make_scaler(self, w):
        raise AssertionError
"""


@pytest.mark.parametrize("name", re.findall(r"class (\w+)\(", RIGHT))
def test_an_adapter_that_is_called_right_is_set_up(tmp_path: Path, monkeypatch, name: str) -> None:
    own = f"right_{zlib.crc32(str(tmp_path).encode())}"
    (tmp_path / f"{own}.py").write_text(RIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    if name != "Plural":
        make_adapter(f"{own}:{name}")
        return
    with pytest.raises(UsageError, match="did you mean zero_grad"):
        make_adapter(f"{own}:{name}")


@pytest.mark.parametrize(
    ("rate", "shown"), [(0.034, "0.034"), (0.96, "0.96"), (1.04, "1.0"), (123.44, "123.4")]
)
def test_examples_a_second_are_shown_without_an_exponent(rate: float, shown: str) -> None:
    assert _rate(rate) == shown


def test_a_misspelt_module_of_this_folder_is_told(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "my_adapter.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "run", "myadapter:Mine") == EXIT_USAGE
    assert capsys.readouterr().err.endswith("Python looks; did you mean my_adapter?\n")


def test_a_helper_may_be_called_from_anywhere_in_its_package(tmp_path: Path, monkeypatch) -> None:
    package = f"package_{zlib.crc32(str(tmp_path).encode())}"
    (tmp_path / package).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / package / "mine.py").write_text(
        "from conformance import Adapter\n"
        f"from {package} import engine\n"
        "class Mine(Adapter):\n"
        "    def build(self, model, make_optimizer, config): ...\n"
        "    def zero_grads(self, w): ...\n"
    )
    engine = tmp_path / package / "engine.py"
    engine.write_text("class Engine:\n    def drop(self, w):\n        self.adapter.zero_grads(w)\n")
    make_adapter(f"{package}.mine:Mine")
    engine.write_text("class Engine:\n    zero_grads = None\n    def zero_grads(self): ...\n")
    linecache.checkcache()
    with pytest.raises(UsageError, match="nothing asks for 'zero_grads'; did you mean zero_grad"):
        make_adapter(f"{package}.mine:Mine")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# caf\xc3\xa9\na@b: r\xe9sum\xe9", "mine', line 2: byte 0xe9 is not UTF-8 text"),
        (b"losses.value: no adapter", "mine', line 1: 'losses.value: no adapter' is not 'finding"),
        (None, "mine': Is a directory"),
    ],
)
def test_a_file_of_expectations_that_cannot_be_read_is_wrong_usage(
    tmp_path: Path, monkeypatch, capsys, content: bytes | None, message: str
) -> None:
    path = tmp_path / "mine"
    path.mkdir() if content is None else path.write_bytes(content)
    assert (
        command(monkeypatch, *RUN, "--expect", str(path), "--out", str(tmp_path / "o"))
        == EXIT_USAGE
    )
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", [".hidden", "notes.txt"])
def test_a_folder_that_holds_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError) as refused, _folder(tmp_path):
        pass
    assert str(refused.value) == (
        f"--out {str(tmp_path)!r}: holds what is not of a run, such as {name!r};"
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
    "what",
    ["checks", "profiles", "adapters", "models", "cases", "mutants", "capabilities", "letters"],
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


def test_a_check_is_listed_with_what_it_needs_all_of_and_one_of(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "list", "checks", "--json") == 0
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    needs = {id: (row["needs"], row["needs one of"]) for id, row in rows.items()}
    assert needs == {
        check.id: (", ".join(sorted(check.needs)), ", ".join(sorted(check.any_of)))
        for check in CHECKS.values()
    }
    assert needs["sharding.saved"] == ("", "shard.optimizer, shard.parameters")
    assert command(monkeypatch, "list", "checks") == 0
    shown = capsys.readouterr().out
    assert "\nsharding.saved\n    profile: checkpoint\n    needs one of: shard.optimizer," in shown


def test_every_letter_of_a_drawn_id_is_explained(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "list", "letters", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    letters = [f"act {act}" for act in ACTS]
    letters += [f"model {letter}" for letter in drawn.MODEL_LETTERS]
    letters += [f"layer {letter}" for letter in drawn.LAYER_LETTERS]
    letters += [f"unit {letter}" for letter in drawn.UNIT_LETTERS]
    assert [row["letter"] for row in rows] == letters
    assert len({row["meaning"] for row in rows} - {""}) == len(letters)
    dropped = next(row for row in rows if row["letter"] == "act n")
    assert dropped["needs"] == "gradients, no_sync, no_sync.dropped"


def test_without_a_command_the_help_is_shown_line_by_line(monkeypatch, capsys) -> None:
    assert command(monkeypatch) == EXIT_USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line.strip() for line in shown.err.splitlines()]
    assert lines[0].startswith("Usage: fsdp-conformance [OPTIONS] COMMAND")
    assert [line for line in lines if line.startswith("recheck  ")]


def test_the_version_is_the_one_that_a_log_names(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "--version") == 0
    known = versions()
    assert (known["torch"], known["python"]) == (torch.__version__, platform.python_version())
    assert capsys.readouterr().out == (
        f"fsdp-conformance {known['fsdp-conformance']}, torch {known['torch']},"
        f" python {known['python']}\n"
    )


def test_what_is_not_installed_has_no_version(monkeypatch) -> None:
    def missing(distribution: str) -> str:
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr("conformance.versions.version", missing)
    monkeypatch.setattr("conformance.versions.find_spec", lambda name: None)
    assert versions()["torch"] == versions()["fsdp-conformance"] == "not installed"


def test_the_help_has_the_short_name_that_hands_know(monkeypatch, capsys) -> None:
    for arguments in (["--help"], ["-h"], ["fuzz", "-h"]):
        assert command(monkeypatch, *arguments) == 0
        assert "-h, --help" in capsys.readouterr().out


def test_the_help_of_run_names_every_profile_and_what_depth_is_taken(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "run", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Profile of checks ({', '.join(PROFILES)})" in shown
    assert "how far options are crossed; without it wide for the first variant" in shown


@pytest.mark.parametrize(
    ("name", "why"), [("file/x", "Not a directory"), ("x" * 300, "File name too long")]
)
def test_a_folder_that_cannot_be_made_is_said_to_be(
    tmp_path: Path, monkeypatch, capsys, name: str, why: str
) -> None:
    (tmp_path / "file").write_text("")
    assert command(monkeypatch, *RUN, "--out", str(tmp_path / name)) == EXIT_USAGE
    assert f"{name}': cannot make the folder: {why}" in capsys.readouterr().err


def test_a_fault_of_ours_has_a_status_of_its_own(monkeypatch, capsys) -> None:
    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("conformance.cli.listing.listing", broken)
    assert command(monkeypatch, "list", "checks") == EXIT_INTERNAL
    assert "internal fault" in capsys.readouterr().err


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


def test_more_ranks_than_memory_holds_are_refused_before_one_is_started(
    monkeypatch, capsys
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: 1600)
    monkeypatch.setattr("conformance.cli.running.judge_all", lambda *_: None)
    assert device_for("cpu", 100) == "cpu"
    assert command(monkeypatch, *RUN, "--device", "cpu", "--world", "101") == EXIT_USAGE
    shown = capsys.readouterr()
    told = "--world 101: a rank takes at least 16 MiB, of which this machine has 1600"
    assert shown.err == f"fsdp-conformance: {told}: no more than 100 ranks\n"
    assert shown.out == ""


SHARED = "ranks share 2 cores: cases take longer, and --timeout may have to be longer too"


@pytest.mark.parametrize(
    ("count", "asked", "world", "told"),
    [
        (0, "auto", 2, []),
        (0, "cpu", 3, [f"3 {SHARED}"]),
        (0, "auto", 99, [f"99 {SHARED}"]),
        (1, "auto", 2, ["the ranks run on cpu: 2 ranks, and 1 of xpu here"]),
        (4, "auto", 5, ["the ranks run on cpu: 5 ranks, and 4 of xpu here", f"5 {SHARED}"]),
        (4, "cpu", 2, []),
        (4, "auto", 4, []),
        (4, "xpu", 4, []),
    ],
)
def test_a_user_is_told_when_ranks_have_to_share(
    monkeypatch, count: int, asked: str, world: int, told: list[str]
) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: ("xpu", count) if count else ("cpu", 0))
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert notes(asked, world) == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (RUN, True),
        ([*RUN, "--quiet"], False),
        (["selftest"], True),
        (["fuzz", "torch.fully_shard"], True),
        (["fuzz", "torch.fully_shard", "--quiet"], False),
    ],
    ids=["run", "run --quiet", "selftest", "fuzz", "fuzz --quiet"],
)
def test_notes_stand_beside_the_results(
    monkeypatch,
    capsys,
    arguments: list[str],
    told: bool,  # noqa: FBT001
) -> None:
    def works(*_: object, **__: object) -> int:
        logging.getLogger("conformance.ranks.leases").warning("waiting")
        return EXIT_UNDECIDED

    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr("conformance.cli.running.judge_all", works)
    monkeypatch.setattr("conformance.cli.selftesting.diagonal", works)
    monkeypatch.setattr("conformance.cli.fuzzing.Hunt.follow", works)
    # nothing is judged, which proves nothing
    assert command(monkeypatch, *arguments, "--device", "cpu", "--world", "5") == EXIT_UNDECIDED
    shown = capsys.readouterr()
    note = "fsdp-conformance: note:"
    assert shown.err == (f"{note} 5 {SHARED}\n{note} waiting\n" if told else "")
    assert "note" not in shown.out


@pytest.mark.parametrize(
    ("device", "world", "jobs"), [("cpu", 2, 4), ("cpu", 8, 1), ("xpu", 2, 2), ("xpu", 4, 1)]
)
def test_jobs_share_cores_or_accelerators(monkeypatch, device: str, world: int, jobs: int) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: ("xpu", 4))
    monkeypatch.setattr(machine, "cores", lambda: 6)
    assert default_jobs(world, device) == jobs

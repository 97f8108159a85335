"""The options of the commands: what they are called, and what is refused while the line is read.

A value that can be judged without torch is judged here, so that a slip is told at once. Variants
and what else a case consists of are known to adapters and to the plan of a run, and the commands'
own work looks at them. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from conformance.adapters import place_of
from conformance.case import Case
from conformance.errors import UsageError, unknown
from conformance.expectations import read_expectations
from conformance.globs import matches
from conformance.machine import check_world
from conformance.names import (
    BASELINES,
    PROFILES,
    check_ids,
    depth_named,
    model_names,
    mutant_names,
)
from conformance.releases import profile_named
from conformance.report.lines import LOG_NAME, LogError, header_of
from conformance.verdicts import parse_finding_id

HISTORIES = "histories"
"""Beside the log in the folder of a run."""


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """A callback of the parser: `check` may refuse what was given, each of several values."""

    def callback(value: Any) -> Any:
        given = value if isinstance(value, (list, tuple)) else [value]
        for one in given:
            if one is not None:
                check(one)
        return value

    return callback


def _read(option: typer.CallbackParam, text: str, kind: Callable[[str], Any], called: str) -> Any:
    """The number that stands in `text`, which the parser is told to leave alone."""
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{option.opts[0]} {text!r}: expected {called}") from None


def at_least(least: int) -> Callable[[typer.CallbackParam, Any], Any]:
    """A callback of the parser: whole numbers from `least` on, or none."""

    def callback(option: typer.CallbackParam, text: str | None) -> int | None:
        if text is None:
            return None
        number: int = _read(option, text, int, "a whole number")
        if number < least:
            raise UsageError(f"{option.opts[0]} {number}: at least {least}")
        return number

    return callback


def path(
    check: Callable[[Path], object],
) -> Callable[[typer.CallbackParam, str | None], Path | None]:
    """A callback of the parser: the path that `check` does not refuse, or none.

    The parser takes an empty name, such as of a variable that is not set, for this folder.
    """

    def callback(option: typer.CallbackParam, text: str | None) -> Path | None:
        if text is None:
            return None
        if not text:
            raise UsageError(f"{option.opts[0]} '': expected a name")
        named = Path(text)
        check(named)
        return named

    return callback


def _world(option: typer.CallbackParam, text: str) -> int:
    world: int = _read(option, text, int, "a number of ranks, such as 2")
    check_world(world)
    return world


def _time(option: typer.CallbackParam, text: str) -> float:
    seconds: float = _read(option, text, float, "a number of seconds")
    if not seconds > 0:  # also if it is no number
        raise UsageError(f"{option.opts[0]} {seconds:g}: more than 0 seconds")
    return seconds


def worlds_of(text: str) -> list[int]:
    """The numbers of ranks in a list such as ``1,2,4``, the smallest first.

    Raises:
        UsageError: it is no such list, or so many ranks do not fit.
    """
    try:
        worlds = sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise UsageError(
            f"--world {text!r}: expected numbers of ranks with commas between, such as 1,2,4"
        ) from None
    for world in worlds:
        check_world(world)
    return worlds


def is_baseline(name: str) -> None:
    """Refuse a baseline that there is not.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in BASELINES:
        raise unknown("baseline", name, BASELINES)


def matching(kind: str, known: Callable[[], Collection[str]]) -> Callable[[str], None]:
    """A check of a pattern: refuses what matches none of the names of a kind.

    Where they cannot be read, as of modules without a source, the command's own work judges it.
    """

    def check(pattern: str) -> None:
        if known() and not any(matches(name, pattern) for name in known()):
            raise unknown(kind, pattern, known(), listed=f"{kind}s", patterns=True)

    return check


def _is_mutant(name: str) -> None:
    if mutant_names() and name not in mutant_names():
        raise unknown("mutant", name, mutant_names(), listed="mutants")


def _of_a_model(case: str) -> None:
    """Refuse a pattern of cases that begins with the name of a model that there is not."""
    model, slash, _ = case.partition("/")
    known = model_names()
    if known and slash and not {"*", "?"} & set(model) and model not in known:
        raise unknown("model", model, known, where=f"of --case {case!r}", listed="models")


def _is_finding(id: str) -> None:
    try:
        _, adapter, _, case, _ = parse_finding_id(id)
        Case.parse(case)
    except ValueError as error:
        raise UsageError(str(error)) from error
    place_of(adapter)


def is_new(out: Path) -> None:
    """Refuse a folder in which a run would lie among other things.

    Raises:
        UsageError: it holds anything, is no folder, or cannot be looked at.
    """
    given = f"--out {str(out)!r}"
    try:
        if out.exists() and not out.is_dir():
            raise UsageError(f"{given}: not a folder")
        there = sorted(path.name for path in out.iterdir()) if out.exists() else []
    except OSError as error:
        raise UsageError(f"{given}: cannot make the folder: {error.strerror}") from error
    if {LOG_NAME, HISTORIES} & set(there):
        raise UsageError(f"{given}: holds a run already; name a new folder")
    if there:
        raise UsageError(
            f"{given}: holds what is not of a run, such as {there[0]!r};"
            " name a new or an empty folder"
        )


def _is_page(page: Path) -> None:
    given = f"--page {str(page)!r}"
    if page.is_dir():
        raise UsageError(f"{given}: is a folder; name a file")
    if not page.parent.is_dir():
        raise UsageError(f"{given}: there is no folder {str(page.parent)!r}")


def _holds_run(directory: Path) -> None:
    try:
        header_of(directory / LOG_NAME)
    except LogError as error:
        raise UsageError(f"recheck: {error}") from error


Adapters = Annotated[
    list[str],
    typer.Argument(
        metavar="ADAPTER",
        help="Names of adapters, as list adapters shows them, or package.module:Class.",
        callback=checked(place_of),
    ),
]
FindingId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="Id of a finding, as every output shows it.",
        callback=checked(_is_finding),
    ),
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="Folder of a run made with --out.",
        parser=str,
        callback=path(_holds_run),
    ),
]
World = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Number of ranks, all on this machine.",
        parser=str,
        callback=_world,
    ),
]
Worlds = Annotated[
    str,
    typer.Option(
        "--world",
        metavar="N,N",
        help="Numbers of ranks to draw from, on this machine.",
        callback=checked(worlds_of),
    ),
]
Device = Annotated[
    str, typer.Option(metavar="TYPE", help="auto, cpu, or the type of the accelerator.")
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="PATTERN", help="Pattern of variants; repeatable; all without it."
    ),
]
Profiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help=f"Profile of checks ({', '.join(PROFILES)}), or core@1.0 as released; repeatable; all"
        " without it.",
        callback=checked(profile_named),
    ),
]
Checks = Annotated[
    list[str] | None,
    typer.Option(
        "--check",
        metavar="PATTERN",
        help="Pattern of checks, such as 'clip.*'; repeatable.",
        callback=checked(matching("check", check_ids)),
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="PATTERN",
        help="Pattern of models; repeatable.",
        callback=checked(matching("model", model_names)),
    ),
]
Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        metavar="PATTERN",
        help="Pattern of cases, such as '*/train/*'; repeatable.",
        callback=checked(_of_a_model),
    ),
]
Depth = Annotated[
    str | None,
    typer.Option(
        metavar="DEPTH",
        help="narrow, wide or full: how far options are crossed; without it wide for the first"
        " variant and for those named by --variant, narrow for the others.",
        callback=checked(depth_named),
    ),
]
Baseline = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What is taken for right: oracle, or ddp, which is DDP on the same ranks.",
        callback=checked(is_baseline),
    ),
]
Expect = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of known deviations: lines of 'finding pattern: reason'.",
        parser=str,
        callback=path(read_expectations),
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="New folder for the log and the histories.",
        parser=str,
        callback=path(is_new),
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Cases at once; by default what cores or accelerators allow.",
        parser=str,
        callback=at_least(1),
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Seconds that the ranks have for one case, after which it is HANG; the start of the"
        " first ranks does not count, and the oracle's run has as long again.",
        parser=str,
        callback=_time,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", help="Seed of every random number.", parser=str, callback=at_least(0)
    ),
]
Examples = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="How many to try, shrinking not counted.",
        parser=str,
        callback=at_least(1),
    ),
]
Mutant = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A defect to plant first.", callback=checked(_is_mutant)),
]
Mutants = Annotated[
    list[str] | None,
    typer.Option(
        "--mutant",
        metavar="PATTERN",
        help="Pattern of mutants; repeatable; all without it.",
        callback=checked(matching("mutant", mutant_names)),
    ),
]
Page = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File for the whole matrix: what every check said of every mutant.",
        parser=str,
        callback=path(_is_page),
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", help="Nothing but the report: no progress, no notes, no line per case."
    ),
]
List = Annotated[
    str,
    typer.Argument(
        metavar="WHAT",
        help="checks, profiles, adapters, models, scenarios, cases, mutants, capabilities, or"
        " letters: those in the ids of fuzz.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]

"""The commands and their options; each one's work is imported when it is called.

Wrong usage is one line and status 64, whether the option parser or the suite finds it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from conformance.errors import UsageError, unknown
from conformance.preload import forkserver_starting
from conformance.verdicts import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE

PROGRAM = "fsdp-conformance"

# the base of the parser's errors, by a public name: typer may bring a parser of its own
WRONG_USAGE: Any = typer.BadParameter.__base__

SHOWN = ("fsdp-conformance", "torch", "python")

WITH_RANKS = frozenset({"run", "repro", "selftest", "fuzz"})
"""Commands whose ranks are begun to be started before their own work is imported."""

PROFILE_NAMES = (
    "core",
    "sharding",
    "checkpoint",
    "precision",
    "memory",
    "communication",
    "robustness",
)
"""Those of `conformance.checks`, which would take seconds to import for a help text."""

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
    help="Run a sharded training wrapper beside an unsharded oracle, and judge it.",
)


def _version(asked: bool) -> None:  # noqa: FBT001 - a flag's value
    if asked:
        from conformance.header import versions

        typer.echo(", ".join(f"{name} {own}" for name, own in versions().items() if name in SHOWN))
        raise typer.Exit


World = Annotated[int, typer.Option(metavar="N", help="Number of ranks, all on this machine.")]
Worlds = Annotated[
    str,
    typer.Option("--world", metavar="N,N", help="Numbers of ranks to draw from, on this machine."),
]
Device = Annotated[
    str, typer.Option(metavar="TYPE", help="auto, cpu, or the type of the accelerator.")
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Seconds that the ranks have for one case, after which it is HANG. The start of the"
        " first ranks and the oracle's run, which has as long, come before.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of every random number.")]
Baseline = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="What says what is right: oracle, or ddp, DDP on the same ranks."
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(metavar="N", help="Cases at once; by default what cores or accelerators allow."),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", help="Nothing but the report: no progress, no notes, no line per case."
    ),
]


@app.callback()
def _before_any_command(
    version: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show it and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(  # noqa: PLR0913 - one parameter an option
    adapter: Annotated[
        list[str],
        typer.Argument(metavar="ADAPTER", help="Names of adapters, or package.module:Class."),
    ],
    world: World = 2,
    device: Device = "auto",
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of variants; repeatable; all without it."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Profile of checks ({', '.join(PROFILE_NAMES)}), or core@1.0 as released;"
            " repeatable; all without it.",
        ),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of checks, such as 'clip.*'; repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Pattern of models; repeatable.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of cases, such as '*/train/*'; repeatable."),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            metavar="DEPTH",
            help="narrow, wide or full: how far options are crossed; without it wide for the first"
            " variant and for those named by --variant, narrow for the others.",
        ),
    ] = None,
    baseline: Baseline = "oracle",
    expect: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of known deviations: lines of 'finding pattern: reason'."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for the log and the histories.")
    ] = None,
    jobs: Jobs = None,
    timeout: Timeout = 60.0,
    seed: Seed = 0,
    quiet: Quiet = False,  # noqa: FBT002 - a flag
) -> None:
    """Judge adapters: every variant, every check, every model."""
    from conformance.cli.running import RunOptions, run_command
    from conformance.plan import depth_named
    from conformance.work import Selection

    selection = Selection(
        adapters=tuple(adapter),
        variants=tuple(variant or ()),
        profiles=tuple(profile or ()),
        checks=tuple(check or ()),
        models=tuple(model or ()),
        cases=tuple(case or ()),
        depth=None if depth is None else depth_named(depth),
    )
    options = RunOptions(
        world=world,
        device=device,
        baseline=baseline,
        expect=expect,
        out=out,
        jobs=jobs,
        timeout=timeout,
        seed=seed,
        quiet=quiet,
    )
    raise typer.Exit(run_command(selection, options, sys.argv[1:]))


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="checks, profiles, adapters, models, scenarios, cases, mutants, capabilities, or"
            " letters: those in the ids of fuzz.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,  # noqa: FBT002
) -> None:
    """Show what there is."""
    from conformance.cli.listing import listing

    typer.echo(listing(what, as_json=as_json))


@app.command()
def repro(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of a finding, as every output shows it.")
    ],
    world: World = 2,
    device: Device = "auto",
    baseline: Baseline = "oracle",
    mutant: Annotated[
        str | None, typer.Option(metavar="NAME", help="A defect to plant first.")
    ] = None,
    timeout: Timeout = 60.0,
) -> None:
    """Repeat one finding."""
    from conformance.cli.repeating import repro_command

    status = repro_command(
        id, world=world, device=device, baseline=baseline, mutant=mutant, timeout=timeout
    )
    raise typer.Exit(status)


@app.command()
def recheck(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run made with --out.")
    ],
) -> None:
    """Judge a stored run again, without ranks."""
    from conformance.cli.repeating import recheck_command

    raise typer.Exit(recheck_command(directory))


@app.command()
def selftest(
    world: World = 2,
    device: Device = "auto",
    mutant: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of mutants; repeatable; all without it."),
    ] = None,
    jobs: Jobs = None,
    timeout: Timeout = 60.0,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for the whole matrix: what every check said of every mutant."
        ),
    ] = None,
) -> None:
    """Plant every defect, and see that its check reports it first, with its cause."""
    from conformance.cli.selftesting import selftest_command

    raise typer.Exit(
        selftest_command(
            mutant or (), world=world, device=device, jobs=jobs, timeout=timeout, page=page
        )
    )


@app.command()
def fuzz(  # noqa: PLR0913 - one parameter an option
    adapters: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER",
            help="Names of adapters, or package.module:Class; variants of all are drawn.",
        ),
    ],
    examples: Annotated[
        int, typer.Option(metavar="N", help="How many to try, shrinking not counted.")
    ] = 100,
    world: Worlds = "1,2,4",
    device: Device = "auto",
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of variants; repeatable; all without it."),
    ] = None,
    mutant: Annotated[
        str | None, typer.Option(metavar="NAME", help="A defect to plant first.")
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of known deviations: lines of 'finding pattern: reason'."
        ),
    ] = None,
    timeout: Timeout = 60.0,
    seed: Seed = 0,
) -> None:
    """Draw models, programs, variants and worlds, and shrink what goes wrong.

    The letters of what is drawn: fsdp-conformance list letters.
    """
    from conformance.cli.fuzzing import FuzzOptions, fuzz_command

    options = FuzzOptions(
        variants=tuple(variant or ()),
        examples=examples,
        worlds=world,
        device=device,
        mutant=mutant,
        expect=expect,
        timeout=timeout,
        seed=seed,
    )
    raise typer.Exit(fuzz_command(adapters, options))


def main() -> None:
    """Entry point of the command; never returns."""
    # as `python -m` does: adapters of the working directory can be named
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        _known_command(sys.argv[1:])
        _alone(sys.argv[1:])
        with forkserver_starting() if _starts_ranks(sys.argv[1:]) else nullcontext():
            returned = app(prog_name=PROGRAM, standalone_mode=False)
        status = returned if isinstance(returned, int) else 0
        if status == EXIT_INTERRUPTED:  # the parser may turn an interrupt into a status
            raise KeyboardInterrupt
    except UsageError as error:
        status = _complain(str(error), EXIT_USAGE)
    except WRONG_USAGE as error:
        if sys.argv[1:]:
            status = _complain(error.format_message(), EXIT_USAGE)
        else:  # the parser's message is then the help
            sys.stderr.write(f"{error.format_message()}\n")
            status = EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        status = _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_INTERNAL
    except Exception:
        traceback.print_exc()
        status = _complain("internal fault; please report the lines above", EXIT_INTERNAL)
    sys.exit(status)


def _known_command(arguments: Sequence[str]) -> None:
    """Name the near match of a misspelt command, which the parser does not."""
    names = [
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    ]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        raise unknown("command", arguments[0], names)


def _starts_ranks(arguments: Sequence[str]) -> bool:
    """Whether these arguments, if they are right, come to a run on ranks."""
    return bool(arguments) and arguments[0] in WITH_RANKS and "--help" not in arguments


def _alone(arguments: Sequence[str]) -> None:
    """Refuse to be one of several: each would start all ranks, and judge beside the others."""
    launched = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if launched != "1" and _starts_ranks(arguments):
        raise UsageError(
            f"torchrun has started {launched} of this command, which starts its ranks itself:"
            f" start it once, without torchrun, and with --world {launched}"
        )


def _complain(sentence: str, status: int) -> int:
    line = " ".join(sentence.split())
    sys.stderr.write(f"{PROGRAM}: {line}\n")
    return status

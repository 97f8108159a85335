"""The commands; each one's work is imported when it is called.

Wrong usage is one line and status 64, whether the option parser or the suite finds it.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from conformance.cli import options as o
from conformance.cli.interrupt import leaving_on_signals
from conformance.errors import UsageError, unknown
from conformance.verdicts import EXIT_INTERNAL, EXIT_USAGE

PROGRAM = "fsdp-conformance"

# the base of the parser's errors, by a public name: typer may bring a parser of its own
WRONG_USAGE: Any = typer.BadParameter.__base__

SHOWN = ("fsdp-conformance", "torch", "python")


class Commands(TyperGroup):
    """The commands by name."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; the parser itself names no near match of a misspelt one."""
        if cmd_name not in self.commands:
            raise unknown("command", cmd_name, self.commands)
        return super().get_command(ctx, cmd_name)


class WithRanks(TyperCommand):
    """A command whose ranks are begun to be started before its own work is imported."""

    def invoke(self, ctx: Any) -> Any:
        """Do the work of a line in which nothing was wrong."""
        from conformance.preload import forkserver_starting

        _alone()
        with forkserver_starting():
            from conformance.cli.show import noting  # while ranks are on their way

            with noting(quiet=ctx.params.get("quiet", False)):
                return super().invoke(ctx)


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    help="Run a sharded training wrapper beside an unsharded oracle, and judge it.",
)


def _version(asked: bool) -> None:  # noqa: FBT001 - a flag's value
    if asked:
        from conformance.versions import versions

        typer.echo(", ".join(f"{name} {own}" for name, own in versions().items() if name in SHOWN))
        raise typer.Exit


@app.callback()
def _before_any_command(
    version: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show it and exit.")
    ] = False,
) -> None:
    pass


@app.command(cls=WithRanks)
def run(  # noqa: PLR0913 - one parameter an option
    adapter: o.Adapters,
    world: o.World = 2,
    device: o.Device = "auto",
    variant: o.Variants = None,
    profile: o.Profiles = None,
    check: o.Checks = None,
    model: o.Models = None,
    case: o.Cases = None,
    depth: o.Depth = None,
    baseline: o.Baseline = "oracle",
    expect: o.Expect = None,
    out: o.Out = None,
    jobs: o.Jobs = None,
    timeout: o.Timeout = 60.0,
    seed: o.Seed = 0,
    quiet: o.Quiet = False,  # noqa: FBT002 - a flag
) -> None:
    """Judge adapters: every variant, every check, every model."""
    from conformance.cli.running import RunOptions, run_command
    from conformance.names import depth_named
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
def list_(what: o.List, as_json: o.AsJson = False) -> None:  # noqa: FBT002 - a flag
    """Show checks, adapters, models, cases and what else can be named."""
    from conformance.cli.listing import listing

    typer.echo(listing(what, as_json=as_json))


@app.command(cls=WithRanks)
def repro(
    id: o.FindingId,
    world: o.World = 2,
    device: o.Device = "auto",
    baseline: o.Baseline = "oracle",
    mutant: o.Mutant = None,
    timeout: o.Timeout = 60.0,
) -> None:
    """Repeat one finding."""
    from conformance.cli.repeating import repro_command

    status = repro_command(
        id, world=world, device=device, baseline=baseline, mutant=mutant, timeout=timeout
    )
    raise typer.Exit(status)


@app.command()
def recheck(directory: o.Run) -> None:
    """Judge a stored run again, without ranks."""
    from conformance.cli.repeating import recheck_command

    raise typer.Exit(recheck_command(directory))


@app.command(cls=WithRanks)
def selftest(
    world: o.World = 2,
    device: o.Device = "auto",
    mutant: o.Mutants = None,
    jobs: o.Jobs = None,
    timeout: o.Timeout = 60.0,
    page: o.Page = None,
) -> None:
    """Plant every defect, and see that its check reports it first, with its cause."""
    from conformance.cli.selftesting import selftest_command

    raise typer.Exit(
        selftest_command(
            mutant or (), world=world, device=device, jobs=jobs, timeout=timeout, page=page
        )
    )


@app.command(cls=WithRanks)
def fuzz(  # noqa: PLR0913 - one parameter an option
    adapters: o.Adapters,
    examples: o.Examples = 100,
    world: o.Worlds = "1,2,4",
    device: o.Device = "auto",
    variant: o.Variants = None,
    mutant: o.Mutant = None,
    expect: o.Expect = None,
    timeout: o.Timeout = 60.0,
    seed: o.Seed = 0,
    quiet: o.Quiet = False,  # noqa: FBT002 - a flag
) -> None:
    """Draw models, programs, variants and worlds, and shrink what goes wrong.

    Variants of all adapters are drawn. The letters of what is drawn: fsdp-conformance list letters.
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
        quiet=quiet,
    )
    raise typer.Exit(fuzz_command(adapters, options))


def main() -> None:
    """Entry point of the command; never returns."""
    # as `python -m` does: adapters of the working directory can be named
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    # the interpreter would look for garbage among all that torch has made, several times: a second
    atexit.register(gc.freeze)
    with leaving_on_signals():
        sys.exit(_status())


def _status() -> int:
    """The exit status of the command that stands in `sys.argv`, once it is done."""
    try:
        returned = app(prog_name=PROGRAM, standalone_mode=False)
        return returned if isinstance(returned, int) else 0
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except WRONG_USAGE as error:
        if sys.argv[1:]:
            asked = f"; see {error.ctx.command_path} --help" if error.ctx else ""
            return _complain(f"{error.format_message().removesuffix('.')}{asked}", EXIT_USAGE)
        sys.stderr.write(f"{error.format_message()}\n")  # the parser's message is then the help
        return EXIT_USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERNAL
    except Exception:
        traceback.print_exc()
        return _complain("internal fault; please report the lines above", EXIT_INTERNAL)


def _alone() -> None:
    """Refuse to be one of several: each would start all ranks, and judge beside the others."""
    launched = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if launched != "1":
        raise UsageError(
            f"torchrun has started {launched} of this command, which starts its ranks itself:"
            f" start it once, without torchrun, and with --world {launched}"
        )


def _complain(sentence: str, status: int) -> int:
    line = " ".join(sentence.split())
    sys.stderr.write(f"{PROGRAM}: {line}\n")
    return status

"""What runs inside ranks: one scenario with a wrapper, or the oracle's runs of it.

Called by name through `conformance.ranks`; arguments and results are plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from conformance import models
from conformance.adapter import REFUSALS, Adapter, Conventions
from conformance.adapters import make_adapter
from conformance.case import Case
from conformance.history import HistoryWriter
from conformance.mutants import mutant_named
from conformance.oracle import VirtualRanks, rank_seed
from conformance.oracle_precision import Precision
from conformance.oracle_run import OracleRun, Part
from conformance.per_rank import PerRank
from conformance.ranks import Job, RankContext, SkipRank
from conformance.ranks.job import load_function
from conformance.scenarios import SCENARIOS, Run, Scenario
from conformance.scenarios.carriers import Held, InFile
from conformance.scenarios.run import Carrier, Writer

STEPS_OF_A_SEED = 1000
"""More than any scenario asks for."""
DRAWN_KEPT = 256
"""Batches that the oracle keeps: those of one model, of a few kilobytes each."""
RUNS_KEPT = 4
"""Runs of the oracle of which it keeps what other cases share, a megabyte each. The cases of one
model come one after the other, and a rank runs one or two flavours of each."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """How one of the oracle's runs differs from the reference, which is in the model's dtype."""

    dtype: torch.dtype | None = None
    reverse: bool = False
    nudge: bool = False
    suspects: bool = False


ORACLE_RUNS: Mapping[str, Flavour] = {
    "reference": Flavour(suspects=True),
    "double": Flavour(dtype=torch.float64),
    "single": Flavour(dtype=torch.float32),
    "reversed": Flavour(reverse=True),
    "nudged": Flavour(nudge=True),
}


def oracle_runs(
    conventions: Conventions, world: int, *, dtype: torch.dtype = torch.float32
) -> Mapping[str, Flavour]:
    """The runs of the oracle for an adapter with these conventions, in jobs of at most `world`.

    The sum of two is the same in either order: up to two ranks, the reversed run would be the
    reference once more, bit for bit. What a model of `dtype` float64 rounds is seen in float32,
    where it is larger; what a wrapper rounds that computes in a low dtype has a run of its own.
    """
    needed = {
        "reference": True,
        "double": dtype != torch.float64,
        "single": dtype == torch.float64,
        "reversed": world > 2,
        "nudged": Precision.of(conventions).lowers,
    }
    return {name: run for name, run in ORACLE_RUNS.items() if needed[name]}


def baseline_runs(*, dtype: torch.dtype = torch.float32) -> Mapping[str, Flavour]:
    """The runs of the baseline wrapper, in any world."""
    return oracle_runs(Conventions(), 3, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class CaseRequest:
    """One case to run with a wrapper.

    Attributes:
        adapter: name of the adapter.
        variant: its variant.
        case: the case's string.
        seed: of the ranks' random numbers.
        directory: where the history goes, and what the second job loads.
        second: whether this is the second job of the case.
        probe: capabilities to use although they are not claimed.
        mutant: a defect to plant.
        source: file of the adapter's module, which may not be importable by its name.
    """

    adapter: str
    variant: str
    case: str
    seed: int
    directory: str
    second: bool = False
    probe: tuple[str, ...] = ()
    mutant: str | None = None
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class OracleRequest:
    """One case to run unsharded.

    Attributes:
        world: virtual ranks.
        conventions: of the adapter that is compared.
        capabilities: those that change what the scenario does.
        case: the case's string.
        seed: of the ranks' random numbers.
        directory: where the histories of its runs go.
        second_world: virtual ranks of the case's second job; ``None`` if it has one job only.
        second: whether this is the second job; the oracle runs both in one.
    """

    world: int
    conventions: Conventions
    capabilities: tuple[str, ...]
    case: str
    seed: int
    directory: str
    second_world: int | None = None
    second: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of the job that is meant."""
        return self.second_world if self.second and self.second_world else self.world

    def jobs(self) -> tuple[OracleRequest, ...]:
        """The requests of the case's jobs."""
        second = () if self.second_world is None else (replace(self, second=True),)
        return (replace(self, second=False), *second)


def of_job(directory: Path, *, second: bool) -> Path:
    """Where the history of the first or the second job of a case lies in the case's folder."""
    return directory / "second" if second else directory


def run_case(context: RankContext, *, request: CaseRequest) -> None:
    """Run one case with one adapter on this rank and write its history.

    Collective: whatever the scenario issues, on the default group.

    Raises:
        SkipRank: the adapter refused to build; ranks that all do so are as good as before.
    """
    case = Case.parse(request.case)
    model = models.case(case.model)
    directory, scenario = Path(request.directory), SCENARIOS[case.scenario]
    header = {
        "case": request.case,
        "adapter": request.adapter,
        "variant": request.variant,
        "world": context.world_size,
    }
    writer = HistoryWriter(of_job(directory, second=request.second), context.rank, header)
    torch.manual_seed(rank_seed(request.seed, context.rank))
    with ExitStack() as stack:
        stack.callback(writer.close)
        if request.source is not None:
            module, _, name = request.adapter.partition(":")
            load_function(Job(file=request.source, module=module, qualname=name))
        driver, options = make_adapter(request.adapter, request.variant)
        if request.mutant is not None:
            driver = stack.enter_context(mutant_named(request.mutant).planted(driver))
        driver.capabilities |= set(request.probe)
        run = Run(
            adapter=driver,
            case=case,
            model=model,
            writer=writer,
            batch=lambda step, micro: models.move(
                model.batch(context.rank, drawn_step(request.seed, step), micro), context.device
            ),
            device=context.device,
            world=context.world_size,
            options=options,
            scratch=directory,
            carrier=InFile(path=directory / "states.pt", rank=context.rank),
            recorder=context.recorder,
        )
        stack.callback(lambda: writer.collectives(context.recorder.records))
        try:
            program_of(scenario, second=request.second)(run)
        except Exception as error:
            if writer.phase or type(error).__name__ not in REFUSALS:
                raise
            raise SkipRank(str(error)) from error


def program_of(scenario: Scenario, *, second: bool) -> Callable[[Run], None]:
    """What the first or the second job of a scenario runs."""
    if not second:
        return scenario.program
    assert scenario.second is not None, f"{scenario.name} has no second job"
    return scenario.second


def run_oracle(context: RankContext, *, request: OracleRequest) -> None:
    """Run one case unsharded: each of the runs that `oracle_runs` says.

    The runs are dealt to the ranks, which know nothing of each other: no collective. Of a case with
    two jobs, each run is both.
    """
    model = models.case(Case.parse(request.case).model)
    world = max(request.world, request.second_world or 0)
    runs = oracle_runs(request.conventions, world, dtype=model.dtype)
    mine = list(runs.items())[context.rank :: context.world_size]
    with context.recorder.off():
        for name, flavour in mine:
            _run_virtual(context, request, name, flavour)


def _run_virtual(context: RankContext, request: OracleRequest, name: str, flavour: Flavour) -> None:
    """One of the runs of the oracle, with both jobs of a case that has two."""
    kept: dict[Path, tuple[Any, Any]] = {}
    states = None
    for job in request.jobs():
        adapter = VirtualRanks(
            job.ranks,
            request.conventions,
            frozenset(request.capabilities),
            seed=request.seed,
            reverse=flavour.reverse,
            nudge=flavour.nudge,
            saved=kept,
        )
        carrier = Held(world=job.ranks, states=states)
        directory = of_job(Path(request.directory) / name, second=job.second)
        with VirtualWriter(directory, job.ranks) as writer:
            batch = virtual_batches(job, context.device, flavour.dtype)
            # what is nudged depends on all that was before
            parts = None if flavour.nudge else _parts_of(job, name, context.device)
            run_truth(job, name, context.device, adapter, writer, batch, carrier, parts)
        states = carrier.states


def _parts_of(job: OracleRequest, name: str, device: torch.device) -> MutableMapping[str, Part]:
    """What cases share with the one of `job` in the flavour `name`, as far as it was run here."""
    case = Case.parse(job.case)
    training = (case.model, case.optimizer, case.accumulation, job.seed, job.ranks)
    return _parts_of_run(name, device, job.conventions, job.capabilities, *training)


@lru_cache(maxsize=RUNS_KEPT)
def _parts_of_run(*key: object) -> MutableMapping[str, Part]:
    """Those of all runs that agree in `key`: whatever makes a difference to what is computed."""
    return {}


def run_baseline(context: RankContext, *, request: OracleRequest) -> None:
    """Run one job of a case three times with the baseline wrapper, on all ranks of the run.

    *Collective* over the default group. In the run with the other order of additions, the last
    process plays rank 0.
    """
    from conformance.baseline import Baseline

    model = models.case(Case.parse(request.case).model)
    for name, flavour in baseline_runs(dtype=model.dtype).items():
        folder = Path(request.directory) / name
        adapter = Baseline(
            request.ranks,
            request.conventions,
            frozenset(request.capabilities),
            reverse=flavour.reverse,
        )
        torch.manual_seed(rank_seed(request.seed, adapter.rank))
        directory = of_job(folder, second=request.second)
        with HistoryWriter(directory, adapter.rank, {"world": request.ranks}) as writer:
            batch = own_batches(request, adapter.rank, context.device, flavour.dtype)
            carrier = InFile(path=folder / "states.pt", rank=adapter.rank)
            run_truth(request, name, context.device, adapter, writer, batch, carrier)


def run_truth(  # noqa: PLR0913 - what a run is made of
    request: OracleRequest,
    name: str,
    device: torch.device,
    adapter: Adapter,
    writer: Writer,
    batch: Callable[[int, int], Any],
    carrier: Carrier,
    parts: MutableMapping[str, Part] | None = None,
) -> None:
    """Run one job of the case once as the flavour `name` says; `parts` as in `OracleRun`."""
    case = Case.parse(request.case)
    flavour = ORACLE_RUNS[name]
    run = OracleRun(
        adapter=adapter,
        case=case,
        model=models.case(case.model),
        writer=writer,
        batch=batch,
        device=device,
        world=request.ranks,
        scratch=Path(request.directory) / name,
        carrier=carrier,
        dtype=flavour.dtype,
        suspects=flavour.suspects,
        parts=parts,
    )
    program_of(SCENARIOS[case.scenario], second=request.second)(run)


def drawn_step(seed: int, step: int) -> int:
    """The step whose data a model case draws: every seed has steps of its own.

    An even number of steps lies between two seeds, so that what changes from one step to the next
    does so with every seed.
    """
    return STEPS_OF_A_SEED * seed + step


def own_batches(
    request: OracleRequest, rank: int, device: torch.device, dtype: torch.dtype | None
) -> Callable[[int, int], models.Batch]:
    """(step, micro-batch) to one rank's batch on `device`, floating parts in `dtype` if given."""
    name = Case.parse(request.case).model
    return lambda step, micro: drawn_batch(
        name, rank, drawn_step(request.seed, step), micro, device, dtype
    )


@lru_cache(maxsize=DRAWN_KEPT)
def drawn_batch(
    name: str, rank: int, step: int, micro: int, device: torch.device, dtype: torch.dtype | None
) -> models.Batch:
    """A batch of a model case. All cases of a model train on the same ones, and none changes them.

    Not for wrappers: one that changes a batch must not be seen in the next case.
    """
    with torch.inference_mode(mode=False):  # else no later backward could use it
        moved = models.move(models.case(name).batch(rank, step, micro), device)
        return moved if dtype is None else cast_floating(moved, dtype)


def virtual_batches(
    request: OracleRequest, device: torch.device, dtype: torch.dtype | None
) -> Callable[[int, int], PerRank]:
    """(step, micro-batch) to every virtual rank's batch on `device`; `dtype` as above."""
    ranks = [own_batches(request, rank, device, dtype) for rank in range(request.ranks)]
    return lambda step, micro: PerRank(tuple(own(step, micro) for own in ranks))


def cast_floating(batch: models.Batch, dtype: torch.dtype) -> models.Batch:
    """`batch` with its floating tensors in `dtype`."""
    return models.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


class VirtualWriter:
    """One history per virtual rank; what is common to all of them is stored with rank 0."""

    def __init__(self, directory: Path, world: int) -> None:
        """Start `world` histories in `directory`."""
        header = {"virtual": True, "world": world}
        self._ranks = [HistoryWriter(directory, rank, header) for rank in range(world)]

    def __enter__(self) -> VirtualWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        for writer in self._ranks:
            writer.close()

    def begin_phase(self, name: str) -> None:
        """Start a phase in every history."""
        for writer in self._ranks:
            writer.begin_phase(name)

    def end_phase(self, error: str | None = None, traceback: str = "") -> None:
        """End it in every history."""
        for writer in self._ranks:
            writer.end_phase(error, traceback)

    def write(self, what: str, value: Any, **where: Any) -> None:
        """Record a value for all ranks, or each rank's own."""
        for rank, writer in enumerate(self._ranks):
            if isinstance(value, PerRank):
                writer.write(what, value.values[rank], **where)
            elif rank == 0:
                writer.write(what, value, **where)
            else:
                writer.skip()

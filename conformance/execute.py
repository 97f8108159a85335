"""What runs inside ranks: one scenario with a wrapper, or the oracle's three runs of it.

Called by name through `conformance.ranks`; arguments and results are plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from conformance import models
from conformance.adapter import Conventions
from conformance.adapters import make_adapter
from conformance.case import Case
from conformance.history import HistoryWriter
from conformance.mutants import mutant_named
from conformance.oracle import VirtualRanks, rank_seed
from conformance.oracle_run import OracleRun
from conformance.per_rank import PerRank
from conformance.ranks import RankContext
from conformance.scenarios import SCENARIOS, Run

ORACLE_RUNS: Mapping[str, Mapping[str, Any]] = {
    "reference": {},
    "double": {"dtype": torch.float64},
    "reversed": {"reverse": True},
}


def run_case(
    context: RankContext,
    *,
    adapter: str,
    variant: str,
    case: str,
    seed: int,
    directory: str,
    probe: str | None = None,
    mutant: str | None = None,
) -> None:
    """Run one case with one adapter on this rank and write its history into `directory`.

    Collective: whatever the scenario issues, on the default group.
    """
    parsed = Case.parse(case)
    model = models.case(parsed.model)
    header = {"case": case, "adapter": adapter, "variant": variant, "world": context.world_size}
    writer = HistoryWriter(Path(directory), context.rank, header)
    torch.manual_seed(rank_seed(seed, context.rank))
    with ExitStack() as stack:
        stack.callback(writer.close)
        driver, options = make_adapter(adapter, variant)
        if mutant is not None:
            driver = stack.enter_context(mutant_named(mutant).planted(driver))
        if probe is not None:
            driver.capabilities |= {probe}
        run = Run(
            adapter=driver,
            case=parsed,
            model=model,
            writer=writer,
            batch=lambda step, micro: models.move(
                model.batch(context.rank, step, micro), context.device
            ),
            device=context.device,
            world=context.world_size,
            options=options,
            scratch=Path(directory),
            recorder=context.recorder,
        )
        stack.callback(lambda: writer.collectives(context.recorder.records))
        SCENARIOS[parsed.scenario].program(run)


def run_oracle(
    context: RankContext,
    *,
    world: int,
    conventions: Mapping[str, Any],
    capabilities: Sequence[str],
    case: str,
    seed: int,
    directory: str,
) -> None:
    """Run one case unsharded, three times: reference, float64, other order of additions."""
    parsed = Case.parse(case)
    model = models.case(parsed.model)
    for name, flavour in ORACLE_RUNS.items():
        dtype = flavour.get("dtype", torch.float32)
        adapter = VirtualRanks(
            world,
            Conventions(**conventions),
            frozenset(capabilities),
            seed=seed,
            reverse=flavour.get("reverse", False),
        )
        with VirtualWriter(Path(directory) / name, world) as writer:
            run = OracleRun(
                adapter=adapter,
                case=parsed,
                model=model,
                writer=writer,
                batch=lambda step, micro, dtype=dtype: PerRank(
                    tuple(
                        cast_floating(models.move(model.batch(r, step, micro), context.device), dtype)
                        for r in range(world)
                    )
                ),
                device=context.device,
                world=world,
                scratch=Path(directory) / name,
                dtype=dtype,
                suspects=name == "reference",
            )
            SCENARIOS[parsed.scenario].program(run)


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

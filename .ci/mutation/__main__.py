"""Mutation testing of `fsdp/`: python .ci/mutation [--jobs N] [--minutes M] [--results FILE].

Modules of pure arithmetic in full, then a seeded sample of all others, which need ranks. Each
mutant is cosmic-ray's, stands in a copy of the tree, and is killed by an assertion or an exception
of a test or not at all. The results file is added to line by line: the same command goes on where
it was cut off. `--report` only prints what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from crew import Answer, Crew
from session import Session, say
from sites import Mutant, Place, mutant_at
from targets import ROOT, Equivalent, Group, equivalents, groups, places, sample
from verdict import outcome, report

_SPARE = 1.15
"""So many places are looked at for one mutant of the sample: some are no Python."""


def main() -> int:
    """Run what is not in the results file yet, and print the table.

    Returns:
        0; 75 if time was up before all was done; 1 if tests fail without a mutant.
    """
    asked = _arguments()
    finished = True
    if not asked.report:
        # The shell's `timeout` and the end of a session come as this; copies and benches end too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        started = time.monotonic()
        finished = _run(asked, started + 60 * asked.minutes)
        say(f"{time.monotonic() - started:.0f} s, {asked.jobs} jobs")
    known = _read(asked.results)
    print("\n".join(report(record for record in known if "key" in record)))
    spoilt = {record["spoilt"]: record["why"] for record in known if "spoilt" in record}
    for name, why in spoilt.items():
        print(f"\nNo result holds for '{name}': {why}")
    return 1 if spoilt else 0 if finished else 75


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=".ci/mutation", description=__doc__)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing later")
    parser.add_argument("--sample", type=int, default=300, help="mutants of modules with ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of the order")
    parser.add_argument("--only", default="*", metavar="GLOB", help="modules")
    parser.add_argument("--most", type=int, help="at most so many mutants in all")
    parser.add_argument("--gigabytes", type=int, default=8, help="memory of one process")
    parser.add_argument("--results", type=Path, default=Path("mutation.jsonl"))
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args()


def _read(path: Path) -> list[dict[str, Any]]:
    """Return what has been written; a line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _run(asked: argparse.Namespace, deadline: float) -> bool:
    """Run what is not done yet; whether all was done before the deadline."""
    done = {record.get("key") for record in _read(asked.results)}
    chosen = [group for group in groups(ROOT) if _wanted(group, asked.only)]
    left = [pair for pair in _mutants(asked, chosen) if pair[1].key not in done][: asked.most]
    with (
        tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as scratch,
        Crew(ROOT, Path(scratch), asked.jobs, gigabytes=asked.gigabytes) as crew,
        asked.results.open("a") as results,
    ):
        print(json.dumps(_header(asked)), file=results, flush=True)
        session = Session(crew, left)
        for group, mutant, answer in session.answers(deadline):
            record = _record(answer, group, mutant)
            done.add(mutant.key)
            print(json.dumps(record), file=results, flush=True)
            say(f"{record['outcome']:12} {mutant.key}  {record['told'][:70]}")
        for name, why in session.spoilt.items():
            print(json.dumps({"spoilt": name, "why": why}), file=results, flush=True)
    return all(mutant.key in done for _, mutant in left)


def _wanted(group: Group, pattern: str) -> bool:
    return any(fnmatch(module, pattern) for module in group.modules)


def _mutants(asked: argparse.Namespace, chosen: list[Group]) -> list[tuple[Group, Mutant]]:
    """Return all mutants of whole groups, then the sample, without those known as equivalent."""
    wide = {module: g for g in chosen for module in g.modules if fnmatch(module, asked.only)}
    full = places(ROOT, (module for module, group in wide.items() if group.whole))
    rest = places(ROOT, (module for module, group in wide.items() if not group.whole))
    drawn = sample(rest, asked.seed)[: int(asked.sample * _SPARE)]
    known = equivalents(ROOT, mutant_at)
    with ProcessPoolExecutor(asked.jobs) as pool:
        build = partial(_build, known)
        every = list(pool.map(build, sample(full, asked.seed), chunksize=8))
        some = list(pool.map(build, drawn, chunksize=8))
    kept = [mutant for mutant in some if mutant is not None][: asked.sample]
    found = [*(mutant for mutant in every if mutant is not None), *kept]
    say(f"{len(found) - len(kept)} mutants in full, {len(kept)} of {len(rest)} in the sample")
    return [(wide[mutant.place.module], mutant) for mutant in found]


def _build(known: list[Equivalent], place: Place) -> Mutant | None:
    mutant = mutant_at(ROOT, place)
    if mutant is None or any(each.covers(mutant) for each in known):
        return None
    return mutant


def _record(answer: Answer, group: Group, mutant: Mutant) -> dict[str, Any]:
    how, told = outcome(answer)
    return {
        "key": mutant.key,
        "group": group.name,
        "whole": group.whole,
        "module": mutant.place.module,
        "line": mutant.line,
        "operator": mutant.place.operator,
        "old": mutant.old,
        "new": mutant.new,
        "outcome": how,
        "told": told,
        "seconds": answer.seconds,
        "text": "" if answer.failure is None else answer.failure["text"][-300:],
    }


def _header(asked: argparse.Namespace) -> dict[str, Any]:
    names: Iterable[str] = ("torch", "pytest", "hypothesis", "cosmic-ray")
    return {
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in names},
        "asked": {name: str(value) for name, value in vars(asked).items()},
    }


if __name__ == "__main__":
    sys.exit(main())

"""Mutation testing of `fsdp/`: python .ci/mutation [--jobs N] [--minutes M] [--results FILE].

A seeded sample of the modules that need ranks, then those of pure arithmetic in full. First it is
measured which test runs which line, in ranks too, and kept beside the results; a mutant is then
judged by the tests that run its line, quickest first. It is cosmic-ray's, stands in a copy of the
tree, and is killed by an assertion or an exception of a test or not at all. The results file is
added to line by line: the same command goes on where it was cut off, but for modules that have
changed since. `--report` only prints what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from cover import Cover, Survey
from crew import Answer, Crew
from session import Session, SpoiltError, say
from sites import Mutant, Place, mutant_at
from targets import ROOT, Equivalent, Targets, equivalents, places, sample, targets
from verdict import KILLED, UNIMPORTABLE, report

_SPARE = 1.3
"""So many places are looked at for one mutant of the sample: some are no Python."""
_CLEAR = (KILLED, UNIMPORTABLE)


def main() -> int:
    """Run what is not in the results file yet, and print the table.

    Returns:
        0; 75 if time was up before all was done; 1 if the tests do not see the changed tree.
    """
    asked = _arguments()
    finished = True
    if not asked.report:
        # The shell's `timeout` and the end of a session come as this; copies and benches end too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        started = time.monotonic()
        try:
            finished = _run(asked, started + 60 * asked.minutes)
        except SpoiltError as error:
            say(str(error))
            return 1
        say(f"{time.monotonic() - started:.0f} s, {asked.jobs} jobs")
    known = _read(asked.results)
    results = _results(known).values()
    print("\n".join(report(results)))
    steady = {test for record in known for test in record.get("steady", ())}
    open_ones = sum(each["outcome"] == KILLED and each["told"] not in steady for each in results)
    if open_ones:
        print(f"\n{open_ones} kills by tests that were not tried alone without a mutant.")
    for record in known:
        if "unsteady" in record:
            print(f"\nNo kill of {record['unsteady']} holds: it fails by itself; {record['why']}")
    return 0 if finished else 75


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=".ci/mutation", description=__doc__)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing later")
    parser.add_argument("--sample", type=int, default=300, help="mutants of modules with ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of the order")
    parser.add_argument("--seconds", type=float, default=40.0, help="of tests for one mutant")
    parser.add_argument("--only", default="*", metavar="GLOB", help="modules")
    parser.add_argument("--most", type=int, help="at most so many mutants in all")
    parser.add_argument("--gigabytes", type=int, default=8, help="memory of one process")
    parser.add_argument("--results", type=Path, default=Path("mutation.jsonl"))
    parser.add_argument("--again", action="store_true", help="what was not killed, long tests too")
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args()


def _read(path: Path) -> list[dict[str, Any]]:
    """Return what has been written; a line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _results(known: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last result of each mutant, without kills by tests that fail by themselves.

    Results of modules that have changed since, or are gone, are of other mutants.
    """
    known = list(known)
    unsteady = {record["unsteady"] for record in known if "unsteady" in record}
    found = {record["key"]: record for record in known if "key" in record}
    return {
        key: record
        for key, record in found.items()
        if (record["outcome"] != KILLED or record["told"] not in unsteady)
        and record.get("source") == _source(record["module"])
    }


def _run(asked: argparse.Namespace, deadline: float) -> bool:
    """Run what is not done yet; whether all was done before the deadline."""
    listed = targets(ROOT)
    known = _read(asked.results)
    results = _results(known).values()
    done = {each["key"] for each in results if not asked.again or each["outcome"] in _CLEAR}
    unsteady = {record["unsteady"]: record["why"] for record in known if "unsteady" in record}
    with (
        tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as scratch,
        Crew(ROOT, Path(scratch), asked.jobs, gigabytes=asked.gigabytes) as crew,
        asked.results.open("a") as written,
    ):
        print(json.dumps(_header(asked)), file=written, flush=True)
        survey = Survey(crew, ROOT, listed.tests, asked.results.with_suffix(".tests"))
        left = [each for each in _mutants(asked, listed) if each.key not in done][: asked.most]
        cover = survey.cover(deadline)
        if cover is None:
            return False
        for name, why in unsteady.items():
            cover.drop(name, why)
        _tell(cover)
        session = Session(
            crew,
            cover,
            left,
            canaries=listed.canaries,
            seconds=asked.seconds,
            long=asked.again,
        )
        session.steady |= {test for record in known for test in record.get("steady", ())}
        for each in results:
            if each["outcome"] == KILLED:
                session.try_alone(each["told"])
        for mutant, how, told, answer in session.answers(deadline):
            whole = mutant.place.module in listed.whole
            record = _record(mutant, how, told, answer) | {"whole": whole}
            print(json.dumps(record), file=written, flush=True)
            say(f"{record['outcome']:12} {record['seconds']:5.1f} {mutant.key}  {told[:70]}")
        for name, why in session.unsteady.items():
            print(
                json.dumps({"unsteady": name, "why": why[-300:]}),
                file=written,
                flush=True,
            )
        print(json.dumps({"steady": sorted(session.steady)}), file=written, flush=True)
    lost = any(r["outcome"] == KILLED and r["told"] in session.unsteady for r in results)
    return not session.left and not lost


def _tell(cover: Cover) -> None:
    say(f"{len(cover)} tests run the package, {cover.seconds:.0f} s in all")
    for name, why in cover.failed.items():
        say(f"judges nothing, because it fails without a mutant: {name}\n{why[-500:]}")


def _mutants(asked: argparse.Namespace, listed: Targets) -> list[Mutant]:
    """Return the sample, then all mutants of whole modules, without those known as equivalent."""
    full, rest = (
        places(ROOT, (module for module in modules if fnmatch(module, asked.only)))
        for modules in (listed.whole, listed.sampled)
    )
    drawn = sample(rest, asked.seed)[: int(asked.sample * _SPARE)]
    known = equivalents(ROOT, mutant_at)
    with ProcessPoolExecutor(asked.jobs) as pool:
        build = partial(_build, known)
        every = list(pool.map(build, sample(full, asked.seed), chunksize=8))
        some = list(pool.map(build, drawn, chunksize=8))
    kept = [mutant for mutant in some if mutant is not None][: asked.sample]
    found = [*kept, *(mutant for mutant in every if mutant is not None)]
    say(f"{len(found) - len(kept)} mutants in full, {len(kept)} of {len(rest)} in the sample")
    return found


def _build(known: list[Equivalent], place: Place) -> Mutant | None:
    mutant = mutant_at(ROOT, place)
    if mutant is None or any(each.covers(mutant) for each in known):
        return None
    return mutant


def _record(mutant: Mutant, how: str, told: str, answer: Answer | None) -> dict[str, Any]:
    text = next((f["text"] for f in answer.failures if f["test"] == told), "") if answer else ""
    return {
        "key": mutant.key,
        "module": mutant.place.module,
        "source": _source(mutant.place.module),
        "line": mutant.line,
        "operator": mutant.place.operator,
        "old": mutant.old,
        "new": mutant.new,
        "outcome": how,
        "told": told,
        "tests": len(answer.order.tests) if answer else 0,
        "seconds": answer.seconds if answer else 0.0,
        "text": text[-300:],
    }


@cache
def _source(module: str) -> str:
    """What tells a module's source from what it was or becomes."""
    path = ROOT / module
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


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

"""The commands that repeat: ``repro`` runs one finding anew, ``recheck`` judges a stored run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.case import Case
from conformance.checks import CHECKS
from conformance.cli.options import HISTORIES
from conformance.cli.show import note
from conformance.errors import UsageError, unknown
from conformance.expectations import Expectations
from conformance.item import Item
from conformance.machine import device_for, notes
from conformance.matrix import Matrix, NotStored
from conformance.models import cases, drawn
from conformance.mutants import mutant_named
from conformance.optimizers import OPTIMIZERS, WHOLE_TENSOR
from conformance.probes import probed_capabilities
from conformance.report.detail import repeated_text
from conformance.report.lines import (
    LOG_NAME,
    Log,
    LogError,
    Reported,
    Role,
    dumps,
    finding_line,
    read_log,
)
from conformance.report.log import RunLog, status_of
from conformance.report.plain import finding_text
from conformance.report.text import report_text
from conformance.report.words import number
from conformance.room import temporary_folder
from conformance.scenarios import SCENARIOS
from conformance.scenarios.resume import second_world
from conformance.scenarios.sequence import ACTS, SEQUENCE
from conformance.session import Session, Setting, slug
from conformance.subject import Subject
from conformance.verdicts import COMPLETED, EXIT_OK, exit_status, parse_finding_id
from conformance.work import items_of_log, planned_again


def repro_command(
    id: str, *, world: int, device: str, baseline: str, mutant: str | None, timeout: float
) -> int:
    """Run the case of one finding and judge it; returns the exit status of that finding.

    Raises:
        UsageError: the id names nothing that exists, or the setting does not fit this machine.
    """
    item, wanted, seed = item_of(id, mutant)
    told = notes(device, world)
    device = device_for(device, world)
    note(told)
    with temporary_folder() as folder:
        setting = Setting(
            world=world,
            device=device,
            seed=seed,
            timeout=timeout,
            directory=folder,
            baseline=baseline,
        )
        with Session(setting) as session:
            matrix = Matrix(
                histories=lambda i: session.run(i.subject, i.planned.case, probe=i.planned.probe),
                root=setting.directory,
                world=world,
                seed=seed,
                with_control=mutant is None,
            )
            reported = matrix.report(item)
    asked = [one for one in reported if one.finding.check == wanted]
    sys.stdout.write(repeated_text(reported, wanted))
    found = [one.finding.verdict for one in asked]
    return EXIT_OK if item.role is Role.PROBE else exit_status(found)


def item_of(id: str, mutant: str | None) -> tuple[Item, str, int]:
    """(what to run, the check that was asked for, the seed) of a finding's id.

    Raises:
        UsageError: some part of it does not exist.
    """
    try:
        check, adapter, variant, text, seed = parse_finding_id(id)
        case = Case.parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
    subject = Subject(adapter=adapter, variant=variant, mutant=mutant)
    if mutant is not None:
        mutant_named(mutant)
    subject.make()
    if case.model.startswith(drawn.PREFIX):
        try:
            drawn.parse(case.model)
        except ValueError as error:
            raise UsageError(str(error)) from error
    elif case.model not in cases():
        raise unknown("model", case.model, cases(), listed="models")
    for kind, name, known in (
        ("scenario", case.scenario, SCENARIOS),
        ("optimizer", case.optimizer, {**OPTIMIZERS, **WHOLE_TENSOR}),
    ):
        if name not in known:
            raise unknown(kind, name, known)
    second_world(case, 1)
    acts = case.option("acts")
    if case.scenario == SEQUENCE and (not acts or set(acts) - set(ACTS)):
        known_acts = "".join(ACTS)
        raise UsageError(
            f"case {str(case)!r}: acts={acts!r} is not a sequence of letters {known_acts!r};"
            " fsdp-conformance list letters says what they are"
        )
    probe = probed_capabilities(check)
    if not probe and check not in CHECKS:
        raise unknown("check", check, CHECKS, listed="checks")
    planned = planned_again(text, probe, list(CHECKS.values()))
    if not probe and check not in (COMPLETED, *(c.id for c in planned.checks)):
        raise UsageError(f"check {check!r} says nothing about the case {str(case)!r}")
    role = Role.PROBE if probe else Role.JUDGED
    return Item(subject=subject, planned=planned, role=role), check, seed


def recheck_command(directory: Path) -> int:
    """Judge a stored run again; returns the exit status of the new findings.

    A run that did not come to its end, or whose histories are not all there, is undecided at best.

    Raises:
        UsageError: `directory` does not hold the log of a run.
    """
    try:
        stored = read_log(directory / LOG_NAME)
    except LogError as error:
        raise UsageError(f"recheck: {error}") from error
    again = judge_again(stored, directory)
    log = again.log
    sys.stdout.write(report_text(log))
    sys.stdout.write(comparison_text(stored, again) + "\n")
    stale = log.footer["stale_expectations"] if log.footer else ()
    lacks = "histories are missing" if again.missing else ""
    if stored.partial:
        lacks = "the run is partial"
    status = status_of(log.reported, stale, whole=not lacks)
    if lacks:
        decided = status == status_of(log.reported, stale)
        why = "; what was makes the exit status" if decided else ": exit status"
        sys.stdout.write(f"{lacks}, so not everything was judged{why} {status}\n")
    return status


@dataclass(frozen=True, kw_only=True)
class Again:
    """A stored run, judged again.

    Attributes:
        log: of judging the stored histories now.
        missing: how many cases have no history.
        unfinished: what the stored log has of the case in which it was cut short.
    """

    log: Log
    missing: int = 0
    unfinished: Sequence[Reported] = ()


def judge_again(stored: Log, directory: Path) -> Again:
    """Judge every case of a stored run of which all findings were written."""
    expectations = Expectations.of(stored.header["expectations"])
    root = directory / HISTORIES
    matrix = Matrix(
        histories=_stored_histories(root),
        root=root,
        world=stored.header["world"],
        seed=stored.header["seed"],
        expectations=expectations,
    )
    missing = 0
    unfinished: Sequence[Reported] = ()
    known = set(map(_key, stored.reported))
    items = items_of_log(stored)
    with RunLog(None, stored.header) as log:
        for item in items:
            try:
                found = matrix.report(item)
            except NotStored:
                missing += 1
                continue
            # the findings of a case are written one after the other
            if stored.partial and item is items[-1] and not known.issuperset(map(_key, found)):
                case = _case(found[0])
                unfinished = [one for one in stored.reported if _case(one) == case]
                continue
            for one in found:
                log.add(one)
        if stored.footer is not None:
            names = [adapter["name"] for adapter in stored.header["adapters"]]
            stale = [] if stored.header["narrowed"] else expectations.stale(names)
            log.finish(stale=stale, seconds=stored.footer["seconds"])
        return Again(log=log.log, missing=missing, unfinished=unfinished)


def _stored_histories(root: Path) -> Callable[[Item], Path]:
    def find(item: Item) -> Path:
        directory = root / item.subject.folder / slug(item.planned.case, item.planned.probe)
        if not (directory / "case.json").exists():
            raise NotStored(f"{directory} holds no complete history")
        return directory

    return find


def comparison_text(stored: Log, again: Again) -> str:
    """How the findings differ from those of the run, in one line or one line each."""
    before = {_key(one): one for one in stored.reported}
    after = {_key(one): one for one in again.log.reported}
    lines = [
        f"changed: {before[key].finding.verdict} -> {finding_text(after[key])}"
        for key in after
        if key in before and dumps(finding_line(before[key])) != dumps(finding_line(after[key]))
    ]
    lines += [f"new: {finding_text(after[key])}" for key in after if key not in before]
    if again.unfinished:
        kept = number(len(again.unfinished), "finding")
        lines.append(f"unfinished, and not judged, though the log has {kept} of it:")
        lines.append(f"      {again.unfinished[0].finding.id.partition('@')[2]}")
    gone = before.keys() - after.keys() - set(map(_key, again.unfinished))
    if gone:
        cases = number(again.missing, "case")
        lines.append(
            f"not judged again: {number(len(gone), 'finding')}, of {cases} without history"
        )
    if not lines:
        roles = Counter(role for role, _ in after)
        told = ", ".join(f"{roles[role]} {role}" for role in Role if roles[role])
        every = "the finding is" if len(after) == 1 else f"all {len(after)} findings are"
        lines = [f"recheck: {f'{every} the same ({told})' if after else 'nothing was judged'}"]
    return "\n".join(lines)


def _key(one: Reported) -> tuple[str, str]:
    return str(one.role), one.finding.id


def _case(one: Reported) -> tuple[str, str, str, str]:
    finding = one.finding
    return str(one.role), finding.adapter, finding.variant, finding.case

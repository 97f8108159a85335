"""What a run consists of: from the names that a user gives to the cases of each adapter variant.

Knows adapters' claims and the plan. Runs nothing; every wrong name is an error before any work.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from conformance.adapter import Adapter
from conformance.adapters import adapter_class, make_adapter
from conformance.adapters.declared import declared_variants
from conformance.case import Case
from conformance.checks import CHECKS, Check
from conformance.control import CONTROL, control_cases
from conformance.errors import UsageError, unknown
from conformance.globs import matches
from conformance.item import Item
from conformance.models import case as model_named
from conformance.names import Depth
from conformance.near import near_matches, offer
from conformance.plan import (
    Planned,
    about_claim,
    every_case,
    judges,
    plan,
    plan_probes,
    select_checks,
    select_models,
)
from conformance.report.lines import Log, Role
from conformance.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a user asks for.

    Attributes:
        adapters: names, in the order of the report.
        variants: patterns over variant names; empty takes all.
        profiles: names of profiles; empty takes all.
        checks: patterns over check ids; empty takes all.
        models: patterns over model names; empty takes all.
        cases: patterns over cases, such as ``*/train/*``; empty takes all.
        depth: of every variant; ``None`` takes an adapter's first, or what `variants` name, wide
            and the others narrow.
    """

    adapters: tuple[str, ...]
    variants: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    depth: Depth | None = None

    @property
    def narrowed(self) -> bool:
        """Whether something that belongs to the adapters is left out."""
        names = (self.variants, self.profiles, self.checks, self.models, self.cases)
        return any(names) or self.depth is Depth.NARROW


@dataclass(frozen=True, kw_only=True)
class Work:
    """What has to be done.

    Attributes:
        subjects: what is judged, with the adapter of each, for its claims and conventions.
        checks: the selected checks.
        items: in the order of work: the control, then every subject's cases, then its probes.
    """

    subjects: tuple[tuple[Subject, Adapter], ...]
    checks: tuple[Check, ...]
    items: tuple[Item, ...] = field(default=())


def work_of(selection: Selection, *, without: Collection[str] = ()) -> Work:
    """The work that a selection means, without the scenarios named in `without`.

    Raises:
        UsageError: a name or pattern that leads to nothing.
    """
    names = list(dict.fromkeys(selection.adapters))
    subjects = [
        [
            (subject, make_adapter(subject.adapter, subject.variant)[0])
            for subject in variants_of(name, selection.variants)
        ]
        for name in names
    ]
    checks = select_checks(selection.profiles, selection.checks)
    chosen = select_models(selection.models)
    judged: list[Item] = []
    for variants in subjects:
        for index, (subject, adapter) in enumerate(variants):
            first = index == 0 or bool(selection.variants)
            depth = selection.depth or (Depth.WIDE if first else Depth.NARROW)
            cases_of = plan(adapter.capabilities, checks, chosen, depth=depth)
            judged += [Item(subject=subject, planned=planned) for planned in cases_of]
            if index == 0:
                probes = plan_probes(adapter.capabilities, checks, chosen)
                judged += [Item(subject=subject, planned=p, role=Role.PROBE) for p in probes]
    judged = [item for item in judged if item.planned.case.scenario not in without]
    judged = _matching(judged, selection.cases)
    if not any(item.role is Role.JUDGED for item in judged):
        raise UsageError("nothing to run: no selected check judges a selected model of the adapter")
    control: list[Item] = []
    if any(name != CONTROL.adapter for name in names):
        picked = {i.planned.case for i in judged if i.role is Role.JUDGED}
        control = [
            Item(subject=CONTROL, planned=planned, role=Role.CONTROL)
            for planned in control_cases(checks, chosen, picked if selection.cases else None)
        ]
    every = tuple(pair for variants in subjects for pair in variants)
    return Work(subjects=every, checks=tuple(checks), items=(*control, *judged))


def _matching(items: list[Item], patterns: Sequence[str]) -> list[Item]:
    """The items whose case matches one of the patterns; all without patterns."""
    cases = [str(item.planned.case) for item in items]
    # what is only tried out beside the others makes no run
    judged = {c for c, item in zip(cases, items, strict=True) if item.role is Role.JUDGED}
    for pattern in patterns:
        if not any(matches(case, pattern) for case in judged):
            raise _no_case(pattern, judged)
    return [
        item
        for item, case in zip(items, cases, strict=True)
        if not patterns or any(matches(case, pattern) for pattern in patterns)
    ]


def _no_case(pattern: str, planned: Collection[str]) -> UsageError:
    """The error for a pattern that matches none of the cases of this run."""
    every = every_case()
    left_out = [case for case in every if matches(case, pattern)]
    if left_out:
        text = (
            f"no case {pattern!r} in this run: {left_out[0]} is left out by the adapter's claims,"
            f" the chosen checks and models, or --depth (it takes {every[left_out[0]].value});"
        )
    else:
        hint = offer(near_matches(pattern, sorted(planned), patterns=True))
        text = f"no case {pattern!r}; {hint}".rstrip()
    return UsageError(
        f"{text} this run has {len(planned)}, and fsdp-conformance list cases shows all"
    )


def variants_of(adapter: str, patterns: Sequence[str]) -> list[Subject]:
    """The variants of an adapter that one of `patterns` matches; all without patterns.

    Raises:
        UsageError: no such adapter, or a pattern matches none of its variants.
    """
    variants = declared_variants(adapter, adapter_class(adapter))
    for pattern in patterns:
        if not any(matches(name, pattern) for name in variants):
            raise unknown("variant", pattern, variants, where=f"of {adapter}", patterns=True)
    names = [
        name
        for name in variants
        if not patterns or any(matches(name, pattern) for pattern in patterns)
    ]
    return [Subject(adapter=adapter, variant=name) for name in names]


def items_of_log(log: Log) -> list[Item]:
    """The items whose findings stand in a log, as far as their checks still exist."""
    checks = [CHECKS[id] for id in log.header["checks"] if id in CHECKS]
    items: dict[tuple[Role, Subject, str, tuple[str, ...]], Item] = {}
    for reported in log.reported:
        finding = reported.finding
        subject = Subject(adapter=finding.adapter, variant=finding.variant)
        probe = tuple(finding.where["capabilities"]) if reported.role is Role.PROBE else ()
        key = (reported.role, subject, finding.case, probe)
        if key not in items:
            planned = planned_again(finding.case, probe, checks)
            items[key] = Item(subject=subject, planned=planned, role=reported.role)
    return list(items.values())


def planned_again(text: str, probe: Sequence[str], checks: Sequence[Check]) -> Planned:
    """A case as `plan` and `plan_probes` give it, from its string."""
    case = Case.parse(text)
    judging = judges(case, model_named(case.model), checks)
    about = about_claim(judging, probe)
    return Planned(case=case, probe=tuple(probe), checks=about or judging)

"""The run's own control: the baseline wrapper is judged like any other, before and beside them.

``DistributedDataParallel`` does what the oracle describes. Where it fails too, the suite or the
environment is at fault and not the wrapper under test, and the finding says so. It is judged on a
few plain cases of every run, fewer if cases were asked for by name, and on each case on which a
number of a wrapper is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from conformance.adapters import make_adapter
from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import Check
from conformance.item import Item
from conformance.models import ModelCase
from conformance.models import case as model_named
from conformance.names import Depth
from conformance.plan import Planned, plan
from conformance.report.lines import Role
from conformance.scenarios.sequence import SEQUENCE, needs_of
from conformance.subject import Subject
from conformance.verdicts import BAD, Finding, Verdict

CONTROL = Subject(adapter="torch.DistributedDataParallel")
PLAIN_SCENARIO = "train"


def control_cases(
    checks: Sequence[Check],
    chosen: Sequence[ModelCase],
    picked: Collection[Case] | None = None,
) -> list[Planned]:
    """The plain cases: ordinary training of the first chosen model that has any.

    Args:
        checks: the selected checks.
        chosen: the selected models.
        picked: the cases of a run that was asked for cases by name. The control is then judged on
            those of them that are plain, or on one case, which shows that the environment works.
    """
    capabilities = make_adapter(CONTROL.adapter)[0].capabilities
    depth = Depth.WIDE if picked is None else Depth.FULL
    planned = (plan(capabilities, checks, [model], depth=depth) for model in chosen)
    plain = [[p for p in own if p.case.scenario == PLAIN_SCENARIO] for own in planned]
    first: list[Planned] = next(filter(None, plain), [])
    if picked is None:
        return first
    among = ([p for p in own if p.case in picked] for own in plain)
    return next(filter(None, among), first[:1])


def weigh(
    item: Item, findings: Sequence[Finding], judge: Callable[[Item], Sequence[Finding]]
) -> list[Finding]:
    """`findings`, those turned into ERROR that the baseline wrapper gives on the same case too.

    Args:
        item: what the findings are about.
        findings: its raw findings.
        judge: judges the baseline's item; called only if a comparison failed.
    """
    failed = {f.check for f in findings if f.verdict is Verdict.FAIL and f.cause != Cause.EXCEPTION}
    asks = bool(failed) and item.subject.adapter != CONTROL.adapter
    same = _same_case(item, failed) if asks else None
    if same is None:
        return list(findings)
    baseline = {f.check: f for f in judge(same) if f.verdict in BAD}
    return [_blamed(f, baseline.get(f.check)) if f.check in failed else f for f in findings]


def _same_case(item: Item, failed: set[str]) -> Item | None:
    """The baseline's item of the same case; ``None`` if it cannot be asked."""
    checks = [check for check in item.planned.checks if check.id in failed]
    capabilities = make_adapter(CONTROL.adapter)[0].capabilities
    case = item.planned.case
    if case.scenario == SEQUENCE and needs_of(case.option("acts")) <= capabilities:
        return Item(
            subject=CONTROL, planned=Planned(case=case, checks=tuple(checks)), role=Role.CONTROL
        )
    for planned in plan(capabilities, checks, [model_named(case.model)], depth=Depth.FULL):
        if planned.case == case:
            return Item(subject=CONTROL, planned=planned, role=Role.CONTROL)
    return None


def _blamed(finding: Finding, baseline: Finding | None) -> Finding:
    if baseline is None:
        return finding
    return replace(
        finding,
        verdict=Verdict.ERROR,
        sentence=f"{CONTROL.adapter} fails here too, so the suite or the environment is at fault:"
        f" {finding.sentence}",
    )

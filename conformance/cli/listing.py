"""The command ``list``: checks, profiles, adapters, models, cases, mutants, and so on.

Each list imports what it shows: most of it takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from conformance.errors import unknown
from conformance.names import CAPABILITIES, PROFILES
from conformance.report.words import indented

Row = dict[str, Any]


def listing(what: str, *, as_json: bool) -> str:
    """The list called `what`, as a table or as JSON.

    Raises:
        UsageError: there is no such list.
    """
    if what not in LISTS:
        raise unknown("list", what, LISTS)
    rows = LISTS[what]()
    return json.dumps(rows, indent=2) if as_json else _table(rows)


def _checks() -> list[Row]:
    from conformance.checks import CHECKS

    return [
        {
            "check": check.id,
            "profile": check.profile,
            "needs": ", ".join(sorted(check.needs)),
            "needs one of": ", ".join(sorted(check.any_of)),
            "sentence": check.sentence,
        }
        for check in CHECKS.values()
    ]


def _profiles() -> list[Row]:
    from conformance.releases import today

    return [
        {
            "profile": name,
            "sentence": sentence,
            "checks": ", ".join(check.id for check in today(name)),
        }
        for name, sentence in PROFILES.items()
    ]


def _adapters() -> list[Row]:
    from conformance.adapters import BUILT_IN, make_adapter

    rows: list[Row] = []
    for name in BUILT_IN:
        adapter, _ = make_adapter(name)
        variants = type(adapter).variants
        rows.append(
            {
                "adapter": name,
                "variants": "; ".join(variants),  # names of variants have commas
                "claims": ", ".join(sorted(adapter.capabilities)),
            }
        )
    return rows


def _models() -> list[Row]:
    from conformance.models import cases

    return [
        {"model": name, "traits": ", ".join(sorted(case.traits)), "why": case.why}
        for name, case in cases().items()
    ]


def _scenarios() -> list[Row]:
    from conformance.scenarios import SCENARIOS

    return [
        {"scenario": name, "needs": ", ".join(sorted(one.needs)), "why": one.why}
        for name, one in SCENARIOS.items()
    ]


def _cases() -> list[Row]:
    """Those of an adapter that claims everything."""
    from conformance.plan import every_case

    return [{"case": case, "depth": depth.value} for case, depth in every_case().items()]


def _mutants() -> list[Row]:
    from conformance.mutants import MUTANTS

    return [
        {
            "mutant": mutant.name,
            "check": mutant.check,
            "cause": str(mutant.cause),
            "base": mutant.base,
            "case": mutant.case,
            "world": mutant.world,
            "bugs": ", ".join(mutant.bugs),
            "why": mutant.why,
        }
        for mutant in MUTANTS.values()
    ]


def _capabilities() -> list[Row]:
    return [{"capability": name, "meaning": meaning} for name, meaning in CAPABILITIES.items()]


def _letters() -> list[Row]:
    """Those of the ids of drawn examples: of the option ``acts`` and of their models."""
    from conformance.models import drawn
    from conformance.scenarios.sequence import ACTS

    acts = [
        {"letter": f"act {letter}", "needs": ", ".join(sorted(act.needs)), "meaning": act.sentence}
        for letter, act in ACTS.items()
    ]
    kinds = {
        "model": drawn.MODEL_LETTERS,
        "layer": drawn.LAYER_LETTERS,
        "unit": drawn.UNIT_LETTERS,
    }
    parts = [
        {"letter": f"{kind} {letter}", "needs": "", "meaning": meaning}
        for kind, letters in kinds.items()
        for letter, meaning in letters.items()
    ]
    return [*acts, *parts]


LISTS: Mapping[str, Callable[[], list[Row]]] = {
    "checks": _checks,
    "profiles": _profiles,
    "adapters": _adapters,
    "models": _models,
    "scenarios": _scenarios,
    "cases": _cases,
    "mutants": _mutants,
    "capabilities": _capabilities,
    "letters": _letters,
}


def _table(rows: list[Row]) -> str:
    """Each row as its name with the short fields, and below it the long ones, wrapped."""
    blocks: list[str] = []
    for row in rows:
        (_, name), *fields = row.items()
        lines = [str(name)]
        for key, value in fields:
            if value not in ("", None):
                label = "" if key in ("sentence", "meaning", "why") else f"{key}: "
                lines += indented(f"{label}{value}", 4)
        blocks.append("\n".join(lines))
    return "\n".join(blocks)

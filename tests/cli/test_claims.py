"""The ledger: what the findings of a run say of each claim of an adapter."""

from __future__ import annotations

import pytest

from conformance.causes import Cause
from conformance.report.claims import bears_on, claims_line, ledger
from conformance.report.lines import Log
from conformance.report.text import report_text
from conformance.verdicts import Finding
from tests.cli.literal import header, judged

SAVE = "mlp/checkpoint/kind=save"
CHECKPOINT = "mlp/checkpoint/kind=sharded,options=default"


@pytest.mark.parametrize(
    ("check", "case", "wanted"),
    [
        ("gradients.value", "mlp/train/accumulation=1,optimizer=sgd", {"gradients"}),
        ("losses.value", "mlp/train/accumulation=1,optimizer=sgd", set()),
        ("losses.value", "mlp/two_forwards", {"two_forwards"}),
        ("state_dict.keys", CHECKPOINT, {"model_state.sharded", "optim_state.sharded"}),
        ("resume.model", "mlp/checkpoint/kind=save", {"save"}),
        ("parameters.end", "mlp/train/optimizer=trust", {"optimizer.whole"}),
        (
            "clip.norm",
            "mlp/train/accumulation=1,optimizer=sgd",
            {"clip.p1", "clip.p2", "clip.pinf"},
        ),
        ("check.of_another_version", "mlp/train/accumulation=1,optimizer=sgd", set()),
    ],
)
def test_a_finding_bears_on_what_it_is_about(check: str, case: str, wanted: set[str]) -> None:
    found = bears_on(judged("PASS", check, case=case).finding)
    assert found >= wanted
    assert wanted or not found


def test_a_claim_is_verified_broken_known_to_deviate_or_never_seen() -> None:
    findings = [
        judged("PASS", "gradients.value").finding,
        judged("PASS", "losses.value", case="mlp/two_forwards").finding,
        judged("FAIL", "losses.value", case="mlp/two_forwards").finding,
        judged("XFAIL", "resume.model", case=SAVE, cause=Cause.NOT_LOADED).finding,
        judged("VACUOUS", "sharding.bytes").finding,
    ]
    claims = ledger(["gradients", "two_forwards", "save", "shard.parameters"], findings)
    assert [(c.passed, len(c.broken), len(c.known), c.verified) for c in claims] == [
        (1, 0, 0, True),
        (1, 1, 0, False),
        (0, 0, 1, False),
        (0, 0, 0, False),
    ]
    line = (
        "claims: 1 of 4 verified; broken: two_forwards (losses.value);"
        " broken as expected: save (1 case)"
    )
    assert claims_line(claims, whole=False) == line
    assert claims_line(claims, whole=True) == f"{line}; never seen: shard.parameters"
    assert claims_line([], whole=True) == ""


def cut_off(verdict: str, check: str, case: str, **fields: object) -> Finding:
    """One of the findings that one exception leads to."""
    cause = None if verdict == "BLOCKED" else Cause.EXCEPTION
    fields = {"cause": cause, "sentence": "phase 'step 2' raised on rank 1: KeyError: 1", **fields}
    return judged(verdict, check, case=case, **fields).finding


@pytest.mark.parametrize("verdict", ["FAIL", "XFAIL"])
def test_an_exception_breaks_what_was_tried_and_hides_the_rest(verdict: str) -> None:
    case = "tiny/train/accumulation=1,optimizer=sgd"
    asked = {"step": 2, "p": "inf", "max_norm": 1.0}
    findings = [
        judged("PASS", "clip.norm").finding,
        judged("PASS", "gradients.value").finding,
        cut_off(verdict, "run.completed", case, where={"rank": 1, "phase": "step 2"}),
        cut_off(verdict, "clip.norm", case, where=asked, moment=(3, 1)),
        cut_off(verdict, "gradients.value", case, where={"step": 2}, moment=(3, 1)),
        cut_off("BLOCKED", "sharding.bytes", case),
    ]
    claims = ledger(["clip.p2", "clip.pinf", "gradients", "shard.parameters"], findings)
    told = {
        "FAIL": "broken: clip.pinf (clip.norm)",
        "XFAIL": "broken as expected: clip.pinf (1 case)",
    }[verdict]
    assert claims_line(claims, whole=False) == (
        f"claims: 2 of 4 verified; {told}; never seen: shard.parameters;"
        " 1 case ended before it showed gradients"
    )


@pytest.mark.parametrize(
    ("phase", "moment", "broken"),
    [("build", (0, 0), False), ("step 0", (1, 0), False), ("load", (5, 0), True)],
)
def test_a_case_that_ends_before_what_it_is_there_for_says_nothing_of_it(
    phase: str,
    moment: tuple[int, int],
    broken: bool,  # noqa: FBT001
) -> None:
    where = {"rank": 0, "phase": phase}
    (claim,) = ledger(
        ["save"], [cut_off("FAIL", "run.completed", SAVE, where=where, moment=moment)]
    )
    assert bool(claim.broken) == broken
    assert claim.never_seen != broken
    assert claims_line([claim], whole=False).endswith(
        "broken: save (run.completed)" if broken else "never seen: save"
    )


def test_the_report_tells_it_of_each_adapter() -> None:
    first = header()
    first["adapters"][0]["capabilities"] = ["gradients", "save"]
    footer = {"stale_expectations": [], "seconds": 1.0, "exit_status": 0}
    text = report_text(
        Log(header=first, reported=[judged("PASS", "gradients.value")], footer=footer)
    )
    assert "\n  claims: 1 of 2 verified; never seen: save\n" in text
    assert "never seen" not in report_text(
        Log(header=first | {"narrowed": True}, reported=[judged("PASS", "gradients.value")])
    )

"""The ledger: what the findings of a run say of each claim of an adapter."""

from __future__ import annotations

import pytest

from conformance.report.claims import bears_on, claims_line, ledger
from conformance.report.lines import Log
from conformance.report.text import report_text
from tests.cli.literal import header, judged

CHECKPOINT = "mlp/checkpoint/kind=sharded,options=default"


@pytest.mark.parametrize(
    ("check", "case", "wanted"),
    [
        ("gradients.value", "mlp/train/accumulation=1,optimizer=sgd", {"gradients"}),
        ("losses.value", "mlp/train/accumulation=1,optimizer=sgd", set()),
        ("losses.value", "mlp/two_forwards", {"two_forwards"}),
        ("state_dict.keys", CHECKPOINT, {"model_state.sharded", "optim_state.sharded"}),
        ("resume.model", "mlp/checkpoint/kind=save", {"save"}),
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


def test_a_claim_is_verified_broken_or_not_judged() -> None:
    findings = [
        judged("PASS", "gradients.value").finding,
        judged("PASS", "losses.value", case="mlp/two_forwards").finding,
        judged("FAIL", "losses.value", case="mlp/two_forwards").finding,
        judged("XFAIL", "resume.model", case="mlp/checkpoint/kind=save").finding,
        judged("VACUOUS", "sharding.bytes").finding,
    ]
    claims = ledger(["gradients", "two_forwards", "save", "shard.parameters"], findings)
    assert [(c.passed, len(c.broken), c.verified) for c in claims] == [
        (1, 0, True),
        (1, 1, False),
        (0, 1, False),
        (0, 0, False),
    ]
    line = "claims: 1 of 4 verified; broken two_forwards (losses.value), save (resume.model)"
    assert claims_line(claims, whole=False) == line
    assert claims_line(claims, whole=True) == f"{line}; not judged shard.parameters"
    assert claims_line([], whole=True) == ""


def test_the_report_tells_it_of_each_adapter() -> None:
    first = header()
    first["adapters"][0]["capabilities"] = ["gradients", "save"]
    footer = {"stale_expectations": [], "seconds": 1.0, "exit_status": 0}
    text = report_text(
        Log(header=first, reported=[judged("PASS", "gradients.value")], footer=footer)
    )
    assert "\n  claims: 1 of 2 verified; not judged save\n" in text
    assert "not judged" not in report_text(
        Log(header=first | {"narrowed": True}, reported=[judged("PASS", "gradients.value")])
    )

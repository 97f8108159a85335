"""What a user reads, from findings written down by hand."""

# ruff: noqa: E501 - expected text stands as it is printed

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest

from conformance.causes import Cause
from conformance.report.lines import Reported, Role
from conformance.report.text import WIDTH, finding_text, report_text
from conformance.verdicts import Finding
from tests.cli.literal import ADAPTER, CASE, control, finding, judged, log_of

DDP = "torch.DistributedDataParallel"
SCALE = "gradients at step 0, rank 0 are 2 times the oracle's: summed over ranks, not averaged"


def scaled(case: str = CASE, **fields: object) -> Finding:
    return finding(
        "FAIL",
        "gradients.scale",
        case=case,
        cause=Cause.SUMMED_NOT_AVERAGED,
        sentence=SCALE,
        moment=(1, 3),
        **fields,
    )


def test_a_baseline_other_than_the_oracle_is_named() -> None:
    log = log_of([judged(), control()])
    text = report_text(replace(log, header={**log.header, "baseline": "ddp"}))
    assert "agrees with the ddp baseline on 1 plain case" in text
    assert "(2 ranks on cpu, baseline ddp)" in text


class TestReport(expecttest.TestCase):
    maxDiff = None

    def test_a_failure_is_told_from_its_first_divergence(self) -> None:
        late = judged(
            "FAIL", "losses.value", cause=Cause.UNEXPLAINED, sentence="late", moment=(2, 0)
        )
        blocked = judged("BLOCKED", "parameters.end", sentence="phase 'step 3' raised")
        passed = judged(error=0.5, bound=2.0, check="clip.norm")
        log = log_of(
            [late, blocked, Reported(finding=scaled()), passed, control(error=1.0, bound=4.0)]
        )
        self.assertExpectedInline(
            report_text(log),
            """\
FAIL  gradients.scale@torch.fully_shard/mlp/train/accumulation=1,optimizer=sgd#0
      gradients at step 0, rank 0 are 2 times the oracle's: summed over ranks, not averaged
      cause: summed-not-averaged
      and 2 later checks: losses.value, parameters.end
      fsdp-conformance repro 'gradients.scale@torch.fully_shard/mlp/train/accumulation=1,optimizer=sgd#0' --world 2 --device cpu

control: torch.DistributedDataParallel agrees with the oracle on 1 plain case; largest error / bound
of a PASS 0.25 (losses.value, mlp/train/accumulation=1,optimizer=sgd)

torch.fully_shard: 1 case, 4 checks
  1 PASS, 2 FAIL, 1 BLOCKED; largest error / bound of a PASS 0.25 (clip.norm,
  mlp/train/accumulation=1,optimizer=sgd)

1 PASS, 2 FAIL, 1 BLOCKED in 12.3 s (2 ranks on cpu); exit status 1
""",
        )

    def test_cases_that_fail_alike_are_one_story(self) -> None:
        models = ("mlp", "tiny", "tied", "unused", "frozen")
        findings = [Reported(finding=scaled(f"{m}/train/optimizer=sgd")) for m in models]
        findings.append(
            Reported(finding=scaled("mlp/train/optimizer=sgd", variant="reshard_after_forward=1"))
        )
        log = log_of(findings, (ADAPTER, "default"), (ADAPTER, "reshard_after_forward=1"))
        self.assertExpectedInline(
            report_text(log),
            """\
FAIL  gradients.scale@torch.fully_shard/mlp/train/optimizer=sgd#0
      gradients at step 0, rank 0 are 2 times the oracle's: summed over ranks, not averaged
      cause: summed-not-averaged
      the same in 5 more cases: tiny/train/optimizer=sgd, tied/train/optimizer=sgd,
      unused/train/optimizer=sgd, and 2 more
      fsdp-conformance repro 'gradients.scale@torch.fully_shard/mlp/train/optimizer=sgd#0' --world 2 --device cpu

torch.fully_shard: 5 cases, 1 check
  5 FAIL

torch.fully_shard[reshard_after_forward=1]: 1 case, 1 check
  1 FAIL

  1  torch.fully_shard
  2  torch.fully_shard[reshard_after_forward=1]

                 1               2
gradients.scale  FAIL 5          FAIL 1

6 FAIL in 12.3 s (2 ranks on cpu); exit status 1
""",
        )

    def test_exceptions_of_other_kinds_are_other_stories(self) -> None:
        def raised(case: str, error: str) -> Reported:
            sentence = f"phase 'step 2' raised on rank 1: {error}"
            return judged(
                "FAIL", "run.completed", case=case, cause=Cause.EXCEPTION, sentence=sentence
            )

        log = log_of(
            [
                raised("mlp/train", "RuntimeError: no group 3"),
                raised("tiny/train", "RuntimeError: no group 17"),
                raised("tied/train", "KeyError: 'head'"),
            ]
        )
        stories = [line for line in report_text(log).splitlines() if line.startswith("FAIL")]
        assert len(stories) == 2

    def test_what_proves_nothing_is_told_once_with_its_reason(self) -> None:
        log = log_of(
            [
                judged("VACUOUS", sentence="the loss moved by less than 0.001 of itself"),
                judged(
                    "VACUOUS",
                    case="tiny/train",
                    sentence="the loss moved by less than 0.001 of itself",
                ),
                judged("UNSUPPORTED", "clip.norm", sentence="not claimed: clip.p2"),
                judged("PASS", "gradients.value"),
            ]
        )
        self.assertExpectedInline(
            report_text(log),
            """\
VACUOUS  losses.value in 2 cases
      the loss moved by less than 0.001 of itself
      losses.value@torch.fully_shard/mlp/train/accumulation=1,optimizer=sgd#0

torch.fully_shard: 2 cases, 3 checks
  1 PASS, 1 UNSUPPORTED, 2 VACUOUS
  not claimed: clip.p2 (1 finding)

1 PASS, 1 UNSUPPORTED, 2 VACUOUS in 12.3 s (2 ranks on cpu); exit status 2
""",
        )

    def test_what_fails_as_expected_is_told_by_reason_and_not_measured(self) -> None:
        known = finding("XFAIL", case="mlp/eval_in_step", error=0.2, bound=1e-6)
        other = finding("XFAIL", "clip.norm", case="tiny/train", error=3.0, bound=1e-6)
        log = log_of(
            [
                judged(error=1e-7, bound=1e-6),
                Reported(finding=known, reason="stale-weights"),
                Reported(finding=other, reason="stale-weights"),
                Reported(finding=other, reason="empty-norm"),
            ]
        )
        self.assertExpectedInline(
            report_text(log),
            """\
torch.fully_shard: 3 cases, 2 checks
  1 PASS, 3 XFAIL; largest error / bound of a PASS 0.1 (losses.value,
  mlp/train/accumulation=1,optimizer=sgd)
  as expected: stale-weights (2 findings)
  as expected: empty-norm (1 finding)

1 PASS, 3 XFAIL in 12.3 s (2 ranks on cpu); exit status 0
""",
        )

    def test_a_failing_control_blames_the_suite(self) -> None:
        bad = control(
            "FAIL", check="gradients.value", cause=Cause.ZERO, sentence="gradient of a is 0", seed=0
        )
        log = log_of([bad, control(), judged()])
        self.assertExpectedInline(
            report_text(log),
            """\
ERROR  control: torch.DistributedDataParallel itself fails 1 time on 1 plain case: the suite or the
environment is at fault
      gradients.value: gradient of a is 0
      fsdp-conformance repro 'gradients.value@torch.DistributedDataParallel/mlp/train/accumulation=1,optimizer=sgd#0' --world 2 --device cpu

torch.fully_shard: 1 case, 1 check
  1 PASS

1 PASS in 12.3 s (2 ranks on cpu); exit status 2
""",
        )

    def test_several_adapters_make_a_matrix(self) -> None:
        labels = ((ADAPTER, "default"), (ADAPTER, "hybrid"), (DDP, "default"))
        findings = [
            judged("PASS"),
            judged("FAIL", case="tiny/train", cause=Cause.STALE, sentence="is stale"),
            judged("PASS", variant="hybrid"),
            judged("UNSUPPORTED", "sharding.bytes", adapter=DDP, sentence="not claimed: shard"),
        ]
        self.assertExpectedInline(
            report_text(log_of(findings, *labels)),
            """\
FAIL  losses.value@torch.fully_shard/tiny/train#0
      is stale
      cause: stale
      fsdp-conformance repro 'losses.value@torch.fully_shard/tiny/train#0' --world 2 --device cpu

torch.fully_shard: 2 cases, 1 check
  1 PASS, 1 FAIL

torch.fully_shard[hybrid]: 1 case, 1 check
  1 PASS

torch.DistributedDataParallel: 1 case, 1 check
  1 UNSUPPORTED
  not claimed: shard (1 finding)

  1  torch.fully_shard
  2  torch.fully_shard[hybrid]
  3  torch.DistributedDataParallel

                1               2               3
losses.value    FAIL 1/2        PASS 1          -
sharding.bytes  -               -               UNSUPPORTED 1

2 PASS, 1 FAIL, 1 UNSUPPORTED in 12.3 s (2 ranks on cpu); exit status 1
""",
        )

    def test_an_unclaimed_capability_that_works_is_offered(self) -> None:
        probe = Reported(
            finding=finding(
                "UNSUPPORTED",
                "claim.two_forwards",
                case="mlp/two_forwards",
                sentence="not claimed, but it works here (losses.value pass): you may claim"
                " two_forwards",
                where={"capabilities": ["two_forwards"], "works": True},
            ),
            role=Role.PROBE,
        )
        self.assertExpectedInline(
            report_text(log_of([judged(), probe])),
            """\
torch.fully_shard: 1 case, 1 check
  1 PASS

torch.fully_shard: not claimed, but it works here (losses.value pass): you may claim two_forwards

1 PASS in 12.3 s (2 ranks on cpu); exit status 0
""",
        )

    def test_a_log_without_footer_says_that_it_is_partial(self) -> None:
        self.assertExpectedInline(
            report_text(log_of([judged()], finished=False)),
            """\
torch.fully_shard: 1 case, 1 check
  1 PASS

PARTIAL: the run did not come to its end; so far 1 of 1 case: 1 PASS (2 ranks on cpu)
""",
        )

    def test_stale_expectations_are_named(self) -> None:
        log = log_of([judged()], stale=["clip.*@torch.fully_shard/*"])
        self.assertExpectedInline(
            report_text(log),
            """\
torch.fully_shard: 1 case, 1 check
  1 PASS

stale expectation, it matches no finding: clip.*@torch.fully_shard/*
1 PASS in 12.3 s (2 ranks on cpu); exit status 1
""",
        )


def test_a_plain_line_holds_verdict_id_and_sentence() -> None:
    assert finding_text(Reported(finding=scaled())) == (
        f"FAIL        gradients.scale@{ADAPTER}/{CASE}#0  {SCALE}"
    )


@pytest.mark.parametrize(
    ("verdict", "told"), [("XFAIL", "as expected"), ("XPASS", "expected to fail")]
)
def test_what_was_expected_stands_behind_what_was_seen(verdict: str, told: str) -> None:
    one = Reported(finding=finding(verdict, sentence="is 1, expected 2"), reason="reported")
    assert finding_text(one).endswith(f"  is 1, expected 2 [{told}: reported]")


def test_a_pass_shows_how_close_it_came() -> None:
    assert finding_text(judged(error=1e-7, bound=2.5e-6)).endswith("error 1e-07, bound 2.5e-06")


def test_only_ids_and_repro_lines_are_wider_than_a_terminal() -> None:
    long = "word " * 80
    log = log_of([judged("FAIL", cause=Cause.STALE, sentence=long), judged("ERROR", sentence=long)])
    wide = [line for line in report_text(log).splitlines() if len(line) > WIDTH]
    assert all("@" in line for line in wide)

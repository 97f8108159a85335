"""What a user reads, from findings written down by hand."""

# ruff: noqa: E501 - expected text stands as it is printed

from __future__ import annotations

import re
from dataclasses import replace

import expecttest
import pytest

from conformance.causes import Cause
from conformance.cli.repeating import Again, comparison_text
from conformance.report.detail import repeated_text
from conformance.report.lines import Reported, Role, finding_line
from conformance.report.plain import case_lines, finding_text
from conformance.report.text import report_text
from conformance.report.words import WIDTH, number, shortened
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


def probe(capability: str, *, works: bool, case: str = CASE) -> Reported:
    where = {"capabilities": [capability], "works": works}
    found = finding("UNSUPPORTED", f"claim.{capability}", case=case, where=where)
    return Reported(finding=found, role=Role.PROBE)


def test_an_adapter_that_fails_is_offered_no_more_claims() -> None:
    offered = [judged(), probe("save", works=True)]
    assert "frozenset" in report_text(log_of(offered))
    bad = judged("FAIL", "clip.norm", cause=Cause.STALE)
    assert "frozenset" not in report_text(log_of([*offered, bad]))


def test_a_case_is_told_by_its_reasons_and_not_by_its_checks() -> None:
    raised = {"cause": Cause.EXCEPTION, "sentence": "phase 'step 2' raised on rank 1: KeyError: 1"}
    refused = "refused at build: Refusal: no scalars"
    told = [
        judged("PASS", "losses.value"),
        judged("FAIL", "run.completed", **raised),
        judged("FAIL", "clip.norm", **raised),
        judged("BLOCKED", "parameters.end", sentence=raised["sentence"]),
        judged("FAIL", "optimizer.steps", cause=Cause.STALE, sentence="is 1, expected 2"),
        judged("PASS", "gradients.value"),
    ]
    place = f"{ADAPTER}/{CASE}#0"
    assert case_lines(told) == [
        f"PASS        {place}  2 checks",
        f"FAIL        run.completed@{place}  {raised['sentence']} (and 2 later checks)",
        f"FAIL        optimizer.steps@{place}  is 1, expected 2",
    ]
    assert case_lines(
        [
            judged("UNSUPPORTED", "run.completed", sentence=refused),
            judged("UNSUPPORTED", "losses.value", sentence="refused at build"),
        ]
    ) == [
        f"UNSUPPORTED run.completed@{place}  {refused} (and 1 later check)",
    ]
    unclaimed = judged("UNSUPPORTED", "hooks.seen", sentence="not claimed: hooks")
    assert case_lines([unclaimed]) == []
    assert case_lines([unclaimed, judged()]) == [f"PASS        {place}  1 check, 1 not claimed"]
    (line,) = case_lines([control()])
    assert line.endswith("#0 (control)  1 check")


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "case", "0 cases"),
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (1, "entry", "1 entry"),
        (3, "entry", "3 entries"),
        (3, "key", "3 keys"),
        (2, "process", "2 processes"),
    ],
)
def test_a_number_has_its_noun_in_the_right_form(count: int, noun: str, words: str) -> None:
    assert number(count, noun) == words


def test_a_long_sentence_is_cut_between_words_on_screen_only() -> None:
    long = "phase 'build' raised on rank 0: ValueError: " + "unusual words " * 40
    one = judged("FAIL", cause=Cause.EXCEPTION, sentence=long)
    for text in (finding_text(one), report_text(log_of([one]))):
        shown = " ".join(text.split())
        assert re.search(r" (unusual|words) …( |$)", shown)
    assert long in " ".join(repeated_text([one], "losses.value").split()) + " "
    assert finding_line(one)["sentence"] == long
    assert shortened("x" * 400) == "x" * 299 + " …"
    assert shortened("word " * 60) == "word " * 60


def test_what_was_asked_for_is_told_first_and_what_was_not_seen_is_counted() -> None:
    raised = {"cause": Cause.EXCEPTION, "sentence": "phase 'step 2' raised on rank 1: KeyError: 1"}
    trace = "Traceback (most recent call last):\n  File mine.py\nKeyError: 1"
    found = [
        judged("FAIL", "run.completed", **raised, where={"traceback": trace}),
        judged("FAIL", "clip.norm", **raised, where={"step": 2}),
        judged("BLOCKED", "parameters.end", sentence=raised["sentence"]),
        judged("UNSUPPORTED", "hooks.seen", sentence="not claimed: hooks"),
        judged("PASS"),
    ]
    text = repeated_text(found, "clip.norm")
    own, _, others = text.partition("\nthe other checks of this case, first divergence first:\n")
    assert own.startswith(f"FAIL  clip.norm@{ADAPTER}/{CASE}#0\n")
    assert own.endswith(
        "      step: 2\n      traceback:\n        Traceback (most recent call last):\n"
        "          File mine.py\n        KeyError: 1\n"
    )
    assert others.splitlines() == [
        "  FAIL        run.completed  phase 'step 2' raised on rank 1: KeyError: 1",
        "  PASS        1 check",
        "  1 BLOCKED, 1 UNSUPPORTED",
    ]
    assert "traceback" not in repeated_text(found, "losses.value")


@pytest.mark.parametrize(
    ("findings", "told"),
    [
        ([], "recheck: nothing was judged"),
        ([judged()], "recheck: the finding is the same (1 judged)"),
        ([judged(), control()], "recheck: all 2 findings are the same (1 judged, 1 control)"),
    ],
)
def test_a_recheck_says_how_much_it_compared(findings: list[Reported], told: str) -> None:
    log = log_of(findings)
    assert comparison_text(log, Again(log=log)) == told


def test_what_is_like_no_known_defect_stands_behind_what_is() -> None:
    unknown = judged("FAIL", "parameters.end", cause=Cause.UNEXPLAINED, sentence="is 1")
    text = report_text(log_of([unknown, Reported(finding=scaled("tiny/train"))]))
    assert text.startswith("FAIL  gradients.scale@")
    assert "FAIL  parameters.end@" in text


def test_a_rank_that_died_is_told_before_what_was_wrong_until_then() -> None:
    died = judged("CRASH", "run.completed", cause=Cause.CRASHED, sentence="died", moment=(9, 0))
    text = report_text(log_of([Reported(finding=scaled()), died]))
    assert text.startswith("CRASH  run.completed@")
    assert "1 later check: gradients.scale" in text


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
      train: training steps with one evaluation between them
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
      train: training steps with one evaluation between them
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
  not claimed, so not judged: clip.p2 (1 finding)

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
      train: training steps with one evaluation between them
      fsdp-conformance repro 'losses.value@torch.fully_shard/tiny/train#0' --world 2 --device cpu

torch.fully_shard: 2 cases, 1 check
  1 PASS, 1 FAIL

torch.fully_shard[hybrid]: 1 case, 1 check
  1 PASS

torch.DistributedDataParallel: 1 case, 1 check
  1 UNSUPPORTED
  not claimed, so not judged: shard (1 finding)

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
        found = [
            probe("save", works=True),
            probe("two_forwards", works=True),
            probe("clip.p1", works=True),
            probe("clip.p1", works=False, case="tiny/train"),
        ]
        self.assertExpectedInline(
            report_text(log_of([judged(), *found])),
            """\
torch.fully_shard: 1 case, 1 check
  1 PASS

torch.fully_shard: not claimed, but it works here; you may claim
      frozenset({"save", "two_forwards"})

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

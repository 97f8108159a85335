"""How a case is judged as a whole: ranks that did not come to its end, and what follows from what.

Literal histories, no ranks.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.checks.evidence import Evidence
from conformance.judge import Judgement, Ran, judge
from conformance.ranks import Outcome, RankVerdict
from conformance.room import no_room
from conformance.session import ran as ran_of
from conformance.verdicts import REFUSED, Verdict
from tests.checks.literal import Story, training

FULL = "SafetensorError: I/O error: No space left on device (os error 28)"
QUOTA = "OSError: [Errno 122] Disk quota exceeded: '/checkpoints/3'"


@pytest.mark.parametrize(
    ("sentence", "completed", "cause", "blocked"),
    [
        ("ValueError: not so", Verdict.FAIL, Cause.EXCEPTION, Verdict.FAIL),
        (FULL, Verdict.ERROR, None, Verdict.BLOCKED),
        (QUOTA, Verdict.ERROR, None, Verdict.BLOCKED),
    ],
    ids=["its own", "full disk", "quota"],
)
def test_what_a_wrapper_raises_is_its_fault_unless_a_disk_is_full(
    sentence: str, completed: Verdict, cause: Cause | None, blocked: Verdict
) -> None:
    evidence = training().evidence()
    whole = evidence.history.ranks[1]
    last = next(p for p in whole.phases if p.name == "eval")
    phases = (*whole.phases[: last.ordinal], replace(last, error="RuntimeError: peer is gone"))
    seen = tuple(o for o in whole.observations if o.what != "eval_loss")
    broken = replace(whole, phases=phases, observations=seen)
    history = replace(evidence.history, ranks=(evidence.history.ranks[0], broken))
    ran = Ran(verdict=RankVerdict.ERROR, sentence=f"rank 0: {sentence}; rank 1: peer is gone")
    found = judge(replace(evidence, history=history), ran, [CHECKS["losses.value"]])
    judged = {one.check: (one.verdict, one.cause) for one in found}
    assert judged == {
        "run.completed": (completed, cause),
        "losses.value": (blocked, cause),
    }


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        ("CRASH", "No space left on device"),
        ("HANG", "Disk quota exceeded"),
        ("ERROR", "File too large"),
    ],
)
def test_no_death_on_a_full_disk_is_the_fault_of_a_wrapper(verdict: str, why: str) -> None:
    sentence = f"rank 0 died without a report (signal SIGBUS); {why}: /tmp"
    ran = Ran(verdict=RankVerdict(verdict), sentence=sentence, reported=False)
    (completed,) = judge(training().evidence(), ran, [])
    assert (completed.verdict, completed.sentence) == (Verdict.ERROR, sentence)


NO_TIES = "NotImplementedError: no ties"


@pytest.mark.parametrize(
    ("errors", "phase", "told"),
    [
        ((NO_TIES, NO_TIES), 0, f"{REFUSED}: {NO_TIES}"),
        (("mine.Refusal: no\nties", "Refusal: odd"), 0, f"{REFUSED}: mine.Refusal: no"),
        ((NO_TIES, None), 0, None),
        ((NO_TIES, "ValueError: no"), 0, None),
        (("NotMyRefusal: no ties", "NotMyRefusal: no ties"), 0, None),
        ((NO_TIES, NO_TIES), 1, None),
    ],
    ids=["all", "each its own", "one", "not the other", "another name", "later"],
)
def test_only_what_all_ranks_refuse_to_build_is_unsupported(
    errors: tuple[str | None, ...], phase: int, told: str | None
) -> None:
    evidence = training().evidence()
    ranks = []
    for history, error in zip(evidence.history.ranks, errors, strict=True):
        ended = replace(history.phases[phase], error=error)
        ranks.append(replace(history, phases=(*history.phases[:phase], ended), observations=()))
    evidence = replace(evidence, history=replace(evidence.history, ranks=tuple(ranks)))
    ran = Ran(verdict=RankVerdict.ERROR, sentence="rank 0: no")
    completed, losses = judge(evidence, ran, [CHECKS["losses.value"]])
    if told is None:
        assert completed.verdict is Verdict.FAIL
        assert losses.verdict in (Verdict.FAIL, Verdict.BLOCKED)
        return
    assert (completed.verdict, completed.sentence) == (Verdict.UNSUPPORTED, told)
    assert (losses.verdict, losses.sentence) == (Verdict.UNSUPPORTED, REFUSED)


USAGE = namedtuple("USAGE", "total used free")


@pytest.mark.parametrize(
    ("verdict", "full", "disk", "told"),
    [
        ("CRASH", "histories", USAGE(2**30, 0, 4096), True),
        ("ERROR", "tmp", USAGE(2**30, 0, 0), True),
        ("ERROR", "tmp", USAGE(2**30, 0, 2**20), False),
        ("ERROR", "tmp", USAGE(0, 0, 0), False),  # the disk tells nothing
        ("SKIP", "tmp", USAGE(2**30, 0, 0), False),
        ("OK", "tmp", USAGE(2**30, 0, 0), False),
    ],
)
def test_what_goes_wrong_on_a_full_disk_says_so(
    tmp_path: Path,
    monkeypatch,
    verdict: str,
    full: str,
    disk: USAGE,
    told: bool,  # noqa: FBT001
) -> None:
    def usage(folder: Path) -> USAGE:
        return disk if folder.name == full else USAGE(2**40, 0, 2**40)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    outcome = Outcome(
        verdict=RankVerdict(verdict),
        sentence="rank 0: RuntimeError: unexpected pos 704 vs 598",
        reports=(None,),
        collectives=(None,),
        stacks=(None,),
        exits=(None,),
    )
    found = ran_of(outcome, tmp_path / "histories")
    added = f"; {no_room(tmp_path / full, 'what the ranks recorded is partial')}" if told else ""
    assert found.sentence == outcome.sentence + added
    assert found.no_room == told


def _broken_off(
    story: Story, *, phase: str, died: int = 1, error: str = "RuntimeError: closed"
) -> Evidence:
    """Rank `died` never ends `phase`, and its peer raises there; what came before stays."""
    evidence = story.evidence()
    ranks = []
    for history in evidence.history.ranks:
        last = next(p for p in history.phases if p.name == phase)
        end = replace(last, ended=False) if history.rank == died else replace(last, error=error)
        seen = tuple(
            o
            for o in history.observations
            if o.moment[0] < last.ordinal or (history.rank != died and o.what == "loss")
        )
        phases = (*history.phases[: last.ordinal], end)
        ranks.append(replace(history, phases=phases, observations=seen))
    return replace(evidence, history=replace(evidence.history, ranks=tuple(ranks)))


@pytest.mark.parametrize("verdict", ["CRASH", "DESYNC"])
def test_that_a_rank_died_is_first_and_its_peers_are_not_judged_from_there_on(
    verdict: str,
) -> None:
    story = training(steps=2)
    story.instead("parameters", {"bias": torch.tensor([9.0, 8.0, 7.5])}, step=0)
    for rank in (0, 1):
        story.instead("loss", torch.tensor(99.0 - rank), rank=rank, step=1, micro=0)
    ran = Ran(verdict=RankVerdict(verdict), sentence="rank 1 went away", reported=False)
    names = ("losses.value", "parameters.first_step", "gradients.value", "clip.norm")
    checks = [CHECKS[name] for name in names]
    found = judge(_broken_off(story, phase="step 1"), ran, checks)
    place = 0 if verdict == "CRASH" else 1  # what else was wrong before is told before
    ended, others = found[place], found[:place] + found[place + 1 :]
    assert (ended.check, ended.verdict, ended.sentence) == ("run.completed", verdict, ran.sentence)
    assert ended.moment == (2, 0)
    said = {one.check: (one.verdict, one.sentence) for one in others}
    assert said.pop("parameters.first_step")[0] is Verdict.FAIL  # was seen before
    assert set(said.values()) == {(Verdict.BLOCKED, ran.sentence)}


def test_what_was_wrong_before_ranks_waited_is_told_before_that() -> None:
    story = training(steps=2, accumulation=2)
    story.instead("loss", torch.tensor(99.0), rank=0, step=1, micro=0)
    ran = Ran(verdict=RankVerdict.HANG, sentence="rank 1 never came", reported=False)
    names = ("losses.value", "gradients.value", "no_sync.collectives")
    evidence = _broken_off(story, phase="step 1")
    ranks = [  # of what the step reduces only the first bucket is recorded
        replace(h, collectives=(*h.collectives[:-1], {**h.collectives[-1], "numel": 3}))
        for h in evidence.history.ranks
    ]
    evidence = replace(evidence, history=replace(evidence.history, ranks=tuple(ranks)))
    found = judge(evidence, ran, [CHECKS[name] for name in names])
    loss, hung = found[:2]
    assert (loss.check, loss.verdict) == ("losses.value", Verdict.FAIL)
    assert loss.where["step"] == 1
    assert (hung.check, hung.verdict) == ("run.completed", Verdict.HANG)
    assert {one.verdict for one in found[2:]} == {Verdict.BLOCKED}


def test_a_run_breaks_off_where_the_first_rank_does() -> None:
    story = training()
    whole, broken = story.evidence().history.ranks[0], _broken_off(story, phase="step 0")
    phases = (*whole.phases[:-1], replace(whole.phases[-1], error="RuntimeError: closed"))
    ranks = (replace(whole, phases=phases), broken.history.ranks[1])
    ran = Ran(verdict=RankVerdict.HANG, sentence="rank 1 never came")
    evidence = replace(broken, history=replace(broken.history, ranks=ranks))
    (completed,) = judge(evidence, ran, [])
    assert completed.moment is not None
    assert completed.moment[0] == 1


def test_what_was_wrong_until_the_end_is_judged_although_a_rank_died_after_it() -> None:
    story = training(steps=2)
    story.instead("eval_loss", torch.tensor(99.0), rank=1, index=0)  # of the last phase
    ran = Ran(verdict=RankVerdict.CRASH, sentence="rank 1 went away", reported=False)
    completed, loss = judge(story.evidence(), ran, [CHECKS["losses.value"]])
    assert (completed.verdict, loss.verdict) == (Verdict.CRASH, Verdict.FAIL)
    assert completed.moment is not None
    assert loss.moment is not None
    assert completed.moment > loss.moment


def test_a_rank_that_exits_says_where_it_did() -> None:
    evidence = _broken_off(training(), phase="step 0", error="SystemExit: 3")
    ran = Ran(verdict=RankVerdict.CRASH, sentence="rank 0 died without a report (exit 3)")
    (completed,) = judge(evidence, ran, [])
    told = "phase 'step 0' raised on rank 0: SystemExit: 3; rank 0 died without a report (exit 3)"
    assert completed.sentence == told


def test_lost_records_of_a_broken_run_are_not_called_collectives_never_issued() -> None:
    evidence = training().evidence()
    silent = [replace(h, collectives=()) for h in evidence.history.ranks]
    evidence = replace(evidence, history=replace(evidence.history, ranks=tuple(silent)))
    found = {}
    for verdict in (RankVerdict.OK, RankVerdict.DESYNC):
        ran = Ran(verdict=verdict, sentence="rank 0 entered another one")
        judged = judge(evidence, ran, [CHECKS["tied.one"]])
        found[verdict] = next(j for j in judged if j.check == "tied.one")
    assert found[RankVerdict.OK].sentence == "rank 0 issued no collective"
    blocked = found[RankVerdict.DESYNC]
    assert (blocked.verdict, blocked.sentence) == (Verdict.BLOCKED, "rank 0 entered another one")


@pytest.mark.parametrize(
    ("verdict", "told"),
    [("ERROR", Verdict.FAIL), ("HANG", Verdict.FAIL), ("CRASH", Verdict.BLOCKED)],
)
def test_a_value_seen_in_the_phase_that_broke_off_counts_unless_a_rank_died(
    verdict: str, told: Verdict
) -> None:
    story = training(steps=2)
    story.instead("loss", torch.tensor(99.0), rank=0, step=1, micro=0)
    ran = Ran(verdict=RankVerdict(verdict), sentence="rank 0: RuntimeError: closed")
    found = judge(_broken_off(story, phase="step 1"), ran, [CHECKS["losses.value"]])
    assert {one.check: one.verdict for one in found}["losses.value"] is told


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ("OK", (Verdict.VACUOUS, "nothing was there to compare")),
        ("ERROR", (Verdict.BLOCKED, "rank 0: no")),
        ("CRASH", (Verdict.BLOCKED, "rank 0: no")),
    ],
)
def test_where_a_run_ended_early_what_had_nothing_to_compare_was_cut_off(
    verdict: str, told: tuple[Verdict, str]
) -> None:
    idle = replace(CHECKS["losses.value"], judge=lambda *_: None)
    ran = Ran(verdict=RankVerdict(verdict), sentence="rank 0: no\nTraceback ...")
    found = {one.check: one for one in judge(training().evidence(), ran, [idle])}
    assert (found[idle.id].verdict, found[idle.id].sentence) == told


OK = Ran(verdict=RankVerdict.OK)


def _judged(story: Story, *names: str) -> list[Judgement]:
    found = judge(story.evidence(), OK, [CHECKS[name] for name in names])
    return [one for one in found if one.check != "run.completed"]


def test_what_is_computed_from_a_wrong_value_follows_from_it() -> None:
    story = training(steps=2)
    story.instead("gradients", {"bias": torch.tensor([7.0, -3.0, 0.1])}, step=0)
    story.instead("loss", torch.tensor(1.2345), rank=1, step=1, micro=0)
    story.instead("parameters", {"bias": torch.tensor([7.0, -3.0, 0.1])}, step=1)
    first, loss, end = _judged(story, "parameters.end", "losses.value", "gradients.value")
    assert (first.check, first.cause) == ("gradients.value", Cause.UNEXPLAINED)
    assert "first" not in first.where
    assert (loss.check, end.check) == ("losses.value", "parameters.end")
    for one in (loss, end):
        assert (one.verdict, one.cause) == (Verdict.FAIL, Cause.FOLLOWS)
        assert one.sentence.endswith(": follows from what gradients.value found")
        assert one.where["first"] == "gradients.value"


@pytest.mark.parametrize("what", ["missing", "too many"])
def test_no_value_follows_from_a_key(what: str) -> None:
    story = training(steps=2)
    seen = story.value("gradients", step=0)
    less = {name: value for name, value in seen.items() if name != "bias"}
    for rank in (0, 1):
        spoilt = less if what == "missing" else {**seen, "other": torch.tensor(1.0)}
        story.wrong[rank, "gradients", str({"step": 0})] = spoilt
    story.instead("loss", torch.tensor(1.2345), rank=1, step=1, micro=0)
    story.instead("parameters", {"bias": torch.tensor([7.0, -3.0, 0.1])}, step=1)
    key, loss, end = _judged(story, "gradients.value", "losses.value", "parameters.end")
    assert key.cause in (Cause.MISSING_KEY, Cause.UNEXPECTED_KEY)
    assert (loss.check, loss.cause) == ("losses.value", Cause.UNEXPLAINED)
    assert "first" not in loss.where
    assert end.where["first"] == "losses.value"  # which the first wrong value is


def test_a_later_cause_of_its_own_is_kept_and_says_what_came_before() -> None:
    story = training(steps=2)
    story.instead("gradients", {"bias": torch.tensor([7.0, -3.0, 0.1])}, step=0)
    story.instead("parameters", story.value("parameters", step=0), step=1)
    _, end = _judged(story, "parameters.end", "gradients.value")
    assert end.cause is Cause.STALE
    assert end.sentence.endswith(
        "the value of an earlier step, or made from one (after gradients.value)"
    )


def test_of_one_phase_the_finding_that_names_a_defect_is_told_first() -> None:
    story = training()
    story.instead("eval_loss", torch.tensor(1.2345), rank=1, index=0)
    buffers = {"mean": story.value("buffers_after_eval", index=0)["mean"] + 1.0}
    story.instead("buffers_after_eval", buffers, index=0)
    named, loss = _judged(story, "losses.value", "eval.unchanged")
    assert (named.check, named.cause) == ("eval.unchanged", Cause.CHANGED_BY_EVAL)
    assert "first" not in named.where
    assert (loss.check, loss.cause) == ("losses.value", Cause.FOLLOWS)
    assert loss.sentence.endswith(": follows from what eval.unchanged found")


def test_what_a_later_phase_names_is_told_later() -> None:
    story = training()
    story.instead("loss", torch.tensor(1.2345), rank=1, step=1, micro=0)
    buffers = {"mean": story.value("buffers_after_eval", index=0)["mean"] + 1.0}
    story.instead("buffers_after_eval", buffers, index=0)
    loss, named = _judged(story, "losses.value", "eval.unchanged")
    assert (loss.check, loss.cause) == ("losses.value", Cause.UNEXPLAINED)
    assert named.sentence.endswith("(after losses.value)")


def test_what_is_sent_is_not_told_before_a_value_of_its_phase() -> None:
    story = training(accumulation=2)
    story.instead("loss", torch.tensor(1.2345), rank=1, step=0, micro=0)
    story.collective("all_reduce", "step 0/micro 1")
    first, _ = _judged(story, "losses.value", "no_sync.collectives")
    assert (first.check, first.cause) == ("losses.value", Cause.UNEXPLAINED)


def test_no_value_follows_from_what_is_sent() -> None:
    story = training(steps=2, accumulation=2)
    story.collective("all_reduce", "step 0/micro 0")
    story.instead("loss", torch.tensor(1.2345), rank=1, step=1, micro=0)
    sent, loss = _judged(story, "losses.value", "no_sync.collectives")
    assert (sent.check, sent.cause) == ("no_sync.collectives", Cause.REDUCED_IN_NO_SYNC)
    assert (loss.check, loss.cause) == ("losses.value", Cause.UNEXPLAINED)


def test_what_is_sent_after_a_wrong_value_is_no_consequence_but_says_what_came_before() -> None:
    story = training(steps=2, accumulation=2)
    story.instead("loss", torch.tensor(1.2345), rank=1, step=0, micro=0)
    story.collective("all_reduce", "step 1/micro 0")
    loss, sent = _judged(story, "losses.value", "no_sync.collectives")
    assert (loss.check, sent.check) == ("losses.value", "no_sync.collectives")
    assert sent.cause is Cause.REDUCED_IN_NO_SYNC
    assert sent.where["first"] == "losses.value"

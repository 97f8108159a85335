"""How a case is judged whose ranks did not come to its end. Literal histories, no ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.judge import Ran, judge
from conformance.ranks import Outcome, RankVerdict
from conformance.session import ran as ran_of
from conformance.verdicts import Verdict
from tests.checks.literal import training

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


@pytest.mark.parametrize("verdict", ["CRASH", "HANG", "ERROR"])
def test_no_death_on_a_full_disk_is_the_fault_of_a_wrapper(verdict: str) -> None:
    sentence = "rank 0 died without a report (signal SIGBUS); No space left on device: /tmp"
    ran = Ran(verdict=RankVerdict(verdict), sentence=sentence, reported=False)
    (completed,) = judge(training().evidence(), ran, [])
    assert (completed.verdict, completed.sentence) == (Verdict.ERROR, sentence)


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
    added = f"; No space left on device: {tmp_path / full}" if told else ""
    assert found.sentence == outcome.sentence + added
    assert found.no_room == told

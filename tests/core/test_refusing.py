"""Ranks that all refuse to build are kept: what they remember of earlier cases is worth seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from conformance.adapter import Refusal
from conformance.adapters.torch_ddp import DataParallelAdapter
from conformance.case import Case
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import Verdict

HERE = f"{__name__}:"


class RefusesAll(DataParallelAdapter):
    def build(self, *args: Any) -> Any:
        raise Refusal("not this model")


class RefusesOnRankOne(DataParallelAdapter):
    def build(self, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise Refusal("not this model on this rank")
        return super().build(*args)


class FailsLater(DataParallelAdapter):
    def backward(self, *args: Any) -> Any:
        raise NotImplementedError("no backward")


@pytest.mark.parametrize(
    ("adapter", "verdict", "words", "replaced"),
    [
        ("RefusesAll", Verdict.UNSUPPORTED, "refused at build: Refusal: not this model", ""),
        ("RefusesOnRankOne", Verdict.FAIL, "raised on rank 1 ", "the job's verdict was ERROR"),
        ("FailsLater", Verdict.FAIL, "NotImplementedError: no back", "the job's verdict was ERROR"),
    ],
)
def test_only_ranks_that_all_refuse_are_kept(
    adapter: str, verdict: Verdict, words: str, replaced: str, tmp_path: Path
) -> None:
    subject = Subject(adapter=f"{HERE}{adapter}", variant="default")
    with Session(Setting(directory=tmp_path, world=2)) as session:
        found = session.judge_case(subject, Case.parse("mlp/eval_first"), [])
        assert [finding.verdict for finding in found] == [verdict]
        assert words in found[0].sentence
        assert [pool.replaced for pool in session._pools] == [replaced]

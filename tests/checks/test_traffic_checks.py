"""How much a step sends, told by hand: a model of three units, one of them frozen, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from conformance.adapter import Conventions
from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS, Evidence, Ledger
from conformance.checks.communication import ALIGNMENT
from conformance.checks.sent import sent
from conformance.history import NotObserved
from tests.checks.literal import MODEL, Story

UNIT, FROZEN, ROOT = 512, 128, 8
TRAINED = 2 * UNIT + ROOT
ALL = TRAINED + FROZEN
MICRO_BATCHES = 2
SHARDED = frozenset({"gradients", "no_sync", "shard.parameters", "memory.reshard"})
REPLICATED = frozenset({"gradients", "no_sync"})


class Unit(nn.Module):
    def __init__(self, elements: int = UNIT) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements // 8, 8))


class Net(nn.Module):
    """Two units that train, one that does not, and a bias of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = Unit(), Unit(), Unit(FROZEN)
        self.frozen.weight.requires_grad_(False)
        self.bias = nn.Parameter(torch.ones(ROOT))


def step_of(  # noqa: PLR0913 - what a step consists of, by name
    claims: frozenset[str] = SHARDED,
    *,
    passes: int = 2,
    kept: bool = False,
    gathered: str = "float32",
    reduce: tuple[str, int, str] = ("reduce_scatter", TRAINED, "float32"),
    times: int = 1,
    at_once: bool = False,
    **conventions: Any,
) -> Story:
    """One step of two micro-batches; what is not said is as a strategy that frees all has it.

    Args:
        claims: of the adapter.
        passes: how often a micro-batch gathers each unit.
        kept: the second micro-batch finds what the first has gathered.
        gathered: dtype in which parameters travel.
        reduce: collective, elements and dtype of the reduction.
        times: how often that is done.
        at_once: both forwards come before the first backward; other steps have four micro-batches.
        conventions: of the adapter.
    """
    accumulation = 4 if at_once else MICRO_BATCHES
    case = Case.of("literal", "train", accumulation=accumulation, optimizer="sgd")
    labels = [f"step 0/{'both' if at_once else f'micro {n}'}" for n in range(MICRO_BATCHES)]
    story = Story(case=case, capabilities=claims, conventions=Conventions(**conventions))
    values = {name: p.detach() for name, p in Net().named_parameters()}
    trained = {name: p.detach() for name, p in Net().named_parameters() if p.requires_grad}
    story.phase("build")
    story.see("parameters", values, step=-1)
    story.phase("step 0")
    for micro, label in enumerate(labels):
        if "shard.parameters" in claims and not (kept and micro):
            send(story, "all_gather", label, ROOT, gathered)
            for numel in (UNIT, UNIT, FROZEN) * passes:
                send(story, "all_gather", label, numel, gathered)
        story.see("loss", torch.tensor(1.0), step=0, micro=micro)
    for _ in range(times):
        send(story, reduce[0], labels[-1], reduce[1], reduce[2])
    story.see("gradients", trained, step=0)
    story.see("gradients_of_rank", trained, step=0)
    story.see("parameters", values, step=0)
    return story


def send(
    story: Story, op: str, label: str, numel: int, dtype: str = "float32", **fields: Any
) -> None:
    size = numel * getattr(torch, dtype).itemsize
    story.collective(op, label, numel=numel, dtype=dtype, bytes=size, **fields)


def evidence(story: Story, build: Callable[[], nn.Module] = Net) -> Evidence:
    name = build.__name__
    return replace(story.evidence(), model=replace(MODEL, name=name, build=build, units=(Unit,)))


def cause(check: str, story: Story, build: Callable[[], nn.Module] = Net) -> Cause | None:
    ledger, judge = Ledger(), CHECKS[check].judge
    assert judge is not None
    judge(evidence(story, build), ledger)
    assert ledger.comparisons > 0
    first = ledger.first()
    return None if first is None else first.cause


@pytest.mark.parametrize(
    ("op", "ranks", "bytes_sent"),
    [
        ("all_gather", 4, 30.0),
        ("reduce_scatter", 4, 30.0),
        ("all_reduce", 4, 60.0),
        ("broadcast", 4, 40.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_a_rank_sends_what_a_ring_sends(op: str, ranks: int, bytes_sent: float) -> None:
    assert sent({"op": op, "bytes": 40, "group_ranks": tuple(range(ranks))}) == bytes_sent


@pytest.mark.parametrize(
    ("story", "found"),
    [
        (step_of(), None),
        (step_of(passes=1), None),
        (step_of(passes=3), Cause.GATHERED_REPEATEDLY),
        (step_of(passes=1, gathers="once"), None),
        (step_of(gathers="once"), Cause.GATHERED_REPEATEDLY),
        (step_of(gathered="float64"), Cause.WRONG_DTYPE),
        (step_of(gathered="float64", gathered_as="float64"), None),
        (step_of(gathered="float64", passes=3), Cause.GATHERED_REPEATEDLY),
        (step_of(gathered_as="bfloat16"), Cause.WRONG_DTYPE),
        (step_of(gathered="bfloat16", gathered_as="bfloat16"), None),
    ],
    ids=[
        "both passes",
        "one pass",
        "three passes",
        "once, declared",
        "twice, once declared",
        "too wide",
        "wide, declared",
        "wide and often",
        "wider than declared",
        "short, declared",
    ],
)
def test_parameters_travel_as_often_and_as_wide_as_declared(story, found) -> None:
    assert cause("collectives.bytes", story) is found


def test_what_is_sent_too_often_is_told_with_how_often_is_declared() -> None:
    ledger, judge = Ledger(), CHECKS["collectives.bytes"].judge
    assert judge is not None
    judge(evidence(step_of(gathers="once")), ledger)
    first = ledger.first()
    assert first is not None
    assert " collectives, where each micro-batch gathers once, expected " in first.sentence


WHOLE = ("all_reduce", TRAINED, "float32")


@pytest.mark.parametrize(
    ("story", "found"),
    [
        (step_of(reduce=WHOLE), Cause.NOT_SCATTERED),
        (step_of(reduce=WHOLE, reduces="whole"), None),
        (step_of(reduce=WHOLE, reduces="whole", times=2), Cause.REDUCED_REPEATEDLY),
        (step_of(times=2), Cause.REDUCED_REPEATEDLY),
        (step_of(times=0), None),
        (step_of(reduce=("reduce_scatter", ALL, "float32")), Cause.UNEXPECTED_GRADIENT),
        (step_of(reduce=("reduce_scatter", UNIT, "float32")), Cause.NOT_REDUCED),
        (step_of(reduce=("reduce_scatter", TRAINED, "float64")), Cause.WRONG_DTYPE),
        (step_of(reduce=("reduce_scatter", TRAINED, "float64"), reduced_as="float64"), None),
        (step_of(REPLICATED, reduce=WHOLE), None),
        (step_of(REPLICATED), None),
        (step_of(REPLICATED, reduce=WHOLE, times=2), Cause.REDUCED_REPEATEDLY),
        (step_of(frozenset({"gradients"}), reduce=WHOLE, times=2), None),
        (step_of(frozenset({"gradients"}), reduce=WHOLE), None),
        (step_of(frozenset({"gradients"}), reduce=WHOLE, times=3), Cause.REDUCED_REPEATEDLY),
    ],
    ids=[
        "whole",
        "whole, declared",
        "whole twice, declared",
        "twice",
        "never",
        "frozen too",
        "half",
        "too wide",
        "wide, declared",
        "replicas: whole",
        "replicas: part",
        "replicas: twice",
        "every micro-batch",
        "only the last micro-batch",
        "more than every micro-batch",
    ],
)
def test_gradients_travel_once_to_where_they_are_needed(story, found) -> None:
    assert cause("collectives.bytes", story) is found


PART = ("reduce_scatter", TRAINED, "float32")


@pytest.mark.parametrize(
    ("claims", "reduce", "flags", "found"),
    [
        (REPLICATED, WHOLE, 4 + ALIGNMENT * 2, None),
        (REPLICATED, WHOLE, 5 + ALIGNMENT * 2, Cause.UNEXPECTED_GRADIENT),
        (SHARDED, PART, 4, None),
    ],
    ids=["one for each of four", "one more", "cut"],
)
def test_whether_there_are_gradients_may_be_said_in_their_dtype(
    claims, reduce, flags: int, found: Cause | None
) -> None:
    story = step_of(claims, reduce=reduce)
    send(story, reduce[0], "step 0/micro 1", flags)
    assert cause("collectives.bytes", story) is found


class Small(Net):
    """So small that padding may double what travels: nine elements in three parameters."""

    def __init__(self) -> None:
        super().__init__()
        for unit in (self.first, self.second):
            unit.weight = nn.Parameter(torch.ones(3, 1))
        self.frozen.weight = nn.Parameter(torch.ones(3, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.ones(3))


class Single(nn.Module):
    """Of each parameter of `Net` a single element."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in Net().named_parameters():
            owner, _, own = name.rpartition(".")
            module = nn.Module() if owner else self
            module.register_parameter(own, nn.Parameter(torch.ones(1), parameter.requires_grad))
            if owner:
                self.add_module(owner, module)


def small(build: Callable[[], nn.Module], *sends: tuple[str, int]) -> Story:
    """A step of such a model, whose gradients are sent as told."""
    story, right = step_of(times=0), build()
    values = {name: p.detach() for name, p in right.named_parameters()}
    trained = {name: p.detach() for name, p in right.named_parameters() if p.requires_grad}
    instead = {"parameters": values, "gradients": trained, "gradients_of_rank": trained}
    story.seen = [
        (what, where, [instead.get(what, value) for value in of_ranks], moment)
        for what, where, of_ranks, moment in story.seen
    ]
    for rows in story.collectives:
        rows.clear()
    send(story, "all_gather", "step 0/micro 0", 4)
    for op, numel in sends:
        send(story, op, "step 0/micro 1", numel)
    return story


@pytest.mark.parametrize(
    ("build", "sends", "found"),
    [
        (Small, [("reduce_scatter", 24)], None),  # each rank's piece of two rows is rounded up
        (Small, [("all_reduce", 9)], None),  # none is larger than padding: all may be kept whole
        (Small, [("all_reduce", 12)], Cause.NOT_SCATTERED),
        (Single, [("reduce_scatter", 6), ("all_reduce", 3)], None),  # who has a gradient
        (Single, [("reduce_scatter", 6), *[("all_reduce", 1)] * 8], None),  # bookkeeping
        (Single, [("all_reduce", 6)], Cause.NOT_SCATTERED),
        (Single, [("all_reduce", 2)] * 3, Cause.NOT_SCATTERED),
    ],
)
def test_however_small_gradients_of_cut_parameters_are_they_come_in_parts(
    build: Callable[[], nn.Module], sends: list[tuple[str, int]], found: Cause | None
) -> None:
    assert cause("collectives.bytes", small(build, *sends), build) is found


@pytest.mark.parametrize(("among", "found"), [((0, 1), Cause.NOT_SCATTERED), ((0, 2), None)])
def test_what_is_summed_among_replicas_is_a_part(among: tuple[int, int], found) -> None:
    story = step_of()
    send(story, "all_reduce", "step 0/micro 1", 6, group_ranks=among)
    assert cause("collectives.bytes", story) is found


@pytest.mark.parametrize("numel", [4, 8])
def test_what_more_ranks_gather_than_have_parts_is_no_parameter(numel: int) -> None:
    story = step_of()  # two have parts, so of four ranks two are replicas, and each logs its loss
    send(story, "all_gather", "step 0/micro 1", numel, group_ranks=(0, 1, 2, 3))
    send(story, "all_reduce", "step 0/micro 1", 6, group_ranks=(0, 2))
    assert cause("collectives.bytes", story) is None


@pytest.mark.parametrize(
    ("story", "found"),
    [
        (step_of(at_once=True, times=2), None),
        (step_of(at_once=True), None),
        (step_of(at_once=True, passes=1, kept=True), None),
        (step_of(at_once=True, passes=3), Cause.GATHERED_REPEATEDLY),
        (step_of(at_once=True, times=3), Cause.REDUCED_REPEATEDLY),
        (step_of(at_once=True, times=0), None),
        (step_of(at_once=True, reduce=WHOLE), Cause.NOT_SCATTERED),
    ],
    ids=[
        "each backward",
        "the last backward",
        "kept",
        "three passes",
        "three times",
        "never",
        "whole",
    ],
)
def test_two_forwards_at_once_move_what_two_micro_batches_do(story, found) -> None:
    assert cause("collectives.bytes", story) is found


@pytest.mark.parametrize(
    ("story", "found"),
    [
        (step_of(), None),
        (step_of(passes=1), None),
        (step_of(passes=1, kept=True), Cause.NOT_FREED),
        (step_of(kept=True), None),  # as many as two passes that free: no more is in the record
        (replace(step_of(passes=1, kept=True), replicas=2), None),
    ],
    ids=["both passes", "one pass", "kept", "kept, both passes", "not cut"],
)
def test_what_is_freed_is_gathered_again(story: Story, found: Cause | None) -> None:
    assert cause("collectives.regathered", story) is found


STEPPED = REPLICATED | {"shard.optimizer"}


def later(*sends: tuple[str, str, int]) -> Callable[[frozenset[str]], Story]:
    def told(claims: frozenset[str]) -> Story:
        story = step_of(claims)
        for op, part, numel in sends:
            send(story, op, f"step 0/{part}", numel)
        return story

    return told


@pytest.mark.parametrize(
    ("claims", "story", "found"),
    [
        (REPLICATED, later(), None),
        (REPLICATED, later(("all_reduce", "clip", 4)), None),
        (REPLICATED, later(*[("all_reduce", "clip", 1)] * TRAINED), None),
        (REPLICATED, later(("all_reduce", "optimizer", TRAINED)), Cause.REDUCED_REPEATEDLY),
        (SHARDED, later(("reduce_scatter", "clip", TRAINED)), Cause.REDUCED_REPEATEDLY),
        (REPLICATED, later(("broadcast", "optimizer", ALL)), Cause.GATHERED_REPEATEDLY),
        (SHARDED, later(("all_gather", "after", ALL)), Cause.GATHERED_REPEATEDLY),
        (STEPPED, later(("broadcast", "optimizer", ALL)), None),
        (STEPPED, later(*[("broadcast", "optimizer", ALL)] * 2), Cause.GATHERED_REPEATEDLY),
    ],
)
def test_after_backward_only_stepped_parameters_travel(claims, story, found) -> None:
    assert cause("collectives.after_backward", story(claims)) is found


@pytest.mark.parametrize(("numel", "found"), [(3, False), (4, True)])
def test_a_norm_of_each_parameter_may_travel(numel: int, *, found: bool) -> None:
    story = step_of(REPLICATED)
    send(story, "all_reduce", "step 0/clip", numel)
    assert (cause("collectives.after_backward", story, Single) is not None) is found


@pytest.mark.parametrize("check", ["bytes", "regathered", "after_backward"])
def test_a_step_that_did_not_end_is_not_judged(check: str) -> None:
    story = step_of()
    whole = evidence(story)
    ranks = tuple(
        replace(rank, observations=rank.observations[:-1]) for rank in whole.history.ranks
    )
    judge = CHECKS[f"collectives.{check}"].judge
    assert judge is not None
    with pytest.raises(NotObserved, match="parameters"):
        judge(replace(whole, history=replace(whole.history, ranks=ranks)), Ledger())


@pytest.mark.parametrize("at_once", [False, True])
def test_who_frees_when_is_not_said_of_two_forwards_at_once(*, at_once: bool) -> None:
    story, ledger = step_of(passes=1, kept=True, at_once=at_once), Ledger()
    judge = CHECKS["collectives.regathered"].judge
    assert judge is not None
    judge(evidence(story), ledger)
    assert [one.cause for one in ledger.mismatches] == [] if at_once else [Cause.NOT_FREED] * 2


def test_after_two_forwards_at_once_nothing_is_reduced_again() -> None:
    story = step_of(at_once=True)
    send(story, "reduce_scatter", "step 0/clip", TRAINED)
    assert cause("collectives.after_backward", story) is Cause.REDUCED_REPEATEDLY


def test_after_a_forward_without_backward_a_step_need_not_gather() -> None:
    plain = replace(MODEL, traits=frozenset())
    regathered = CHECKS["collectives.regathered"]
    assert regathered.judges(Case.of("m", "sequence", acts="dess"), plain)
    assert not regathered.judges(Case.of("m", "sequence", acts="dmss"), plain)


@pytest.mark.parametrize("check", ["bytes", "regathered", "after_backward"])
def test_side_doors_and_integers_are_not_counted(check: str) -> None:
    story = step_of()
    for part in ("micro 0", "optimizer"):
        story.collective(
            "all_gather", f"step 0/{part}", numel=9 * ALL, bytes=36 * ALL, judged=False
        )
        story.collective(
            "all_gather", f"step 0/{part}", numel=9 * ALL, bytes=72 * ALL, dtype="int64"
        )
    assert cause(f"collectives.{check}", story) is None


def test_a_unit_that_runs_twice_says_nothing_of_bytes() -> None:
    reused = replace(MODEL, traits=frozenset({"reused"}))
    plain = replace(MODEL, traits=frozenset())
    for check in ("bytes", "regathered", "after_backward"):
        applies = CHECKS[f"collectives.{check}"].applies
        assert applies(Case.of("m", "train"), plain)
        assert not applies(Case.of("m", "train"), reused)

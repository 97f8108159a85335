"""Losses, gradients and parameters: right runs hold, each defect is named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.adapter import Conventions
from conformance.causes import Cause
from conformance.checks import CHECKS, Evidence
from conformance.checks.updates import stepped
from conformance.judge import Judgement, Ran, judge
from conformance.optimizers import OPTIMIZERS, WHOLE_TENSOR, optimizer_named
from conformance.ranks import RankVerdict
from conformance.verdicts import Verdict
from tests.checks import literal
from tests.checks.literal import Story, cause, first_mismatch, tied, training

SINGLE = [
    "losses.value",
    "gradients.scale",
    "gradients.value",
    "parameters.first_step",
    "parameters.end",
    "tied.one",
    "frozen.kept",
    "buffers.convention",
    "clip.norm",
    "clip.gradients",
    "dtypes.results",
    "dtypes.reduced",
    "collectives.order",
    "eval.unchanged",
]
SEVERAL = ["accumulation.big_batch", "conventions.kept", "no_sync.collectives"]


@pytest.mark.parametrize("check", SINGLE)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_right_run_holds(check: str, optimizer: str) -> None:
    assert cause(check, training(optimizer=optimizer)) is None


@pytest.mark.parametrize("check", [*SINGLE, *SEVERAL])
def test_a_right_run_with_accumulation_holds(check: str) -> None:
    story = training(accumulation=3)
    if check == "accumulation.big_batch":  # sums in another order differ in the last bit
        gradient = story.value("gradients", step=0)["bias"]
        story.instead("gradients", {"bias": torch.nextafter(gradient, gradient + 1)}, step=0)
    assert cause(check, story) is None


def test_the_loss_of_older_weights_is_stale() -> None:
    story = training()
    story.instead("loss", story.value("stale_loss", 1, step=1, micro=0), rank=1, step=1, micro=0)
    first = first_mismatch("losses.value", story)
    assert first is not None
    assert first.cause is Cause.STALE
    assert (first.where["rank"], first.where["step"]) == (1, 1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda loss: loss * 2, Cause.SUMMED_NOT_AVERAGED),
        (lambda loss: loss / 3, Cause.DIVIDED_TWICE),
        (lambda loss: loss * 0, Cause.ZERO),
        (lambda loss: loss * torch.nan, Cause.NON_FINITE),
    ],
)
def test_the_loss_of_a_wrong_scale_is_named(change: object, expected: Cause) -> None:
    story = training(accumulation=3)
    loss = story.value("loss", step=0, micro=0)
    story.instead("loss", change(loss), rank=0, step=0, micro=0)  # type: ignore[operator]
    assert cause("losses.value", story) is expected


def test_the_loss_of_evaluation_counts() -> None:
    story = training()
    story.instead("eval_loss", torch.tensor(2.5), rank=0, index=0)
    assert cause("losses.value", story) is Cause.OTHER_RANK


def test_evaluation_may_take_over_buffers_or_not() -> None:
    story = training()
    story.conventions = Conventions(buffers="rank0")
    story.instead("eval_loss", torch.tensor(2.5), rank=0, index=0)
    assert cause("losses.value", story) is None


@pytest.mark.parametrize(("traits", "right"), [({"buffers"}, True), (set(), False)])
def test_after_a_load_evaluation_depends_on_whose_buffers_came(
    monkeypatch: pytest.MonkeyPatch, traits: set[str], *, right: bool
) -> None:
    model = dataclasses.replace(literal.MODEL, traits=frozenset(traits))
    monkeypatch.setattr(literal, "MODEL", model)
    story = training(scenario="checkpoint")
    story.instead("eval_loss", torch.tensor(2.75), rank=0, index=0)
    assert (cause("losses.value", story) is None) is right


def _scaled(story: Story, factor: float) -> Story:
    for step in range(2):
        tree = story.value("gradients", step=step)
        changed = {n: g * factor for n, g in tree.items() if isinstance(g, Tensor)}
        story.instead("gradients", changed, step=step)
    return story


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (2.0, Cause.SUMMED_NOT_AVERAGED),
        (0.5, Cause.DIVIDED_TWICE),
        (0.0, Cause.ZERO),
        (-1.0, Cause.SIGN),
        (0.8, Cause.SCALED),
    ],
)
@pytest.mark.parametrize("check", ["gradients.scale", "gradients.value"])
def test_the_scale_of_all_gradients_is_named(check: str, factor: float, expected: Cause) -> None:
    assert cause(check, _scaled(training(), factor)) is expected


def test_one_wrong_gradient_is_no_matter_of_scale() -> None:
    story = training()
    gradient = story.value("gradients", step=0)["bias"]
    story.instead("gradients", {"bias": gradient * 2}, step=0)
    assert cause("gradients.scale", story) is None
    assert cause("gradients.value", story) is Cause.SUMMED_NOT_AVERAGED


@pytest.mark.parametrize(
    ("source", "rank", "expected"),
    [
        ("gradients_of_rank", 0, Cause.NOT_REDUCED),
        ("gradients_of_rank", 1, Cause.OTHER_RANK),
        ("gradients_last_micro", 0, Cause.LAST_MICRO_BATCH_ONLY),
        ("gradients_doubled", 0, Cause.COUNTED_TWICE),
    ],
)
def test_a_gradient_from_the_wrong_source_is_named(source: str, rank: int, expected: Cause) -> None:
    story = training(accumulation=3)
    story.instead("gradients", story.value(source, rank, step=0), rank=0, step=0)
    assert cause("gradients.value", story) is expected


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divided", ["before", "after", "in full"])
def test_gradients_reduced_in_a_shorter_dtype_are_named(short: torch.dtype, divided: str) -> None:
    story = training()
    own = [story.value("gradients_of_rank", rank, step=1)["bias"] for rank in (0, 1)]
    parts = [(part / 2 if divided == "before" else part).to(short) for part in own]
    summed = parts[0] + parts[1]
    if divided == "after":
        summed = summed / 2
    reduced = summed.float() / 2 if divided == "in full" else summed.float()
    story.instead("gradients", {"bias": reduced}, step=1)
    assert cause("gradients.value", story) is Cause.DTYPE_ROUND_TRIP


def _weighing(weights: list[float], *, accumulation: int, step: int) -> Story:
    """Gradients of one step in which ranks, or a rank's micro-batches, weigh as told."""
    story = training(accumulation=accumulation)
    what = "gradients_of_rank" if accumulation == 1 else "gradients_of_micro"
    places = [{}] if accumulation == 1 else [{"micro": m} for m in range(accumulation)]
    parts = [story.value(what, r, step=step, **at) for r in (0, 1) for at in places]
    pairs = [*zip(parts, weights, strict=True)]
    names = ("body", "bias", "head")
    wrong = {n: sum(weight / 2 * part[n] for part, weight in pairs) for n in names}
    story.instead("gradients", wrong, step=step)
    return story


@pytest.mark.parametrize(
    ("weights", "accumulation", "step"),
    [([0.9, 1.1], 1, 1), ([0.81, 0.9, 1.0] * 2, 3, 0), ([1.0, 1.0, 1.0, 0.0, 1.0, 1.0], 3, 0)],
    ids=["ranks", "micro-batches", "one is missing"],
)
def test_parts_that_weigh_unequally_are_named(
    weights: list[float], accumulation: int, step: int
) -> None:
    story = _weighing(weights, accumulation=accumulation, step=step)
    assert cause("gradients.value", story) is Cause.UNEQUAL_WEIGHTS


def test_a_sum_in_which_all_weigh_the_same_has_another_cause() -> None:
    story = _weighing([1.3, 1.3], accumulation=1, step=1)
    assert cause("gradients.value", story) is Cause.SCALED


@pytest.mark.parametrize("value", [math.nan, 0.7])
def test_gradients_of_which_one_element_is_wrong_do_not_weigh_unequally(value: float) -> None:
    story = _weighing([0.9, 1.1], accumulation=1, step=1)
    bias = story.value("gradients", step=1)["bias"].clone()
    bias[1] = value
    story.instead("gradients", {"bias": bias}, step=1)
    expected = Cause.NON_FINITE if math.isnan(value) else Cause.UNEXPLAINED
    assert cause("gradients.value", story) is expected


def test_what_the_first_job_saw_is_judged_by_its_number_of_ranks() -> None:
    evidence = training().evidence()
    history = evidence.history
    first = dataclasses.replace(history, ranks=history.ranks * 2)
    then = dataclasses.replace(history, jobs=(0, 2))
    two_jobs = dataclasses.replace(evidence, first=first, history=then)
    assert [two_jobs.world_at((phase, 9)) for phase in range(4)] == [4, 4, 2, 2]
    assert evidence.world_at((0, 9)) == 2


def test_a_step_by_the_norms_of_parts_is_named() -> None:
    optimizer = WHOLE_TENSOR["trust"]
    story = training(optimizer="trust")
    start, gradients = story.value("parameters", step=-1), story.value("gradients", step=0)
    halves = zip(start["body"].chunk(2), gradients["body"].chunk(2), strict=True)
    body = torch.cat([stepped(optimizer, part, [gradient]) for part, gradient in halves])
    story.instead("parameters", tied({"body": body}), step=0)
    assert cause("parameters.first_step", story) is Cause.LOCAL_NORM


def test_a_missing_gradient_and_one_too_many_are_named() -> None:
    story = training()
    story.instead("gradients", {"bias": None}, step=0)
    assert cause("gradients.value", story) is Cause.MISSING_GRADIENT
    story = training()
    story.instead("gradients", {"kept": torch.zeros(2)}, step=0)
    assert cause("gradients.value", story) is Cause.UNEXPECTED_GRADIENT


def _routed() -> tuple[Story, Tensor]:
    """In the second step rank 0 alone uses the bias; its own gradient of it."""
    story = training()
    own = story.value("gradients_of_rank", 0, step=1)["bias"]
    for what, where, values, _ in story.seen:
        if what == "gradients_of_rank" and where == {"step": 1}:
            del values[1]["bias"]
        elif what == "gradients" and where == {"step": 1}:
            for value in values:
                value["bias"] = own / 2
    return story, own


def test_a_mean_over_the_ranks_that_used_a_parameter_is_named() -> None:
    story, own = _routed()
    assert cause("gradients.value", story) is None
    story.instead("gradients", {"bias": own}, step=1)
    assert cause("gradients.value", story) is Cause.UNEQUAL_WEIGHTS


def test_a_sum_over_ranks_is_one_also_where_one_rank_used_a_parameter() -> None:
    story, _ = _routed()
    summed = {n: 2 * g for n, g in story.value("gradients", step=1).items() if g is not None}
    for name in ("bias", "body", "head"):
        only = {"bias": summed["bias"], name: summed[name]}
        story.wrong.clear()
        story.instead("gradients", only, step=1)
        named = Cause.UNEQUAL_WEIGHTS if name == "bias" else Cause.SUMMED_NOT_AVERAGED
        assert cause("gradients.value", story) is named


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_what_one_rank_used_and_kept_is_not_reduced(ranks: tuple[int, ...]) -> None:
    story, own = _routed()
    for rank in ranks:
        kept = torch.zeros(3) if rank else own
        story.instead("gradients", {"bias": kept}, rank=rank, step=1)
    assert cause("gradients.value", story) is Cause.NOT_REDUCED


def test_a_stale_gradient_is_named() -> None:
    story = training()
    story.instead("gradients", story.value("gradients", step=0), step=1)
    assert cause("gradients.value", story) is Cause.STALE


def _first_step(optimizer: str, factor: float, *, warm_up: bool) -> Story:
    """The first step with gradients times `factor`, from a fresh or a used optimizer."""
    story = training(optimizer=optimizer)
    start, gradients = story.value("parameters", step=-1), story.value("gradients", step=0)
    changed = {
        name: stepped(
            OPTIMIZERS[optimizer], start[name], [gradients[name] * factor], warm_up=warm_up
        )
        for name in ("body", "bias")
    }
    story.instead("parameters", tied(changed), step=0)
    return story


@pytest.mark.parametrize(
    ("optimizer", "factor", "warm_up", "expected"),
    [
        ("sgd", 2.0, False, Cause.SUMMED_NOT_AVERAGED),
        ("sgd", 0.5, False, Cause.DIVIDED_TWICE),
        ("adamw", 1.0, True, Cause.WRONG_STEP_COUNT),
        ("sgd", 1.0, True, Cause.WRONG_STEP_COUNT),  # by its decay, which enters the momentum
    ],
)
def test_a_wrong_first_step_is_named(
    optimizer: str,
    factor: float,
    warm_up: bool,  # noqa: FBT001 - a column
    expected: Cause,
) -> None:
    story = _first_step(optimizer, factor, warm_up=warm_up)
    assert cause("parameters.first_step", story) is expected


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_weights_that_are_kept_in_a_shorter_dtype_are_named(short: torch.dtype) -> None:
    story = training()
    after = story.value("parameters", step=0)
    rounded = {name: after[name].to(short).float() for name in ("body", "bias")}
    story.instead("parameters", tied(rounded), step=0)
    assert cause("parameters.first_step", story) is Cause.DTYPE_ROUND_TRIP


def test_what_is_no_number_is_no_matter_of_scale() -> None:
    story = training()
    gradient = story.value("gradients", step=0)["bias"].clone()
    gradient[-1] = torch.nan
    story.instead("gradients", {"bias": gradient}, step=0)
    assert cause("gradients.scale", story) is None
    assert cause("gradients.value", story) is Cause.NON_FINITE


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        (1.0, Cause.NOT_DROPPED),
        (0.25, Cause.NOT_DROPPED),
        (1.25, Cause.NOT_DROPPED),
        (0.5, Cause.UNEXPLAINED),
    ],
    ids=["reduced", "unreduced", "both", "neither"],
)
def test_gradients_that_were_dropped_and_come_back_are_named(extra: float, found: Cause) -> None:
    story = training()
    like = {n: g for n, g in story.value("gradients", step=0).items() if g is not None}
    story.see("gradients_dropped", {n: torch.ones_like(g) for n, g in like.items()})
    story.see("gradients_unreduced", {n: torch.full_like(g, 0.25) for n, g in like.items()})
    wrong = story.value("gradients", step=0)["bias"] + extra
    story.instead("gradients", {"bias": wrong}, step=0)
    assert cause("gradients.value", story) is found


def _states(optimizer: str, start: Tensor, gradients: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What the optimizer keeps of the bias after a step with each of `gradients`."""
    bias = nn.Parameter(start.clone())
    own, states = optimizer_named(optimizer)([bias]), []
    for gradient in gradients:
        bias.grad = gradient.clone()
        own.step()
        kept = own.state[bias].items()
        states.append({f"bias/{k}": v.clone() if torch.is_tensor(v) else v for k, v in kept})
    return states


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_that_an_older_gradient_has_made_is_stale(optimizer: str) -> None:
    story = training(optimizer=optimizer)
    start = story.value("parameters", step=-1)["bias"]
    first = story.value("gradients", step=0)["bias"]
    due = _states(optimizer, start, [first, story.value("clipped", step=1)["bias"]])
    story.seen = [
        (what, where, [due[where["step"]]] * 2 if what == "optimizer_state" else of_ranks, moment)
        for what, where, of_ranks, moment in story.seen
    ]
    assert cause("optimizer.state", story) is None
    story.instead("optimizer_state", _states(optimizer, start, [first, first])[1], step=1)
    assert cause("optimizer.state", story) is Cause.STALE
    other = story.value("gradients_of_rank", 1, step=0)["bias"]
    story.instead("optimizer_state", _states(optimizer, start, [first, other])[1], step=1)
    assert cause("optimizer.state", story) is Cause.UNEXPLAINED


def test_adam_hides_the_scale_of_a_gradient() -> None:
    assert cause("parameters.first_step", _first_step("adamw", 2.0, warm_up=False)) is None


def test_parameters_of_the_step_before_are_stale() -> None:
    story = training()
    story.instead("parameters", story.value("parameters", step=0), rank=1, step=1)
    first = first_mismatch("parameters.end", story)
    assert first is not None
    assert (first.cause, first.where["rank"]) == (Cause.STALE, 1)


def test_only_the_end_counts_for_parameters_end() -> None:
    story = training()
    story.instead("parameters", story.value("parameters", step=-1), step=0)
    assert cause("parameters.end", story) is None


def _after_an_evaluation() -> Story:
    """A run that goes on after its evaluation."""
    story = training()
    story.phase("step 2")
    losses = (torch.tensor(2.0), torch.tensor(1.7))
    story.see("stale_loss", *(loss + 0.7 for loss in losses), step=2, micro=0)
    story.see("loss", *losses, step=2, micro=0)
    return story


def test_the_first_wrong_loss_after_an_evaluation_is_its_doing() -> None:
    story = _after_an_evaluation()
    story.instead("loss", torch.tensor(2.3), rank=0, step=2, micro=0)
    first = first_mismatch("losses.value", story)
    assert first is not None
    assert first.cause is Cause.CHANGED_BY_EVAL
    assert "changed the training state; all before it is right" in first.sentence


@pytest.mark.parametrize("what", ["parameters_after_eval", "buffers_after_eval"])
def test_an_evaluation_that_left_something_wrong_is_not_blamed(what: str) -> None:
    story = _after_an_evaluation()
    story.instead("loss", torch.tensor(2.3), rank=0, step=2, micro=0)
    name, value = next(iter(story.value(what, index=0).items()))
    story.instead(what, {name: value + 1}, rank=0, index=0)
    assert cause("losses.value", story) is Cause.UNEXPLAINED


def test_an_evaluation_that_is_over_for_a_step_is_not_blamed() -> None:
    story = _after_an_evaluation()
    story.phase("step 3")
    story.see("loss", torch.tensor(1.5), torch.tensor(1.2), step=3, micro=0)
    story.instead("loss", torch.tensor(2.3), rank=0, step=3, micro=0)
    assert cause("losses.value", story) is Cause.UNEXPLAINED


def test_a_loss_that_a_cause_explains_is_no_evaluations_doing() -> None:
    story = _after_an_evaluation()
    stale = story.value("stale_loss", 0, step=2, micro=0)
    story.instead("loss", stale, rank=0, step=2, micro=0)
    assert cause("losses.value", story) is Cause.STALE


@pytest.mark.parametrize(("step", "expected"), [(1, Cause.STALE), (0, Cause.UNEXPLAINED)])
def test_the_loss_of_one_units_older_weights_is_stale(step: int, expected: Cause) -> None:
    story = training()
    story.see("stale_loss_of_unit", torch.tensor(4.3), torch.tensor(4.1), **AT, unit="body")
    story.instead("loss", torch.tensor(4.1), rank=1, step=step, micro=0)
    assert cause("losses.value", story) is expected


AT = {"step": 1, "micro": 0}


def _older_in_part(*shares: float) -> Story:
    """Losses of the second step, by rank, that part of the way to those of older weights."""
    story = training()
    for rank, share in enumerate(shares):
        loss, stale = (story.value(what, rank, **AT) for what in ("loss", "stale_loss"))
        story.instead("loss", loss + share * (stale - loss), rank=rank, **AT)
    return story


@pytest.mark.parametrize("shares", [(0.3, 0.6), (0.3, 0.3), (0.3, 1.4)])
def test_losses_between_those_of_new_and_old_weights_are_like_no_defect(
    shares: tuple[float, float],
) -> None:
    # whatever makes a loss larger puts it there, since older weights make it larger as well
    assert cause("losses.value", _older_in_part(*shares)) is Cause.UNEXPLAINED


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.0, 0.0), None),
        ((0.4, 0.4), None),
        ((-0.9, -0.9), None),
        ((0.2, 0.9), Cause.STALE),
        ((1.0, 1.0), Cause.STALE),
        ((3.0, 3.0), Cause.UNEXPLAINED),
    ],
)
def test_losses_nearer_to_those_of_older_weights_are_stale(
    shares: tuple[float, float], expected: Cause | None
) -> None:
    story = _older_in_part(*shares)
    # weights of the first step have no older ones
    story.seen = [one for one in story.seen if one[0] != "stale_loss" or one[1]["step"] > 0]
    assert cause("losses.fresh", story) is expected


def test_the_first_loss_of_older_weights_is_where_they_are_found() -> None:
    story = _older_in_part(0.2, 0.9)
    story.instead("loss", story.value("stale_loss", 0, step=0, micro=0), rank=0, step=0, micro=0)
    first = first_mismatch("losses.fresh", story)
    assert first is not None
    assert (first.where["rank"], first.where["step"], first.bound) == (0, 0, 0.5)


def test_a_loss_that_is_no_number_is_not_fresh() -> None:
    story = training()
    story.instead("loss", torch.tensor(torch.nan), rank=1, step=1, micro=0)
    found = first_mismatch("losses.fresh", story)
    assert found is not None
    assert (found.where["rank"], found.where["step"]) == (1, 1)


@pytest.mark.parametrize(
    ("off", "verdict"), [(0.0, Verdict.PASS), (0.04, Verdict.PASS), (0.07, Verdict.NO_POWER)]
)
def test_where_noise_is_as_large_as_a_step_losses_tell_nothing(
    off: float, verdict: Verdict
) -> None:
    right, other = training(), training()
    for rank in (0, 1):
        for step in (0, 1):
            at = {"step": step, "micro": 0}
            loss, stale = (other.value(what, rank, **at) for what in ("loss", "stale_loss"))
            other.instead("loss", loss + off * (stale - loss), rank=rank, **at)
    evidence = right.evidence()
    oracle = dataclasses.replace(evidence.oracle, nudged=other.evidence().history)
    found = _judged_fresh(dataclasses.replace(evidence, oracle=oracle))
    assert found.verdict is verdict
    assert ("cannot be told" in found.sentence) is (verdict is Verdict.NO_POWER)


def test_weights_that_move_no_loss_tell_nothing() -> None:
    story = training()
    story.seen = [one for one in story.seen if one[0] != "stale_loss"]
    assert _judged_fresh(story.evidence()).verdict is Verdict.NO_POWER


def _judged_fresh(evidence: Evidence) -> Judgement:
    ok = Ran(verdict=RankVerdict.OK)
    return next(
        j for j in judge(evidence, ok, [CHECKS["losses.fresh"]]) if j.check == "losses.fresh"
    )


@pytest.mark.parametrize("what", ["parameters", "buffers"])
def test_losses_after_a_wrong_step_are_not_called_stale(what: str) -> None:
    story = _older_in_part(0.3, 0.6)
    name, value = next(iter(story.value(what, 1, step=0).items()))
    story.instead(what, {name: value + 1}, rank=1, step=0)
    assert cause("losses.value", story) is Cause.UNEXPLAINED


@pytest.mark.parametrize(("index", "expected"), [(1, Cause.NOT_LOADED), (2, Cause.UNEXPLAINED)])
def test_the_evaluation_after_a_load_is_not_that_of_before_it(index: int, expected: Cause) -> None:
    story = training()
    story.see("eval_loss", torch.tensor(1.3), torch.tensor(1.1), index=index)
    story.instead("eval_loss", torch.tensor(2.0), rank=0, index=index)  # as at index 0
    assert cause("losses.value", story) is expected


@pytest.mark.parametrize(("rank", "expected"), [(0, Cause.STALE), (None, Cause.ZERO)])
def test_a_first_step_that_some_ranks_do_not_see_is_stale(
    rank: int | None, expected: Cause
) -> None:
    story = training()
    before = story.value("parameters", step=-1)["bias"]
    story.instead("parameters", {"bias": before}, rank=rank, step=0)
    first = first_mismatch("parameters.first_step", story)
    assert first is not None
    assert first.cause is expected
    assert first.sentence.endswith("; right on rank 1") is (rank == 0)


def test_a_parameter_that_the_first_step_cuts_is_named() -> None:
    story = training()
    bias = story.value("parameters", step=0)["bias"]
    story.instead("parameters", {"bias": bias[:1]}, rank=1, step=0)
    assert cause("parameters.first_step", story) is Cause.WRONG_SHAPE


def test_a_gradient_where_none_is_due_that_is_the_last_steps_is_stale() -> None:
    kept = {"kept": torch.tensor([0.5, -1.0])}
    for earlier, expected in ((kept, Cause.STALE), ({}, Cause.UNEXPECTED_GRADIENT)):
        story = training(scenario="varying")
        due = {**story.value("gradients", step=0), **earlier}
        story.seen = [
            (what, at, [due, due] if (what, dict(at)) == ("gradients", {"step": 0}) else v, m)
            for what, at, v, m in story.seen
        ]
        story.instead("gradients", kept, step=1)
        first = first_mismatch("gradients.value", story)
        assert first is not None
        assert first.cause is expected
        assert first.sentence.endswith(": the one of the step before") is bool(earlier)


def test_another_parameters_gradient_is_permuted() -> None:
    story = training(spare=torch.tensor([0.25, 0.5]))
    other = {"kept": torch.tensor([0.75, -1.5])}  # of the same shape as `spare`
    story.seen = [
        (what, at, [{**value, **other} for value in v] if what == "gradients" else v, m)
        for what, at, v, m in story.seen
    ]
    story.instead("gradients", {"spare": other["kept"]}, step=0)
    assert cause("gradients.value", story) is Cause.PERMUTED


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((1, 0, 2, 3), Cause.OFF_BY_ONE_SHARD),  # of rank 0 alone
        ((2, 3, 0, 1), Cause.OTHER_RANK),  # dealt out the other way round
        ((0, 1, 0, 1), Cause.OTHER_RANK),  # rank 1 has those of rank 0
        ((3, 1, 2, 0), Cause.PERMUTED),
    ],
)
def test_rows_in_wrong_places_are_named(rows: tuple[int, ...], expected: Cause) -> None:
    story = training()
    body = story.value("gradients", step=0)["body"][list(rows)]
    story.instead("gradients", tied({"body": body}), step=0)
    assert cause("gradients.value", story) is expected


@pytest.mark.parametrize(
    ("wrong", "told", "expected"),
    [
        ([3], "rows 3..3 of 4", Cause.LAST_ROWS),
        ([1, 2], "rows 1..2 of 4", Cause.UNEXPLAINED),
        ([2, 3], "rows 2..3 of 4", Cause.UNEXPLAINED),  # a rank's shard, if anything
        ([0, 2], "", Cause.UNEXPLAINED),
    ],
)
def test_the_rows_that_alone_are_wrong_are_told(
    wrong: list[int], told: str, expected: Cause
) -> None:
    story = training()
    body = story.value("gradients", step=0)["body"].clone()
    body[wrong] = 0
    story.instead("gradients", tied({"body": body}), step=0)
    first = first_mismatch("gradients.value", story)
    assert first is not None
    assert first.cause is expected
    assert f"; shape (4, 3): {told} differ, the others are right)" in first.sentence or not told
    assert ("the others are right" in first.sentence) is bool(told)


def _parts(story: Story, name: str) -> list[list[Tensor]]:
    """Per rank, the gradients of its micro-batches."""
    at = [{"step": 0, "micro": m} for m in range(3)]
    return [[story.value("gradients_of_micro", r, **w)[name] for w in at] for r in (0, 1)]


@pytest.mark.parametrize("check", ["accumulation.big_batch", "gradients.value"])
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduced", [False, True])
def test_micro_batches_that_wait_rounded_are_named(
    check: str,
    short: torch.dtype,
    reduced: bool,  # noqa: FBT001 - a column
) -> None:
    story = training(accumulation=3)
    own = _parts(story, "bias")
    if reduced:
        own = [[(a + b) / 2 for a, b in zip(*own, strict=True)]] * 2
    waited = [((a.to(short).float() + b).to(short)).float() + c for a, b, c in own]
    story.instead("gradients", {"bias": (waited[0] + waited[1]) / 2}, step=0)
    assert cause(check, story) is Cause.DTYPE_ROUND_TRIP


def test_micro_batches_that_stay_in_their_replica_are_not_reduced() -> None:
    story = training(accumulation=3)
    own = _parts(story, "bias")
    last = (own[0][2] + own[1][2]) / 2
    for rank in (0, 1):
        value = own[rank][0] + own[rank][1] + last
        story.instead("gradients", {"bias": value}, rank=rank, step=0)
    assert cause("accumulation.big_batch", story) is Cause.UNEXPLAINED
    story.replicas = 2
    assert cause("accumulation.big_batch", story) is Cause.NOT_REDUCED

"""Norms and clipped gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conformance.causes import Cause
from conformance.checks import CHECKS, Ledger, clipping
from conformance.checks.clipping import SHORT, combined, norm_of, rounded_in_short
from conformance.checks.gradients import GRADIENTS
from tests.checks.literal import Story, cause, first_mismatch, training

AT = {"step": 1, "p": "2", "max_norm": 0.1}


def whole(story: Story) -> float:
    return float(story.value("grad_norm", **AT))


def test_norms_of_parts_that_make_up_the_whole_are_local() -> None:
    story = training()
    norm = whole(story)
    for rank, share in enumerate((0.36, 0.64)):
        story.instead("grad_norm", torch.tensor(norm * share**0.5), rank=rank, **AT)
    assert cause("clip.norm", story) is Cause.LOCAL_NORM


def test_the_norm_of_one_cut_on_dim_0_is_local() -> None:
    story = training()
    tree = story.value("gradients", step=1)
    parts = [g.chunk(2)[0] for g in tree.values() if isinstance(g, Tensor)]
    local = torch.stack([part.norm() for part in parts]).norm()
    story.instead("grad_norm", local, **AT)
    assert cause("clip.norm", story) is Cause.LOCAL_NORM


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (math.sqrt(2), Cause.COUNTED_TWICE),
        (2.0, Cause.SUMMED_NOT_AVERAGED),
        (0.5, Cause.DIVIDED_TWICE),
        (0.77, Cause.UNEXPLAINED),
    ],
)
def test_a_norm_of_the_wrong_size_is_named(factor: float, expected: Cause) -> None:
    story = training()
    story.instead("grad_norm", torch.tensor(whole(story) * factor), **AT)
    assert cause("clip.norm", story) is expected


LATER = tuple({"step": step, "p": "2", "max_norm": 1e3} for step in (2, 3))


def _with_later_norms() -> Story:
    """Two more steps whose gradients, and so their norms, are others."""
    story = training()
    before = dict(story.value("gradients", step=1))
    for at in LATER:
        step, factor = at["step"], 1.0 + 0.25 * at["step"]
        story.phase(f"step {step}")
        gradients = {n: None if g is None else g * factor for n, g in before.items()}
        story.see("gradients", gradients, step=step)
        story.see("gradients_of_rank", gradients, step=step)
        story.see("grad_norm", torch.tensor(whole(story) * factor), **at)
    return story


def _pad(story: Story, *extra: float) -> None:
    """Elements whose squares are `extra` count in the norms of the three steps."""
    for at, more in zip((AT, *LATER), extra, strict=True):
        norm = float(story.value("grad_norm", **at))
        story.instead("grad_norm", math.sqrt(norm**2 + more), **at)


def test_what_every_norm_has_too_much_of_is_padding() -> None:
    story = _with_later_norms()
    _pad(story, 3.0, 3.0, 3.0)
    assert cause("clip.norm", story) is Cause.PADDING_COUNTED


@pytest.mark.parametrize("extra", [(3.0, 3.1, 3.0), (3.0, 2.0, 4.0), (3.0, 0.0, 3.0), (-0.1,) * 3])
def test_what_norms_have_too_much_of_by_turns_is_no_padding(extra: tuple[float, ...]) -> None:
    story = _with_later_norms()
    _pad(story, *extra)
    assert cause("clip.norm", story) is Cause.UNEXPLAINED


def test_one_norm_alone_tells_of_no_padding() -> None:
    story = training()
    story.instead("grad_norm", math.sqrt(whole(story) ** 2 + 3.0), **AT)
    assert cause("clip.norm", story) is Cause.UNEXPLAINED


def test_the_norm_of_gradients_that_are_wrong_themselves_has_no_padding() -> None:
    story = _with_later_norms()
    for at in (AT, *LATER):
        tree = story.value("gradients", step=at["step"])
        story.instead("gradients", {"bias": tree["bias"] + 0.25}, step=at["step"])
        wrong = story.value("gradients", step=at["step"])
        own = norm_of({n: wrong[n] for n in ("body", "bias")}, 2.0)
        story.instead("grad_norm", own * (1 + 1e-7), **at)
    assert cause("clip.norm", story) is Cause.UNEXPLAINED


def test_a_model_that_fills_equal_parts_has_no_padding(monkeypatch) -> None:
    monkeypatch.setattr(clipping, "_pads", lambda evidence: False)
    story = _with_later_norms()
    _pad(story, 3.0, 3.0, 3.0)
    assert cause("clip.norm", story) is Cause.UNEXPLAINED


@pytest.mark.parametrize(("shards", "pads"), [(2, True), (1, False)])
def test_rows_that_ranks_do_not_divide_are_padded(shards: int, *, pads: bool) -> None:
    story = training()
    story.replicas = 2 // shards
    assert clipping._pads(story.evidence()) is pads


def test_a_tied_parameter_counted_per_name_is_counted_twice() -> None:
    story = training()
    story.instead("grad_norm", norm_of(story.value("gradients", step=1), 2.0), **AT)
    assert cause("clip.norm", story) is Cause.COUNTED_TWICE


def test_the_norm_of_unreduced_gradients_is_named() -> None:
    story = training()
    story.capabilities -= GRADIENTS
    own = story.value("gradients_of_rank", 1, step=1)
    norm = norm_of({n: own[n] for n in ("body", "bias", "head")}, 2.0)
    story.instead("grad_norm", norm, **AT)
    assert cause("clip.norm", story) is Cause.NOT_REDUCED


def test_no_norm_at_all_is_a_mismatch() -> None:
    story = training()
    story.instead("grad_norm", None, **AT)
    assert cause("clip.norm", story) is Cause.MISSING_KEY


def test_a_norm_may_be_a_plain_number() -> None:
    story = training()
    story.instead("grad_norm", whole(story), **AT)
    assert cause("clip.norm", story) is None


def test_gradients_left_as_they_were_are_not_clipped() -> None:
    story = training()
    story.instead("clipped", story.value("gradients", step=1), step=1)
    assert cause("clip.gradients", story) is Cause.NOT_CLIPPED


def test_gradients_clipped_by_a_wrong_norm_are_named() -> None:
    story = training()
    tree = story.value("clipped", step=1)
    halved = {n: g / math.sqrt(2) for n, g in tree.items() if isinstance(g, Tensor)}
    story.instead("clipped", halved, step=1)
    assert cause("clip.gradients", story) is Cause.COUNTED_TWICE


def _with_a_threshold_far_above() -> Story:
    """The second step's gradients once more, in a third step whose clipping must do nothing."""
    story = training()
    story.phase("step 2")
    gradients, norm = story.value("gradients", step=1), story.value("grad_norm", **AT)
    story.see("gradients", gradients, step=2)
    own = [story.value("gradients_of_rank", rank, step=1) for rank in (0, 1)]
    story.see("gradients_of_rank", *own, step=2)
    story.see("grad_norm", norm, step=2, p="2", max_norm=1e3)
    story.see("clipped", gradients, step=2)
    return story


def test_a_threshold_far_above_the_norm_changes_nothing() -> None:
    assert cause("clip.gradients", _with_a_threshold_far_above()) is None


def test_a_gradient_that_grows_to_the_threshold_is_scaled() -> None:
    story = _with_a_threshold_far_above()
    factor = 1e3 / whole(story)
    grown = {n: g * factor for n, g in story.value("clipped", step=2).items() if g is not None}
    story.instead("clipped", grown, step=2)
    assert cause("clip.gradients", story) is Cause.SCALED
    story.wrong.clear()
    story.instead("clipped", {"bias": grown["bias"]}, step=2)
    assert cause("clip.gradients", story) is Cause.SCALED


def test_ranks_that_clip_their_own_rows_by_their_own_norm_are_named() -> None:
    story = training()
    tree = story.value("gradients", step=1)
    parts = [[g.chunk(2)[r] for g in tree.values() if isinstance(g, Tensor)] for r in (0, 1)]
    norms = [float(torch.stack([p.norm() for p in part]).norm()) for part in parts]
    rows = zip(tree["body"].chunk(2), norms, strict=True)
    story.instead("clipped", {"body": torch.cat([r * 0.1 / n for r, n in rows])}, step=1)
    assert cause("clip.gradients", story) is Cause.LOCAL_NORM
    story.replicas = 2  # nothing is cut: such rows are nobody's
    assert cause("clip.gradients", story) is Cause.UNEXPLAINED


@pytest.mark.parametrize("check", ["clip.norm", "clip.gradients"])
def test_a_threshold_that_does_not_bite_proves_nothing(check: str) -> None:
    story = training()
    story.seen = [
        (what, {**where, "max_norm": 1e6} if what == "grad_norm" else where, values, moment)
        for what, where, values, moment in story.seen
    ]
    ledger = Ledger()
    CHECKS[check].judge(story.evidence(), ledger)  # type: ignore[misc]
    assert ledger.comparisons == 0


def test_norms_that_are_not_claimed_are_told() -> None:
    story, ledger = training(), Ledger()
    story.capabilities -= {"clip.p1"}
    CHECKS["clip.norm"].judge(story.evidence(), ledger)  # type: ignore[misc]
    assert ledger.notes == ["not claimed: clip.p1"]


@given(
    st.lists(st.integers(-50, 50), min_size=2, max_size=12),
    st.integers(1, 11),
    st.sampled_from([1.0, 2.0, math.inf]),
)
def test_the_norm_of_the_whole_follows_from_its_parts(
    numbers: list[int], cut: int, p: float
) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)
    parts = [float(part.norm(p)) for part in (values[:cut], values[cut:]) if part.numel()]
    assert combined(parts, p) == pytest.approx(float(values.norm(p)))


def _parts(story: Story) -> list[Tensor]:
    """The gradients of the second step, each once."""
    tree = story.value("gradients", step=1)
    return [tree["body"], tree["bias"]]


SUMS = {
    "rounded at the end": lambda parts, short: torch.stack([p.norm() for p in parts]).norm(),
    "of norms": lambda parts, short: torch.stack([p.norm().to(short) for p in parts]).norm(),
    "of rounded gradients": lambda parts, short: torch.stack(
        [p.to(short).norm() for p in parts]
    ).norm(),
    "one by one": lambda parts, short: sum(p.norm().to(short) ** 2 for p in parts) ** 0.5,
    "of squares": lambda parts, short: sum((p.to(short) ** 2).sum() for p in parts) ** 0.5,
}


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("sum_of", SUMS.values(), ids=SUMS.keys())
def test_a_norm_that_was_added_up_in_a_short_dtype_is_named(sum_of, short: torch.dtype) -> None:
    story = training()
    story.instead("grad_norm", float(sum_of(_parts(story), short).to(short)), **AT)
    assert cause("clip.norm", story) is Cause.DTYPE_ROUND_TRIP


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("factor", [0.77, 0.98, 1.02, math.nan, math.inf])
def test_a_norm_of_a_short_dtype_that_no_rounding_gives_is_not_named(short, factor: float) -> None:
    story = training()
    story.instead("grad_norm", float(torch.tensor(whole(story) * factor).to(short)), **AT)
    assert cause("clip.norm", story) in (Cause.UNEXPLAINED, Cause.NON_FINITE)


def test_a_norm_rounded_to_the_other_side_of_a_boundary_is_named() -> None:
    edge = 1.0 + 2.0**-8  # halfway between two numbers of bfloat16
    for got, expected in ((1.0, edge + 1e-6), (1.0 + 2.0**-7, edge - 1e-6)):
        assert rounded_in_short(got, expected, 2e-6, [])
        assert not rounded_in_short(got, expected, 1e-7, [])


@pytest.mark.parametrize("p", [1.0, math.inf])
def test_the_norm_with_another_p_is_named(p: float) -> None:
    story = training()
    tree = story.value("gradients", step=1)
    story.instead("grad_norm", norm_of({n: tree[n] for n in ("body", "bias")}, p), **AT)
    first = first_mismatch("clip.norm", story)
    assert first is not None
    assert first.cause is Cause.OTHER_NORM
    assert first.sentence.endswith(": the norm with another p")

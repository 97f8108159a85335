"""What is left when a wrapped model is dropped: the checks on runs told by hand, and the lives."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from conformance import models
from conformance.adapter import Adapter, BuildConfig, LossFn, OptimizerFactory, Wrapped
from conformance.case import Case
from conformance.causes import Cause
from conformance.scenarios.deletion import FAILED, TRAINED, lives
from conformance.scenarios.live_bytes import metering
from conformance.scenarios.run import Run
from tests.checks.literal import Story, cause, first_mismatch

NOTHING: dict[str, Any] = {"live_bytes": 0, "uncollected": 512, "objects": [], "changed": []}


def told(**what: Any) -> Story:
    """Two lives, of which the second leaves `what` on rank 1."""
    story = Story(case=Case.of("literal", "memory"))
    for life in (TRAINED, FAILED):
        story.phase(life)
        story.see("left", NOTHING, life=life)
    if what:
        story.instead("left", what, rank=1, life=FAILED)
    return story


@pytest.mark.parametrize("check", ["deletion.memory", "deletion.globals"])
def test_a_cycle_that_a_collection_ends_is_nothing_left(check: str) -> None:
    assert cause(check, told()) is None


@pytest.mark.parametrize(
    ("what", "part"),
    [({"live_bytes": 4}, "4 bytes are alive"), ({"objects": ["a module inside"]}, "a module")],
)
def test_a_byte_or_an_object_that_stays_is_not_freed(what: dict[str, Any], part: str) -> None:
    found = first_mismatch("deletion.memory", told(**what))
    assert found is not None
    assert (found.cause, found.where["rank"], found.where["life"]) == (Cause.NOT_FREED, 1, FAILED)
    assert part in found.sentence
    assert "after a forward that raised" in found.sentence
    assert cause("deletion.globals", told(**what)) is None


def test_what_the_unsharded_model_leaves_may_be_left() -> None:
    story = Story(case=Case.of("literal", "memory"))
    story.phase(TRAINED)
    story.see("left", {**NOTHING, "live_bytes": 64}, life=TRAINED)
    assert cause("deletion.memory", story) is None


def test_a_changed_global_is_named() -> None:
    found = first_mismatch("deletion.globals", told(changed=["global hooks", "grad mode"]))
    assert found is not None
    assert found.cause is Cause.NOT_RESTORED
    assert "global hooks, grad mode" in found.sentence


class Plain(Adapter):
    """No wrapper at all; remembers on itself what it has built."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        self.built = model
        model.cycle = [model]
        return Wrapped(module=model, optimizer=make_optimizer(model.parameters()))


class Keeping(Plain):
    """Keeps what a failed forward had made so far."""

    kept: ClassVar[list[Tensor]] = []

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        try:
            return super().forward(w, batch, loss_fn)
        except RuntimeError:
            self.kept.append(torch.zeros(25))
            raise


class Hooking(Plain):
    """Leaves a way to save tensors behind."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        super().backward(w, loss)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        hooks.__enter__()


class Notes:
    """Writes in memory."""

    def __init__(self) -> None:
        self.left: dict[str, dict[str, Any]] = {}

    def begin_phase(self, name: str) -> None: ...

    def end_phase(self, error: str | None = None, traceback: str = "") -> None: ...

    def write(self, what: str, value: Any, **where: Any) -> None:
        if what == "left":
            self.left[where["life"]] = value


def left(adapter: Adapter) -> dict[str, dict[str, Any]]:
    model, notes = models.case("wide"), Notes()
    run = Run(
        adapter=adapter,
        case=Case.of("wide", "memory"),
        model=model,
        writer=notes,
        batch=lambda step, micro: model.batch(0, step, micro),
        device=torch.device("cpu"),
        world=1,
        scratch=None,  # type: ignore[arg-type]
        carrier=None,  # type: ignore[arg-type]
    )
    with metering(run.device) as meter:
        gc.disable()  # only what asks for a collection shall have one
        try:
            lives(run, meter)
        finally:
            gc.enable()
    return notes.left


def test_of_a_plain_model_nothing_is_left_whatever_its_adapter_notes() -> None:
    adapter = Plain()
    found = left(adapter)
    for life in (TRAINED, FAILED):
        assert found[life].pop("uncollected") > 0  # the cycle
        assert found[life] == {"live_bytes": 0, "objects": [], "changed": []}
    assert not hasattr(adapter, "built")


def test_each_life_is_judged_by_itself() -> None:
    found = left(Keeping())
    assert [found[life]["live_bytes"] for life in (TRAINED, FAILED)] == [0, 100]
    Keeping.kept.clear()
    try:
        found = left(Hooking())
        assert found[TRAINED]["changed"] == ["saved tensor hooks"]
        assert found[FAILED]["changed"] == []
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()

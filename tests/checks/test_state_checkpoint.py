"""The checks of saved and loaded states, on runs told by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.case import Case
from conformance.causes import Cause
from conformance.models import case as model_case
from tests.checks.literal import Net, Story, cause, first_mismatch, kinds_judged

OTHER = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]
"""Buffers by rank."""


def parameters(step: int) -> dict[str, Tensor]:
    return {k: p.detach() * 0.9**step for k, p in Net().named_parameters(remove_duplicate=False)}


def optimizer(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        "body/exp_avg": torch.randn(4, 3, generator=draw),
        "body/exp_avg_sq": torch.rand(4, 3, generator=draw),
        "body/step": torch.tensor(step + 1.0),
    }


def layout(device: str = "cpu") -> dict[str, Any]:
    return {
        key: {"shape": list(value.shape), "dtype": "float32", "device": device}
        for key, value in Net().state_dict().items()
    }


def story(kind: str = "full", options: str = "default") -> Story:
    told = Story(case=Case.of("literal", "checkpoint", kind=kind, options=options))
    rank0_only = kind == "full" and options == "explicit"
    told.phase("build")
    told.see("parameters", parameters(0), step=-1)
    for step in range(2):
        told.phase(f"step {step}")
        told.see("loss", torch.tensor(3.0 - step), step=step, micro=0)
        told.see("parameters", parameters(step + 1), step=step)
        told.see("optimizer_state", optimizer(step), step=step)
        told.see("buffers", *({"mean": b} for b in OTHER), step=step)
    told.phase("save")
    if kind != "save":
        told.see("model_state_layout", layout(), {} if rank0_only else layout())
    if kind == "full":
        bare = [{**parameters(2), "mean": b} for b in OTHER]
        told.see("bare", bare[0], {} if rank0_only else bare[1])
    told.phase("load")
    loaded = [OTHER[0], OTHER[0]] if rank0_only else OTHER
    told.see("loaded_parameters", parameters(2), step=1)
    told.see("loaded_optimizer_state", optimizer(1), step=1)
    told.see("loaded_buffers", *({"mean": b} for b in loaded), step=1)
    told.phase("step 2")
    told.see("loss", torch.tensor(0.5), step=2, micro=0)
    told.see("parameters", parameters(3), step=2)
    return told


def twice() -> Story:
    """A directory, and a second one that the saved pair wrote a step later, loaded at the end."""
    told = story("save")
    told.phase("go on")
    told.see("kept_parameters", parameters(3), step=2)
    told.see("kept_optimizer_state", optimizer(2), step=2)
    told.see("kept_buffers", {"mean": OTHER[0] + 1}, step=2)
    told.phase("step 3")
    told.see("parameters", parameters(5), step=3)
    told.see("optimizer_state", optimizer(5), step=3)
    told.see("buffers", {"mean": OTHER[0] + 2}, step=3)
    told.phase("load again")
    told.see("loaded_parameters", parameters(3), step=2)
    told.see("loaded_optimizer_state", optimizer(2), step=2)
    told.see("loaded_buffers", {"mean": OTHER[0] + 1}, step=2)
    return told


CHECKS = (
    "state_dict.keys",
    "state_dict.tensors",
    "state_dict.bare_load",
    "resume.model",
    "resume.optimizer",
)


@pytest.mark.parametrize("options", ["default", "explicit"])
@pytest.mark.parametrize("check", CHECKS)
def test_a_right_checkpoint_passes(check: str, options: str) -> None:
    assert cause(check, story(options=options)) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_key_is_missing(rank: int) -> None:
    told = story()
    told.wrong[rank, "model_state_layout", "{}"] = {
        k: v for k, v in layout().items() if k != "spare"
    }
    found = first_mismatch("state_dict.keys", told)
    assert found is not None
    assert found.cause is Cause.MISSING_KEY
    assert found.where == {"rank": rank, "fqn": "spare"}


def test_a_renamed_key_is_told_by_its_new_name() -> None:
    told = story()
    told.wrong[0, "model_state_layout", "{}"] = {f"wrapped.{k}": v for k, v in layout().items()}
    found = first_mismatch("state_dict.keys", told)
    assert found is not None
    assert found.cause is Cause.UNEXPECTED_KEY
    assert found.where["fqn"] == "wrapped.bias"


def test_a_state_for_rank_0_only_may_not_come_on_rank_1() -> None:
    told = story(options="explicit")
    told.instead("model_state_layout", layout(), rank=1)
    assert cause("state_dict.tensors", told) is Cause.UNEXPECTED_KEY
    assert cause("state_dict.keys", told) is None


@pytest.mark.parametrize(("replicas", "expected"), [(1, Cause.UNEXPECTED_KEY), (2, None)])
def test_a_state_for_rank_0_only_may_come_on_the_first_rank_of_each_replica(
    replicas: int, expected: Cause | None
) -> None:
    told = story(options="explicit")
    told.replicas = replicas
    told.instead("model_state_layout", layout(), rank=1)
    assert cause("state_dict.tensors", told) is expected


@pytest.mark.parametrize(("replicas", "right"), [(1, False), (2, True)])
def test_the_first_rank_of_a_replica_may_load_its_own_buffers(
    replicas: int, *, right: bool
) -> None:
    told = story(options="explicit")
    told.replicas = replicas
    told.instead("loaded_buffers", {"mean": OTHER[1]}, rank=1, step=1)
    assert (cause("resume.model", told) is None) is right


def test_an_empty_state_on_rank_0_lacks_every_key() -> None:
    told = story(options="explicit")
    told.wrong[0, "model_state_layout", "{}"] = {}
    told.wrong[0, "bare", "{}"] = {}
    assert cause("state_dict.keys", told) is Cause.MISSING_KEY
    assert cause("state_dict.bare_load", told) is Cause.MISSING_KEY


@pytest.mark.parametrize(
    ("facet", "value", "expected"),
    [
        ("shape", [3, 4], Cause.WRONG_SHAPE),
        ("dtype", "bfloat16", Cause.WRONG_DTYPE),
        ("device", "meta", Cause.WRONG_DEVICE),
        ("device", "cpu,xpu", Cause.WRONG_DEVICE),
    ],
)
def test_an_entry_of_another_kind_is_named(facet: str, value: object, expected: Cause) -> None:
    told = story()
    told.instead("model_state_layout", {"body": {**layout()["body"], facet: value}}, rank=1)
    found = first_mismatch("state_dict.tensors", told)
    assert found is not None
    assert found.cause is expected
    assert (found.where["rank"], found.where["fqn"]) == (1, "body")


def test_an_entry_of_which_this_rank_holds_nothing_is_on_no_device() -> None:
    told = story("sharded")
    told.instead("model_state_layout", {"body": {**layout()["body"], "device": None}}, rank=1)
    assert cause("state_dict.tensors", told) is None


DEFECTS: list[tuple[Callable[[Tensor], Tensor], Cause]] = [
    (lambda t: t.roll(1, 0), Cause.OFF_BY_ONE_SHARD),
    (lambda t: t.flip(0), Cause.PERMUTED),
    (lambda t: t.bfloat16().float(), Cause.DTYPE_ROUND_TRIP),
    (lambda t: t * (1 + 2**-22), Cause.UNEXPLAINED),
    (lambda t: parameters(0)["body"] + 0.25, Cause.NOT_LOADED),
]


@pytest.mark.parametrize(("defect", "expected"), DEFECTS[:4])
def test_the_bare_module_gets_every_bit(
    defect: Callable[[Tensor], Tensor], expected: Cause
) -> None:
    told = story()
    told.instead("bare", {"body": defect(parameters(2)["body"])}, rank=0)
    found = first_mismatch("state_dict.bare_load", told)
    assert found is not None
    assert found.where["fqn"] == "body"
    assert found.cause is expected


def test_a_wrapper_that_is_wrong_itself_does_not_make_its_state_right() -> None:
    told = story()
    wrong = parameters(2)["body"] + 1.0
    told.instead("parameters", {"body": wrong}, step=1)
    told.instead("bare", {"body": wrong})
    assert cause("state_dict.bare_load", told) is not None


@pytest.mark.parametrize(("defect", "expected"), [DEFECTS[0], DEFECTS[1], DEFECTS[4]])
def test_a_parameter_that_is_not_what_was_saved_is_named(
    defect: Callable[[Tensor], Tensor], expected: Cause
) -> None:
    told = story()
    told.instead("loaded_parameters", {"body": defect(parameters(2)["body"])}, rank=1, step=1)
    assert cause("resume.model", told) is expected


def test_what_counts_is_what_the_wrapper_saved_not_the_oracle() -> None:
    told = story()
    saved = {"body": parameters(2)["body"] * 1.001}
    told.instead("parameters", saved, step=1)
    told.instead("loaded_parameters", saved, step=1)
    assert cause("resume.model", told) is None


@pytest.mark.parametrize(
    ("kind", "options", "buffers_of_rank_1", "right"),
    [
        ("full", "default", 1, True),
        ("full", "default", 0, False),
        ("full", "explicit", 0, True),
        ("full", "explicit", 1, False),
        ("sharded", "explicit", 0, False),
        ("save", "default", 0, True),
        ("save", "default", 1, True),
    ],
)
def test_buffers_come_from_a_rank_that_saved_them(
    kind: str, options: str, buffers_of_rank_1: int, *, right: bool
) -> None:
    told = story(kind, options)
    told.instead("loaded_buffers", {"mean": OTHER[buffers_of_rank_1]}, rank=1, step=1)
    assert (cause("resume.model", told) is None) is right


def test_a_buffer_that_no_state_holds_need_not_come_back() -> None:
    assert "input_scale" not in model_case("batchnorm").build().state_dict()
    told = story()
    told.instead("loaded_buffers", {"scratch": torch.ones(1)}, step=1)
    assert cause("resume.model", told) is None


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, Cause.NOT_LOADED),
        ({"body/exp_avg": optimizer(1)["body/exp_avg"]}, Cause.MISSING_KEY),
        ({**optimizer(1), "body/exp_avg": torch.zeros(4, 3)}, Cause.ZERO),
        ({**optimizer(1), "body/exp_avg": optimizer(1)["body/exp_avg_sq"]}, Cause.PERMUTED),
        ({**optimizer(1), "body/exp_avg": optimizer(1)["body/exp_avg"] + 1e-7}, Cause.UNEXPLAINED),
        ({**optimizer(1), "body/step": torch.tensor(9.0)}, None),
    ],
)
def test_a_loaded_optimizer_state_is_the_saved_one(
    state: dict[str, Tensor], expected: Cause | None
) -> None:
    told = story()
    told.wrong[1, "loaded_optimizer_state", str({"step": 1})] = state
    assert cause("resume.optimizer", told) is expected


def test_a_state_that_looks_right_but_is_not_used_shows_in_the_steps_after() -> None:
    told = story()
    told.instead("loss", torch.tensor(0.75), rank=1, step=2, micro=0)
    found = first_mismatch("resume.optimizer", told)
    assert found is not None
    assert (found.where["step"], found.where["rank"]) == (2, 1)
    told = story()
    told.instead("parameters", {"bias": parameters(2)["bias"]}, step=2)
    found = first_mismatch("resume.optimizer", told)
    assert found is not None
    assert (found.where["fqn"], found.cause) == ("bias", Cause.STALE)  # the step moved nothing


def test_a_renamed_key_is_told_with_the_one_that_is_due() -> None:
    told = story()
    entry = layout()
    told.wrong[0, "model_state_layout", "{}"] = {f"wrap.{k}": v for k, v in entry.items()}
    found = first_mismatch("state_dict.keys", told)
    assert found is not None
    assert found.sentence == ("wrap.bias in the model state of rank 0: a key too many; bias is due")
    told = story()
    loaded = {f"wrap.{k}": v for k, v in optimizer(1).items()}
    told.wrong[0, "loaded_optimizer_state", str({"step": 1})] = loaded
    found = first_mismatch("resume.optimizer", told)
    assert found is not None
    assert found.sentence == (
        "optimizer state body/exp_avg after the load, rank 0: a key is missing; wrap.body/exp_avg"
        " is there: let the adapter's bare() return a module whose names are without 'wrap.'"
    )


def test_a_step_before_the_save_is_not_the_optimizers_resume() -> None:
    told = story()
    told.instead("loss", torch.tensor(7.0), step=1, micro=0)
    assert cause("resume.optimizer", told) is None


@pytest.mark.parametrize(
    ("check", "kinds"),
    [
        ("state_dict.keys", {"full", "sharded"}),
        ("state_dict.tensors", {"full", "sharded"}),
        ("state_dict.bare_load", {"full"}),
        ("resume.model", {"full", "sharded", "local", "save"}),
        ("resume.optimizer", {"full", "sharded", "local", "save"}),
    ],
)
def test_a_check_applies_to_the_kinds_that_it_can_judge(check: str, kinds: set[str]) -> None:
    assert kinds_judged(check) == kinds


def test_the_second_directory_holds_the_second_state() -> None:
    for check in ("resume.model", "resume.optimizer"):
        assert cause(check, twice()) is None


@pytest.mark.parametrize(
    ("values", "state", "buffer", "expected"),
    [
        (parameters(2), optimizer(1), OTHER[0], Cause.STALE),  # as in the first directory
        (parameters(5), optimizer(5), OTHER[0] + 2, Cause.NOT_LOADED),
    ],
)
def test_what_else_comes_out_of_the_second_directory_is_named(
    values: dict[str, Tensor], state: dict[str, Tensor], buffer: Tensor, expected: Cause
) -> None:
    told = twice()
    told.instead("loaded_parameters", {"bias": values["bias"]}, step=2)
    assert cause("resume.model", told) is expected
    told = twice()
    told.instead("loaded_buffers", {"mean": buffer}, step=2)
    assert cause("resume.model", told) is expected
    told = twice()
    told.instead("loaded_optimizer_state", {"body/exp_avg": state["body/exp_avg"]}, step=2)
    assert cause("resume.optimizer", told) is expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((0, 1, 3, 2), Cause.OFF_BY_ONE_SHARD),  # of rank 1 alone
        ((2, 3, 0, 1), Cause.OTHER_RANK),  # dealt out the other way round
        ((2, 0, 3, 1), Cause.PERMUTED),
    ],
)
def test_loaded_rows_in_wrong_places_are_named(rows: tuple[int, ...], expected: Cause) -> None:
    told = story("sharded")
    moved = optimizer(1)["body/exp_avg"][list(rows)]
    told.instead("loaded_optimizer_state", {"body/exp_avg": moved}, step=1)
    assert cause("resume.optimizer", told) is expected
    told = story("sharded")
    moved = parameters(2)["body"][list(rows)]
    told.instead("loaded_parameters", {"body": moved, "head": moved}, step=1)
    assert cause("resume.model", told) is expected


@pytest.mark.parametrize(
    ("lost", "expected"), [("head", Cause.UNTIED), ("body", Cause.UNTIED), (None, None)]
)
def test_a_state_under_one_name_of_two_is_untied(lost: str | None, expected: Cause | None) -> None:
    told = story()
    both = {f"head{key.removeprefix('body')}": value for key, value in optimizer(1).items()}
    both |= optimizer(1)
    told.seen = [
        (what, at, [both, both] if what.endswith("optimizer_state") else v, m)
        for what, at, v, m in told.seen
    ]
    left = {k: v for k, v in both.items() if lost is None or not k.startswith(f"{lost}/")}
    told.wrong[0, "loaded_optimizer_state", str({"step": 1})] = left
    found = first_mismatch("resume.optimizer", told)
    assert (found and found.cause) is expected
    if found is not None:
        other = "body" if lost == "head" else "head"
        assert f"{lost}/exp_avg after the load, rank 0: only {other} has one" in found.sentence

"""The checks of what saved states hold and of what saving leaves, on runs told by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.case import Case
from conformance.causes import Cause
from tests.checks.literal import Net, Story, cause, first_mismatch, kinds_judged

SAVED = {"step": 1}
RATE = {"lr": 0.05, "initial_lr": 0.1, "betas": [0.9, 0.99]}


def parameters() -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in Net().named_parameters(remove_duplicate=False)}


def moments() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {
        "body/exp_avg": torch.randn(4, 3, generator=draw),
        "body/exp_avg_sq": torch.rand(4, 3, generator=draw),
        "body/step": torch.tensor(2.0),
        "bias/exp_avg": torch.randn(3, generator=draw),
        "bias/step": torch.tensor(2.0),
    }


def cut(whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The pieces of `whole` that a rank of two has: half of the rows, what has none in full."""
    found: dict[str, Tensor] = {}
    for key, value in whole.items():
        rows = -(-value.shape[0] // 2) if value.dim() else 0
        first = rank * rows
        offsets = ",".join(str(each) for each in (first, *[0] * (value.dim() - 1)))
        part = value[first : first + rows].clone() if value.dim() else value
        if part.numel():
            found[f"{key}@{offsets if value.dim() else ''}"] = part
    return found


def both(whole: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [cut(whole, rank) for rank in range(2)]


def layout() -> dict[str, Any]:
    return {key: {"shape": list(value.shape)} for key, value in moments().items()}


def story(kind: str = "sharded", options: str = "default") -> Story:
    told = Story(case=Case.of("literal", "checkpoint", kind=kind, options=options))
    alone = kind == "full" and options == "explicit"
    held = {**moments(), "head/exp_avg": moments()["body/exp_avg"]}
    told.phase("step 1")
    told.see("parameters", parameters(), step=1)
    told.see("buffers", {"mean": torch.ones(3)}, {"mean": torch.zeros(3)}, step=1)
    told.see("optimizer_state", held, step=1)
    told.see("hyperparameters", [{**RATE, "foreach": None}], step=1)
    told.phase("save")
    if kind == "sharded":
        whole = {**parameters(), "mean": torch.ones(3)}
        pieces = both(whole)
        pieces[1] = {**cut(parameters(), 1), "mean@2": torch.zeros(1)}
        told.see("model_state_pieces", *pieces)
    if kind == "local":
        told.see("model_state_elements", 10, 9)
    if kind in ("full", "sharded"):
        entire = {f"{k}@{','.join('0' * v.dim())}": v for k, v in moments().items()}
        pieces = both(moments()) if kind == "sharded" else [entire, entire]
        told.see("optim_state_layout", layout(), {} if alone else layout())
        told.see("optim_state_known", True)
        told.see("optim_state_options", [dict(RATE)], [] if alone else [dict(RATE)])
        told.see("optim_state_pieces", pieces[0], {} if alone else pieces[1])
    told.see("surroundings_changed", [], act="save")
    told.see("kept_parameters", parameters(), step=1)
    told.see("kept_buffers", {"mean": torch.ones(3)}, {"mean": torch.zeros(3)}, step=1)
    told.see("kept_optimizer_state", held, step=1)
    told.see("kept_hyperparameters", [{**RATE, "foreach": None}], step=1)
    if kind == "save":
        told.phase("go on")
        told.see("kept_loss", torch.tensor(1.5), step=2, micro=0)
        told.see("kept_parameters", {k: v * 0.9 for k, v in parameters().items()}, step=2)
    return told


ALL = (
    ("state_dict.pieces", "sharded"),
    ("state_dict.pieces", "local"),
    *(
        (f"optim_state.{what}", kind)
        for what in ("keys", "values", "options")
        for kind in ("full", "sharded")
    ),
    *(("save.unchanged", kind) for kind in ("full", "sharded", "local", "save")),
    *(("save.surroundings", kind) for kind in ("full", "sharded", "local", "save")),
)


@pytest.mark.parametrize("options", ["default", "explicit"])
@pytest.mark.parametrize(("check", "kind"), ALL)
def test_right_states_pass(check: str, kind: str, options: str) -> None:
    assert cause(check, story(kind, options)) is None


Defect = Callable[[dict[str, Tensor]], dict[str, Tensor]]
BODY, MOMENT = "body@0,0", "body/exp_avg@0,0"

PIECES: list[tuple[Defect, Cause]] = [
    (lambda p: {**p, BODY: parameters()["body"][2:]}, Cause.OTHER_RANK),
    (lambda p: {**p, BODY: parameters()["body"][1:3]}, Cause.OFF_BY_ONE_SHARD),
    (lambda p: {**p, BODY: parameters()["body"].roll(1, 0)[:2]}, Cause.OFF_BY_ONE_SHARD),
    (lambda p: {**p, BODY: p[BODY].bfloat16()}, Cause.WRONG_DTYPE),
    (lambda p: {**p, BODY: p[BODY].bfloat16().float()}, Cause.DTYPE_ROUND_TRIP),
    (lambda p: {**p, BODY: torch.zeros(2, 3)}, Cause.ZERO),
    (lambda p: {k: v for k, v in p.items() if k != BODY}, Cause.WRONG_SHAPE),
    (lambda p: {k.replace(BODY, "body@1,0"): v for k, v in p.items()}, Cause.OFF_BY_ONE_SHARD),
    (lambda p: {k.replace(BODY, "body@3,0"): v for k, v in p.items()}, Cause.WRONG_SHAPE),
    (lambda p: {**p, "body@2,0": parameters()["body"][2:]}, None),
    (lambda p: {**p, "body@1,0": parameters()["body"][1:]}, Cause.WRONG_SHAPE),
    (lambda p: {**p, "other@0": torch.ones(1)}, None),
]


@pytest.mark.parametrize(("defect", "expected"), PIECES)
def test_a_piece_is_what_stands_at_its_place(defect: Defect, expected: Cause | None) -> None:
    told = story()
    told.wrong[0, "model_state_pieces", "{}"] = defect(told.value("model_state_pieces", 0))
    found = first_mismatch("state_dict.pieces", told)
    assert (None if found is None else found.cause) is expected
    if found is not None:
        assert found.where["fqn"] == "body"


@pytest.mark.parametrize(
    ("elements", "expected"),
    [(10, Cause.WRONG_SHAPE), (8, Cause.WRONG_SHAPE), (28, Cause.COUNTED_TWICE)],
)
def test_local_states_hold_each_element_once(elements: int, expected: Cause) -> None:
    told = story("local")
    told.wrong[1, "model_state_elements", "{}"] = elements
    assert cause("state_dict.pieces", told) is expected


def test_where_every_rank_has_all_nothing_is_cut() -> None:
    told = story("local")
    told.wrong[0, "model_state_elements", "{}"] = told.wrong[1, "model_state_elements", "{}"] = 0
    assert cause("state_dict.pieces", told) is not None
    told.replicas = 2
    with pytest.raises(AssertionError, match="has compared nothing"):
        cause("state_dict.pieces", told)


MOMENTS: list[tuple[Defect, Cause]] = [
    (lambda p: {**p, MOMENT: moments()["body/exp_avg_sq"][:2]}, Cause.PERMUTED),
    (lambda p: {**p, MOMENT: moments()["body/exp_avg"][2:]}, Cause.OTHER_RANK),
    (lambda p: {**p, MOMENT: moments()["body/exp_avg"][1:3]}, Cause.OFF_BY_ONE_SHARD),
    (lambda p: {**p, MOMENT: p[MOMENT].double()}, Cause.WRONG_DTYPE),
    (lambda p: {**p, "body/step@": torch.tensor(0.0)}, Cause.WRONG_STEP_COUNT),
    (lambda p: {**p, "body/step@": torch.tensor(2.0, dtype=torch.float64)}, None),
    (lambda p: {k: v for k, v in p.items() if k != MOMENT}, Cause.WRONG_SHAPE),
]


@pytest.mark.parametrize(("defect", "expected"), MOMENTS)
def test_a_piece_of_a_moment_is_what_the_optimizer_held(
    defect: Defect, expected: Cause | None
) -> None:
    told = story()
    told.wrong[0, "optim_state_pieces", "{}"] = defect(told.value("optim_state_pieces", 0))
    assert cause("optim_state.values", told) is expected


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(
    ("change", "expected", "key"),
    [
        ({"body/step": None}, Cause.MISSING_KEY, "body/step"),
        ({"kept/exp_avg": {"shape": [2]}}, Cause.UNEXPECTED_KEY, "kept/exp_avg"),
        ({"wrap.bias/step": {"shape": []}}, Cause.UNEXPECTED_KEY, "wrap.bias/step"),
        ({"head/exp_avg": {"shape": [4, 3]}}, None, ""),  # the other name of a tied parameter
    ],
)
def test_names_of_an_optimizer_state_are_those_of_what_has_a_state(
    kind: str, change: dict[str, Any], expected: Cause | None, key: str
) -> None:
    told = story(kind)
    names = {**layout(), **change}
    told.wrong[1, "optim_state_layout", "{}"] = {k: v for k, v in names.items() if v is not None}
    found = first_mismatch("optim_state.keys", told)
    assert (None if found is None else (found.cause, found.where["fqn"])) == (
        None if expected is None else (expected, key)
    )


def test_the_second_name_of_a_tied_parameter_stands_for_the_first() -> None:
    told = story("full")
    for rank in range(2):
        names = {k.replace("body/", "head/"): v for k, v in layout().items()}
        told.wrong[rank, "optim_state_layout", "{}"] = names
    assert cause("optim_state.keys", told) is None


def test_an_optimizer_state_for_rank_0_only_may_not_come_on_rank_1() -> None:
    told = story("full", "explicit")
    told.wrong[1, "optim_state_layout", "{}"] = layout()
    found = first_mismatch("optim_state.keys", told)
    assert found is not None
    assert (found.cause, found.where["rank"]) == (Cause.UNEXPECTED_KEY, 1)


def test_an_empty_optimizer_state_lacks_every_key() -> None:
    told = story("full")
    told.wrong[0, "optim_state_layout", "{}"] = {}
    told.wrong[0, "optim_state_pieces", "{}"] = {}
    assert cause("optim_state.keys", told) is Cause.MISSING_KEY


@pytest.mark.parametrize("check", ["optim_state.keys", "optim_state.values", "optim_state.options"])
def test_a_state_in_a_form_of_its_own_is_not_looked_into(check: str) -> None:
    told = story("full")
    for rank in range(2):
        told.wrong[rank, "optim_state_known", "{}"] = False
        told.wrong[rank, "optim_state_layout", "{}"] = {}
        told.wrong[rank, "optim_state_pieces", "{}"] = {}
        told.wrong[rank, "optim_state_options", "{}"] = []
    assert cause(check, told) is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], Cause.MISSING_KEY),
        ([{**RATE, "lr": 0.1}], Cause.WRONG_HYPERPARAMETER),
        ([{k: v for k, v in RATE.items() if k != "initial_lr"}], Cause.WRONG_HYPERPARAMETER),
        ([{**RATE, "foreach": True}], None),
        ([RATE, RATE], None),
        ([RATE, {**RATE, "lr": 1.0}], Cause.WRONG_HYPERPARAMETER),
    ],
)
def test_options_of_the_groups_are_saved(groups: list[Any], expected: Cause | None) -> None:
    told = story()
    told.wrong[1, "optim_state_options", "{}"] = groups
    assert cause("optim_state.options", told) is expected
    told = story("local")
    told.wrong[1, "kept_hyperparameters", str(SAVED)] = groups
    assert cause("save.unchanged", told) is expected


KEPT: list[tuple[str, dict[str, Tensor], Cause | None]] = [
    ("parameters", {"bias": parameters()["bias"].bfloat16().float()}, Cause.DTYPE_ROUND_TRIP),
    ("parameters", {"bias": parameters()["bias"].double()}, Cause.WRONG_DTYPE),
    ("parameters", {"bias": torch.zeros(3)}, Cause.ZERO),
    ("buffers", {"mean": torch.full((3,), 0.5)}, Cause.UNEXPLAINED),
    ("optimizer_state", {"body/step": torch.tensor(3.0)}, Cause.WRONG_STEP_COUNT),
    ("optimizer_state", {"body/exp_avg": moments()["body/exp_avg"] * 2}, Cause.SCALED),
    ("optimizer_state", {"kept/exp_avg": torch.zeros(2)}, Cause.UNEXPECTED_KEY),
]


@pytest.mark.parametrize("kind", ["full", "save"])
@pytest.mark.parametrize(("what", "change", "expected"), KEPT)
def test_saving_changes_nothing(
    kind: str, what: str, change: dict[str, Tensor], expected: Cause
) -> None:
    told = story(kind)
    told.instead(f"kept_{what}", change, rank=1, step=1)
    found = first_mismatch("save.unchanged", told)
    assert found is not None
    assert (found.cause, found.where["rank"]) == (expected, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_save_leaves_changed_around_it_is_told(rank: int) -> None:
    told = story("full")
    changed = [f"training mode of layer{i}" for i in range(5)]
    told.instead("surroundings_changed", changed, rank=rank, act="save")
    found = first_mismatch("save.surroundings", told)
    assert found is not None
    assert (found.cause, found.where["rank"]) == (Cause.NOT_RESTORED, rank)
    assert found.sentence == (
        f"after the save, rank {rank} has other values of training mode of layer0, training mode"
        " of layer1, training mode of layer2 and 2 more"
    )


def test_a_key_that_saving_lost_is_missing() -> None:
    told = story("full")
    left = {k: v for k, v in told.value("kept_optimizer_state", **SAVED).items() if "bias" not in k}
    told.wrong[0, "kept_optimizer_state", str(SAVED)] = left
    assert cause("save.unchanged", told) is Cause.MISSING_KEY


def test_training_goes_on_after_a_directory_was_written() -> None:
    told = story("save")
    told.instead("kept_loss", torch.tensor(1.75), rank=0, step=2, micro=0)
    found = first_mismatch("save.unchanged", told)
    assert found is not None
    assert found.sentence.startswith("loss after the save")
    told = story("save")
    told.instead("kept_parameters", {"bias": parameters()["bias"]}, rank=1, step=2)
    found = first_mismatch("save.unchanged", told)
    assert found is not None
    assert (found.where["fqn"], found.where["step"]) == ("bias", 2)


def test_what_counts_is_what_the_wrapper_held_not_the_oracle() -> None:
    told = story("full")
    held = told.value("optimizer_state", **SAVED)
    other = {k: v * 2 if v.dim() else v for k, v in held.items()}
    for name in ("optimizer_state", "kept_optimizer_state"):
        told.instead(name, other, step=1)
    pieces = told.value("optim_state_pieces", 0)
    twice = {k: v * 2 if v.dim() else v for k, v in pieces.items()}
    for rank in range(2):
        told.wrong[rank, "optim_state_pieces", "{}"] = twice
    assert cause("optim_state.values", told) is None
    assert cause("save.unchanged", told) is None


@pytest.mark.parametrize(
    ("check", "kinds"),
    [
        ("state_dict.pieces", {"sharded", "local"}),
        ("optim_state.keys", {"full", "sharded"}),
        ("optim_state.values", {"full", "sharded"}),
        ("optim_state.options", {"full", "sharded"}),
        ("save.unchanged", {"full", "sharded", "local", "save"}),
    ],
)
def test_a_check_applies_to_the_kinds_that_it_can_judge(check: str, kinds: set[str]) -> None:
    assert kinds_judged(check) == kinds

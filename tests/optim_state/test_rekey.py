"""Names become an optimizer's own keys, and names and numbers each other: no ranks are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp.optim_state.rekey import keys_by_name, rekey_groups, rekey_optim_state_dict
from fsdp.optim_state.vocabulary import OptimStateKeyType

NAME, NUMBER = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def group(*params: Any, lr: float = 0.1, **others: Any) -> dict[str, Any]:
    return {"params": list(params), "lr": lr, **others}


def test_groups_come_in_the_order_of_the_optimizer() -> None:
    keys = {"a": 0, "b": 1, "c": 2}
    saved = [group("c", lr=0.3), group("b", "a", lr=0.1)]
    assert rekey_groups(saved, keys, [[0, 1], [2]]) == [group(0, 1, lr=0.1), group(2, lr=0.3)]


def test_names_inside_a_flat_parameter_are_one_key() -> None:
    assert rekey_groups([group("a", "b")], {"a": 0, "b": 0}, [[0]]) == [group(0)]


def test_what_stands_beside_the_parameters_is_copied_but_for_their_names() -> None:
    saved = [group("a", param_names=["a"], betas=[0.9, 0.5])]
    found = rekey_groups(saved, {"a": 0}, [[0]])
    assert found == [group(0, betas=[0.9, 0.5])]
    found[0]["betas"][0] = 0.0
    assert saved[0]["betas"] == [0.9, 0.5]


def test_a_name_that_the_optimizer_lacks_is_told() -> None:
    with pytest.raises(KeyError, match=r"Can't find b from \['a'\]"):
        rekey_groups([group("a", "b")], {"a": 0}, [[0]])


@pytest.mark.parametrize(
    ("wanted", "have"),
    [([[0, 1], [2, 3]], [["a", "c"], ["b", "d"]]), ([[0], [1]], [["a"], ["a"]])],
    ids=["mixed", "one of them twice"],
)
def test_groups_of_the_same_sizes_that_hold_others_are_refused(
    wanted: list[list[int]], have: list[list[str]]
) -> None:
    keys = {"a": 0, "b": 1, "c": 2, "d": 3}
    with pytest.raises(ValueError, match="it goes by positions, and would mix them up"):
        rekey_groups([group(*names) for names in have], keys, wanted)


@pytest.mark.parametrize(
    ("have", "wanted"),
    [
        ([["a"], ["b"]], [[1]]),
        ([["a"]], [[0], [1]]),
        ([["b"], ["a"]], [[0, 1]]),
        ([["b", "a"], ["c"]], [[0], [1, 2]]),
        ([["c"], ["a"], ["b"]], [[0], [1], [3, 2]]),
    ],
    ids=["one more", "one fewer", "in one", "of other sizes", "the last one is larger"],
)
def test_groups_of_other_sizes_are_left_to_the_optimizer(
    have: list[list[str]], wanted: list[list[int]]
) -> None:
    keys = {"a": 0, "b": 1, "c": 2, "d": 3}
    found = rekey_groups([group(*names) for names in have], keys, wanted)
    assert found == [group(*sorted(keys[name] for name in names)) for names in have]


def trained() -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter], dict[str, Any]]:
    """A model whose optimizer has two groups in an order of its own, and a parameter at rest."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    params = [model[1].weight, model[1].bias, model[0].bias]
    optimizer = torch.optim.SGD(
        [{"params": params[:2], "lr": 0.5}, {"params": params[2:]}], lr=0.25, momentum=0.5
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = ["1.weight", "1.bias", "0.bias"]
    by_number = optimizer.state_dict()
    by_name = {
        "state": {names[number]: entry for number, entry in by_number["state"].items()},
        "param_groups": [
            {**by_number["param_groups"][0], "params": ["1.bias", "1.weight"]},
            {**by_number["param_groups"][1], "params": ["0.bias"]},
        ],
    }
    return model, optimizer, params, by_name


def test_numbers_become_names_and_names_numbers() -> None:
    model, optimizer, params, by_name = trained()
    by_number = optimizer.state_dict()
    assert rekey_optim_state_dict(by_number, NAME, model, params) == by_name
    assert rekey_optim_state_dict(by_name, NUMBER, model, params) == by_number


def test_what_is_keyed_as_wanted_is_given_back_itself() -> None:
    model, optimizer, params, by_name = trained()
    by_number = optimizer.state_dict()
    assert rekey_optim_state_dict(by_number, NUMBER, model, params) is by_number
    assert rekey_optim_state_dict(by_name, NAME, model, params) is by_name
    fresh = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    assert rekey_optim_state_dict(fresh, NAME, model, params) is fresh


def test_a_rekeyed_state_shares_no_group_with_the_given_one() -> None:
    model, optimizer, params, _ = trained()
    given = optimizer.state_dict()
    rekey_optim_state_dict(given, NAME, model, params)["param_groups"][0]["lr"] = 7.0
    assert given == optimizer.state_dict()


@pytest.mark.parametrize(
    "keys", [("1.weight", 0), (0, "1.weight"), ((1,),), (1.0,)], ids=["both", "both too", "t", "f"]
)
def test_keys_of_both_kinds_or_of_neither_are_refused(keys: tuple[Any, ...]) -> None:
    model, _, params, _ = trained()
    state = {"state": {key: {} for key in keys}, "param_groups": []}
    for kind in (NAME, NUMBER):
        with pytest.raises(ValueError, match="Invalid parameter keys"):
            rekey_optim_state_dict(state, kind, model, params)


def test_another_kind_is_refused() -> None:
    model, optimizer, params, _ = trained()
    with pytest.raises(AssertionError, match="to be PARAM_NAME or PARAM_ID, got name"):
        rekey_optim_state_dict(optimizer.state_dict(), "name", model, params)  # type: ignore[arg-type]


def test_a_parameter_with_two_names_is_refused() -> None:
    model, optimizer, params, _ = trained()
    model.other = model[1]
    with pytest.raises(RuntimeError, match=r"one parameter name but got \['1.weight', 'other"):
        rekey_optim_state_dict(optimizer.state_dict(), NAME, model, params)


def test_the_names_inside_a_parameter_that_the_optimizer_holds_have_its_key() -> None:
    class Key:
        def __init__(self, *names: str) -> None:
            self.unflat_param_names = names

    class Names:
        def __init__(self, keys: dict[nn.Parameter, Key]) -> None:
            self.keys = keys

    flat, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    names = Names({flat: Key("a", "b"), other: Key("c")})
    assert keys_by_name(names, {flat: 4}) == {"a": 4, "b": 4}  # type: ignore[arg-type]

"""From names to an optimizer's own keys, and between names and numbers for plain models.

Knows no shards and no collectives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fsdp.optim_state.names import Names, ParamKey
from fsdp.optim_state.vocabulary import OptimStateKeyType
from fsdp.plain_names import clean


def rekey_groups(
    groups: Sequence[Mapping[str, Any]],
    keys: Mapping[str, ParamKey],
    wanted: Sequence[Sequence[ParamKey]],
) -> list[dict[str, Any]]:
    """Return saved parameter groups with an optimizer's keys, in the order of its groups.

    Args:
        groups: "params" are names.
        keys: name -> key; the names inside a flat parameter have one key.
        wanted: the keys in each group of the optimizer.

    Raises:
        KeyError: a name that the optimizer does not have.
        ValueError: the optimizer would put hyperparameters and states on other parameters, since
            it goes by positions.
    """
    found = []
    for group in groups:
        others = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        missing = [name for name in group["params"] if name not in keys]
        if missing:
            raise KeyError(
                f"Can't find {missing[0]} from {sorted(keys)}: the saved parameter groups name it, "
                "and the optimizer does not hold it."
            )
        params = sorted({keys[name] for name in group["params"]})
        found.append({**copy.deepcopy(others), "params": params})
    order = _order([group["params"] for group in found], wanted)
    return [found[index] for index in order]


def _order(have: list[list[ParamKey]], wanted: Sequence[Sequence[ParamKey]]) -> list[int]:
    """Return which saved group belongs to each group of the optimizer."""
    left = list(range(len(have)))
    order = []
    for group in wanted:
        index = next((i for i in left if set(have[i]) == set(group)), None)
        if index is None:
            break
        left.remove(index)
        order.append(index)
    if len(order) == len(wanted) and not left:
        return order
    if [len(group) for group in have] == [len(group) for group in wanted]:
        raise ValueError(
            f"the saved parameter groups hold {have} in the optimizer's keys, and the optimizer "
            f"has {[list(group) for group in wanted]}: it goes by positions, and would mix them "
            "up. Make it with the groups of the one that was saved."
        )
    return list(range(len(have)))  # the optimizer says itself what does not fit


def rekey_optim_state_dict(
    state: dict[str, Any],
    kind: OptimStateKeyType,
    model: nn.Module,
    params: Sequence[nn.Parameter],
) -> dict[str, Any]:
    """Return the state of a plain model's optimizer keyed by ``kind``; itself, if it is already.

    Args:
        state: keyed by names or by numbers.
        kind: what is wanted.
        model: without any wrapper.
        params: of the optimizer, in its order.

    Raises:
        AssertionError: another ``kind``.
        ValueError: keys of both kinds, or of neither.
        RuntimeError: a parameter with several names.
    """
    if not isinstance(kind, OptimStateKeyType):
        raise AssertionError(
            f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {kind}"
        )
    kinds = {type(key) for key in state["state"]}
    if len(kinds) > 1 or kinds - {int, str}:
        raise ValueError(f"Invalid parameter keys: {list(state['state'])}")
    if kinds <= {str if kind is OptimStateKeyType.PARAM_NAME else int}:
        return state
    names = _one_name_each(model)
    table: dict[ParamKey, ParamKey] = {i: names[param] for i, param in enumerate(params)}
    if kind is OptimStateKeyType.PARAM_ID:
        table = {name: number for number, name in table.items()}
    groups = copy.deepcopy(state["param_groups"])
    for group in groups:
        group["params"] = sorted(table[key] for key in group["params"])
    return {
        "state": {table[key]: entry for key, entry in state["state"].items()},
        "param_groups": groups,
    }


def _one_name_each(model: nn.Module) -> dict[nn.Parameter, str]:
    found: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(param, []).append(clean(name))
    for names in found.values():
        if len(names) > 1:
            raise RuntimeError(
                f"Each parameter should only map to one parameter name but got {names}"
            )
    return {param: names[0] for param, names in found.items()}


def keys_by_name(names: Names, keys: Mapping[nn.Parameter, ParamKey]) -> dict[str, ParamKey]:
    """Return name -> key of the parameters that an optimizer holds."""
    return {
        name: keys[param]
        for param, key in names.keys.items()
        if param in keys
        for name in key.unflat_param_names
    }

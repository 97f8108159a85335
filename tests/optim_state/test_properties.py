"""Laws of optimizer states over drawn models, wrappings, worlds and optimizers.

States are drawn too, not trained: what is loaded must come back to the last bit, whatever holds it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from conformance.ranks import RankContext
from fsdp import OptimStateKeyType
from fsdp.wrap import CustomPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.draws import draws
from tests.fsdp.ranks import on_ranks
from tests.optim_state.running import FULL, SHARDED, assert_equal, form, quiet

MOMENTS = ("exp_avg", "exp_avg_sq")
# By name: the kind, its options, its states with one element for each of the parameter.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "adagrad": ("Adagrad", {}, ("sum",)),
    "adam": ("Adam", {}, MOMENTS),
    "adam_amsgrad": ("Adam", {"amsgrad": True}, (*MOMENTS, "max_exp_avg_sq")),
    "adamw": ("AdamW", {}, MOMENTS),
    "adamw_foreach": ("AdamW", {"foreach": True}, MOMENTS),
    "adamw_fused": ("AdamW", {"fused": True, "amsgrad": True}, (*MOMENTS, "max_exp_avg_sq")),
    "nadam": ("NAdam", {}, MOMENTS),
    "rmsprop": ("RMSprop", {}, ("square_avg",)),
    "rmsprop_centered": (
        "RMSprop",
        {"momentum": 0.9, "centered": True},
        ("square_avg", "momentum_buffer", "grad_avg"),
    ),
    "sgd": ("SGD", {"momentum": 0.9}, ("momentum_buffer",)),
}


@dataclass(frozen=True)
class Case:
    """One drawn configuration; ``own`` says which layers are units, before and after."""

    widths: tuple[int, ...]
    own: tuple[tuple[bool, ...], tuple[bool, ...]]
    original: tuple[bool, bool]
    optimizer: str
    groups: int
    dtype: torch.dtype
    without: int  # a layer whose unit has no state; none, if there is no such layer
    frozen: tuple[bool, ...]  # by layer; the optimizer does not hold these
    world: int


def _cases() -> st.SearchStrategy[Case]:
    flags = st.tuples(*[st.booleans()] * 4)
    return st.builds(
        Case,
        widths=st.tuples(*[st.integers(1, 7)] * 5),
        own=st.tuples(flags, flags),
        original=st.tuples(st.booleans(), st.booleans()),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        groups=st.integers(1, 3),
        dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        without=st.integers(0, 9),
        frozen=flags.filter(lambda frozen: not all(frozen)),  # no optimizer holds nothing
        world=st.integers(1, 3),
    )


def _layers(case: Case) -> nn.Sequential:
    pairs = itertools.pairwise(case.widths)
    layers = nn.Sequential(*(nn.Linear(i, o) for i, o in pairs)).to(case.dtype)
    for layer, frozen in zip(layers, case.frozen, strict=True):
        layer.requires_grad_(not frozen)
    return layers


def _wrapped(case: Case, side: int) -> FSDP:
    layers = _layers(case)
    chosen = {layer for layer, own in zip(layers, case.own[side], strict=True) if own}
    # A layer without state has a unit of its own: of flat-mates all have state, or none.
    chosen |= {layer for number, layer in enumerate(layers) if number == case.without}
    if not case.original[side]:  # one flat parameter is trained or is not
        chosen |= {layer for layer, frozen in zip(layers, case.frozen, strict=True) if frozen}
    with quiet():
        return FSDP(
            layers,
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
            use_orig_params=case.original[side],
        )


def _optimizer(case: Case, model: nn.Module, groups: int) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    parts = [{"params": params[i::groups], "lr": 0.1 * (i + 1)} for i in range(groups)]
    kind, options, _ = OPTIMIZERS[case.optimizer]
    held = [part for part in parts if part["params"]]
    found: torch.optim.Optimizer = getattr(torch.optim, kind)(held, lr=0.1, **options)
    return found


def _drawn(case: Case) -> dict[str, Any]:
    """A state of the plain model, the same on every rank."""
    generator = torch.Generator().manual_seed(len(case.widths))
    found: dict[str, Any] = {}
    for name, param in _layers(case).named_parameters():
        if int(name.split(".")[0]) == case.without or not param.requires_grad:
            continue
        found[name] = {
            state: torch.randn(param.shape, generator=generator).to(param.dtype)
            for state in OPTIMIZERS[case.optimizer][2]
        }
        if case.optimizer != "sgd":
            found[name]["step"] = torch.tensor(3.0)
        if case.optimizer == "nadam":  # loaded in the parameter's dtype, by any optimizer
            found[name]["mu_product"] = torch.tensor(0.5, dtype=param.dtype)
    return found


def _laws(context: RankContext, case: Case) -> None:
    wanted = _drawn(case)
    first = _wrapped(case, 0)
    one = _optimizer(case, first, case.groups)
    FSDP.optim_state_dict_to_load(first, one, {"state": wanted}, load_directly=True)
    full = FSDP.optim_state_dict(first, one)
    assert_equal(full["state"], wanted)  # flattened, cut, gathered, unflattened
    again = _optimizer(case, first, case.groups)
    FSDP.optim_state_dict_to_load(first, again, full, load_directly=True)
    twice = FSDP.optim_state_dict(first, again)
    assert_equal(twice["state"], wanted)
    assert twice["param_groups"] == full["param_groups"]
    with form(first, SHARDED):
        chunks = FSDP.optim_state_dict(first, one)
    second = _wrapped(case, 1)
    for kind, state in ((FULL, full), (SHARDED, chunks)):
        other = _optimizer(case, second, 1)
        with form(second, kind):
            FSDP.optim_state_dict_to_load(
                second, other, {"state": state["state"]}, load_directly=True
            )
        assert_equal(FSDP.optim_state_dict(second, other)["state"], wanted)


QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@given(_cases())
@QUICK
def test_what_is_loaded_is_saved_again_in_any_form_wrapping_and_world(case: Case) -> None:
    on_ranks(_laws, case.world, case=case)


@pytest.mark.long
@pytest.mark.property
@given(_cases())
@settings(QUICK, max_examples=draws())
def test_what_is_loaded_is_saved_again_in_many_draws(case: Case) -> None:
    on_ranks(_laws, case.world, case=case)


def _rekeyed(widths: list[int], order: int) -> None:
    model = nn.Sequential(*(nn.Linear(i, o) for i, o in itertools.pairwise(widths)))
    names = [name for name, _ in model.named_parameters()]
    params = dict(model.named_parameters())
    turned = names[order % len(names) :] + names[: order % len(names)]
    optimizer = torch.optim.Adam([params[name] for name in turned])
    state = {
        "state": {name: {"step": torch.tensor(float(i))} for i, name in enumerate(names)},
        "param_groups": [{"lr": 0.1, "params": sorted(names)}],
    }
    numbers = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    assert list(numbers["state"]) == [turned.index(name) for name in names]  # in its order
    assert numbers["param_groups"][0]["params"] == list(range(len(names)))
    back = FSDP.rekey_optim_state_dict(
        numbers, OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )
    assert back == state


WIDTHS = st.lists(st.integers(1, 3), min_size=2, max_size=12)


@given(WIDTHS, st.integers(0, 30))
@QUICK
def test_names_to_numbers_to_names_is_nothing(widths: list[int], order: int) -> None:
    _rekeyed(widths, order)


@pytest.mark.long
@pytest.mark.property
@given(WIDTHS, st.integers(0, 30))
@settings(QUICK, max_examples=draws())
def test_names_to_numbers_to_names_is_nothing_in_many_draws(widths: list[int], order: int) -> None:
    _rekeyed(widths, order)

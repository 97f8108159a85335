"""Laws of states over drawn models, divisions into units, worlds, dtypes, frozen parameters and
buffers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from tests.draws import draws
from tests.fsdp.ranks import on_ranks
from tests.state_dict import cells

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@st.composite
def examples(draw: st.DrawFn) -> dict[str, Any]:
    """A chain of layers, and how it is wrapped; plain values, as jobs take them."""
    layers = draw(st.integers(1, 4))
    flags = st.lists(st.booleans(), min_size=layers, max_size=layers)
    return {
        "dims": draw(st.lists(st.integers(1, 9), min_size=layers + 1, max_size=layers + 1)),
        "biases": draw(flags),
        "units": draw(flags),
        "frozen": draw(flags),
        "turned": draw(flags),
        "buffers": draw(flags),
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "strategy": draw(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])),
        "original": draw(st.booleans()),
        "mesh": draw(st.booleans()),
        "world": draw(st.integers(1, 3)),
    }


@st.composite
def hybrids(draw: st.DrawFn) -> dict[str, Any]:
    """The same, sharded over one dim of a mesh and replicated over the other."""
    sizes = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 3)]))
    return {
        **draw(examples()),
        "strategy": draw(st.sampled_from(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])),
        "mesh": sizes,
        "world": math.prod(sizes),
    }


def _plain(example: dict[str, Any], *, seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    pairs = zip(example["dims"], example["dims"][1:], example["biases"], strict=False)
    model = nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b, bias in pairs))
    for layer, turned in zip(model, example["turned"], strict=True):
        if turned:  # its rows lie apart in memory
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    for layer, buffered in zip(model, example["buffers"], strict=True):
        if buffered:
            layer.register_buffer("scale", torch.randn(3))
            layer.register_buffer("count", torch.tensor(7))
            layer.register_buffer("unsaved", torch.randn(2), persistent=False)
    return model.to(DTYPES[example["dtype"]])


def _wrapped(example: dict[str, Any]) -> FSDP:
    model = _plain(example)
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[example["strategy"]],
        "use_orig_params": example["original"],
    }
    if isinstance(example["mesh"], tuple):
        names = ("replicate", "shard")
        options["device_mesh"] = init_device_mesh("cpu", example["mesh"], mesh_dim_names=names)
    elif example["mesh"]:
        options["device_mesh"] = cells.mesh_of(example["world"])
    for number, frozen in enumerate(example["frozen"]):
        # A flat parameter is frozen as a whole: only where a layer is a unit.
        model[number].requires_grad_(
            not (frozen and (example["original"] or example["units"][number]))
        )
    for number, unit in enumerate(example["units"]):
        if unit:
            model[number] = cells.wrap(model[number], nested=False, **options)
    return cells.wrap(model, nested=False, **options)


def _comes_back(context: RankContext, example: dict[str, Any], kind: str) -> None:
    model = _wrapped(example)
    wanted = _plain(example).state_dict()
    form = cells.KINDS[kind]
    state = cells.saved(model, form)
    if kind != "local":
        cells.same(cells.put_together(state), wanted)
    else:
        state = cells.through_a_file(state)
    before = {name: value.clone() for name, value in cells.locals_of(state).items()}
    for name, _ in _plain(example).named_buffers():
        if name in state:  # a state shows a module's buffers themselves
            state[name] = state[name].clone()
    cells.spoil(model)
    cells.load(model, form, state)
    cells.same(cells.locals_of(cells.saved(model, form)), before)
    cells.same(cells.saved(model, cells.FULL), wanted)


def _run(example: dict[str, Any], kind: str) -> None:
    if kind == "local" and example["mesh"]:
        example = {**example, "mesh": False}
    on_ranks(_comes_back, example["world"], example=example, kind=kind)


@QUICK
@given(examples())
def test_full_of_load_of_full_is_full(example: dict[str, Any]) -> None:
    _run(example, "full")


@QUICK
@given(examples())
def test_sharded_of_load_of_sharded_is_sharded_and_gathers_to_full(example: dict[str, Any]) -> None:
    _run(example, "sharded")


@QUICK
@given(examples())
def test_local_of_load_of_local_is_local(example: dict[str, Any]) -> None:
    _run(example, "local")


def _full(context: RankContext, example: dict[str, Any]) -> list[Any]:
    state = cells.saved(_wrapped(example), cells.FULL)
    return [[name, value.double().tolist()] for name, value in state.items()]


@pytest.mark.property
@settings(QUICK, max_examples=draws(25))
@given(examples(), examples())
def test_full_is_the_same_however_a_model_is_wrapped(
    example: dict[str, Any], other: dict[str, Any]
) -> None:
    model = {name: example[name] for name in ("dims", "biases", "dtype", "buffers")}
    layers = len(example["units"])
    flags = ("units", "frozen", "turned")
    other = {**other, **model, **{name: (other[name] * 4)[:layers] for name in flags}}
    other["turned"] = example["turned"]
    wanted = [[n, v.double().tolist()] for n, v in _plain(example).state_dict().items()]
    for each in (example, other):
        assert on_ranks(_full, each["world"], example=each) == (wanted,) * each["world"]


def _trained(context: RankContext, example: dict[str, Any], kinds: list[str]) -> list[Any]:
    model = _wrapped(example)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hooks = [_hooks_of(unit) for unit in model.modules()]

    def save() -> None:
        for kind in kinds:
            cells.saved(model, cells.KINDS[kind])

    for number in range(2):
        torch.manual_seed(10 * number + context.rank)
        x = torch.randn(3, example["dims"][0]).to(DTYPES[example["dtype"]])
        save()
        loss = model(x).pow(2).sum()
        save()
        if loss.requires_grad:
            loss.backward()
        save()
        optimizer.step()
    assert not kinds or hooks == [_hooks_of(unit) for unit in model.modules()]
    return [[n, v.double().tolist()] for n, v in cells.saved(model, cells.FULL).items()]


def _hooks_of(module: nn.Module) -> list[int]:
    return [
        len(getattr(module, name))
        for name in ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    ]


def _unchanged(example: dict[str, Any]) -> None:
    kinds = ["full", "sharded"] if example["mesh"] else ["full", "sharded", "local"]
    world = example["world"]
    wanted = on_ranks(_trained, world, example=example, kinds=[])
    assert on_ranks(_trained, world, example=example, kinds=kinds) == wanted


@QUICK
@given(examples())
def test_saving_changes_nothing_of_what_follows(example: dict[str, Any]) -> None:
    _unchanged(example)


LONG = settings(QUICK, max_examples=draws())


@pytest.mark.long
@pytest.mark.property
@LONG
@given(examples(), st.sampled_from(list(cells.KINDS)))
def test_every_form_comes_back_in_many_more_cases(example: dict[str, Any], kind: str) -> None:
    _run(example, kind)


@pytest.mark.long
@pytest.mark.property
@settings(QUICK, max_examples=draws(25))  # each on ranks of its own
@given(hybrids(), st.sampled_from(["full", "sharded"]))
def test_states_of_replicas_of_shards_come_back(example: dict[str, Any], kind: str) -> None:
    _run(example, kind)


@pytest.mark.long
@pytest.mark.property
@LONG
@given(examples())
def test_saving_changes_nothing_in_many_more_cases(example: dict[str, Any]) -> None:
    _unchanged(example)

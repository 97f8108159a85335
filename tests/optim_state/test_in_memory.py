"""``get_state_dict`` and ``set_state_dict`` serve wrapped models as they serve any other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp
from conformance.ranks import RankContext
from fsdp import checkpoint
from fsdp.checkpoint import StateDictOptions
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import build
from tests.fsdp.ranks import error_of, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import (
    assert_equal,
    by_name,
    optimizer_for,
    params_of,
    plain_step,
    step,
    two_groups,
    wrapped,
)

OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "offloaded": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "flat_form": {"flatten_optimizer_state_dict": True},
    "first": {"full_state_dict": True, "cpu_offload": True},
    "first_flat_form": {
        "full_state_dict": True,
        "cpu_offload": True,
        "flatten_optimizer_state_dict": True,
    },
}


def _trained(context: RankContext, **given: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(**given)
    optimizer = optimizer_for(model, "adam", two_groups)
    for number in range(2):
        step(model, optimizer, number, context.rank)
    return model, optimizer


def _round_trip(context: RankContext, case: str, *, original: bool) -> None:
    options = StateDictOptions(**OPTIONS[case])
    model, optimizer = _trained(context, use_orig_params=original)
    state, optim = fsdp.get_state_dict(model, optimizer, options=options)
    alone = options.full_state_dict and options.cpu_offload
    assert bool(state) == (context.rank == 0 or not alone)
    assert bool(optim) == bool(state)
    if alone:  # the first rank alone has it, and the model's is wanted everywhere
        box = [state]
        dist.broadcast_object_list(box, src=0)
        state = box[0]
    other = wrapped(use_orig_params=original)
    fresh = optimizer_for(other, "adam", two_groups, lr=0.9)
    keys = fsdp.set_state_dict(
        other, fresh, model_state_dict=state, optim_state_dict=optim, options=options
    )
    assert not keys.missing_keys
    assert not keys.unexpected_keys
    assert_equal(
        FSDP.optim_state_dict(other, fresh)["state"],
        FSDP.optim_state_dict(model, optimizer)["state"],
    )
    step(model, optimizer, 5, context.rank)
    step(other, fresh, 5, context.rank)
    mine, theirs = params_of(model), params_of(other)
    assert all(torch.equal(theirs[key], value) for key, value in mine.items())


@ORIGINAL
@pytest.mark.parametrize("case", OPTIONS)
def test_states_go_round_in_every_form(case: str, *, original: bool) -> None:
    on_ranks(_round_trip, 2, case=case, original=original)


def _of_plain(context: RankContext, *, original: bool) -> None:
    """A full state is that of the plain model, and one of a plain model loads by broadcast."""
    model, plain = wrapped(use_orig_params=original), build()
    mine, theirs = optimizer_for(model, "adam"), optimizer_for(plain, "adam")
    for number in range(2):
        plain_step(plain, theirs, number, context.world_size)
    first = context.rank == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    fsdp.set_state_dict(
        model,
        mine,
        model_state_dict=plain.state_dict() if first else {},
        optim_state_dict=by_name(plain, theirs) if first else {},
        options=options,
    )
    state, optim = fsdp.get_state_dict(model, mine, options=StateDictOptions(full_state_dict=True))
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    assert_equal(optim["state"], by_name(plain, theirs)["state"])
    step(model, mine, 3, context.rank)
    plain_step(plain, theirs, 3, context.world_size)
    for key, value in params_of(model).items():
        torch.testing.assert_close(value, plain.get_parameter(key), rtol=1e-6, atol=1e-6)


@ORIGINAL
def test_the_first_rank_can_send_the_state_of_a_plain_model(*, original: bool) -> None:
    on_ranks(_of_plain, 2, original=original)


def _on_disk(context: RankContext, folder: str, *, original: bool, mesh: bool) -> None:
    """The way of ``torch.distributed.checkpoint``: into a fresh model and a fresh optimizer."""
    given: dict[str, Any] = {"use_orig_params": original}
    if mesh:
        given["device_mesh"] = init_device_mesh("cpu", (context.world_size,))
    model, optimizer = _trained(context, **given)
    state, optim = fsdp.get_state_dict(model, optimizer)
    assert isinstance(state["inp.weight"], DTensor) == mesh
    dcp.save({"model": state, "optim": optim}, checkpoint_id=folder)
    dist.barrier()
    other = wrapped(**given)
    fresh = optimizer_for(other, "adam", two_groups)
    before = copy.deepcopy(params_of(other))
    template, template_optim = fsdp.get_state_dict(other, fresh)
    assert not fresh.state
    assert all(torch.equal(v, before[k]) for k, v in params_of(other).items())
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    dcp.load({"model": template, "optim": template_optim}, checkpoint_id=folder)
    fsdp.set_state_dict(other, fresh, model_state_dict=template, optim_state_dict=template_optim)
    assert_equal(
        FSDP.optim_state_dict(other, fresh)["state"],
        FSDP.optim_state_dict(model, optimizer)["state"],
    )
    mine, theirs = params_of(model), params_of(other)
    assert all(torch.equal(theirs[key], value) for key, value in mine.items())


@ORIGINAL
@pytest.mark.parametrize("mesh", [False, True], ids=["groups", "mesh"])
def test_a_checkpoint_is_read_into_a_fresh_optimizer(
    tmp_path: Any, *, original: bool, mesh: bool
) -> None:
    on_ranks(_on_disk, 2, folder=str(tmp_path), original=original, mesh=mesh)


def _several(context: RankContext, *, original: bool, flat: bool) -> None:
    """Two optimizers, each with its part of the model."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    pair = []
    for lr in (0.02, 0.5):
        model = wrapped(use_orig_params=original)
        blocks = list(model.blocks.parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in blocks)]
        pair.append(
            (model, [torch.optim.Adam(blocks, lr=lr), torch.optim.SGD(rest, lr=lr, momentum=0.9)])
        )
    (model, optimizers), (other, fresh) = pair
    for optimizer in optimizers:
        step(model, optimizer, 0, context.rank)
    found = checkpoint.get_optimizer_state_dict(model, optimizers, options=options)
    checkpoint.set_optimizer_state_dict(other, fresh, found, options=options)
    for mine, theirs in zip(optimizers, fresh, strict=True):
        assert_equal(
            FSDP.optim_state_dict(other, theirs)["state"],
            FSDP.optim_state_dict(model, mine)["state"],
        )
        assert theirs.param_groups[0]["lr"] == 0.02


@ORIGINAL
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat_form"])
def test_several_optimizers_have_one_state(*, original: bool, flat: bool) -> None:
    on_ranks(_several, 2, original=original, flat=flat)


def _compiled(context: RankContext, *, original: bool) -> None:
    """What the compiler puts into names is not in them; nothing is compiled for that."""
    model, plain = wrapped(use_orig_params=original), build()
    around = torch.compile(model)
    optimizer = optimizer_for(around, "sgd")
    step(model, optimizer, 0, context.rank)
    state, optim = fsdp.get_state_dict(around, optimizer)
    assert sorted(state) == sorted(plain.state_dict())
    assert sorted(optim["state"]) == sorted(name for name, _ in plain.named_parameters())
    fresh = optimizer_for(around, "sgd")
    keys = fsdp.set_state_dict(around, fresh, model_state_dict=state, optim_state_dict=optim)
    assert keys == ([], [])
    assert_equal(
        FSDP.optim_state_dict(model, fresh)["state"],
        FSDP.optim_state_dict(model, optimizer)["state"],
    )


@pytest.mark.parametrize(
    "original", [False, pytest.param(True, marks=pytest.mark.long)], ids=["flat", "original"]
)
def test_names_are_free_of_the_compiler(*, original: bool) -> None:
    on_ranks(_compiled, 2, original=original)


def _parts(context: RankContext) -> None:
    """Frozen parameters left out, and the entries of one module alone."""
    inner = build()
    for param in inner.blocks[0].parameters():
        param.requires_grad_(False)
    inner.blocks[0] = FSDP(inner.blocks[0])
    model = FSDP(inner)
    found = checkpoint.get_model_state_dict(
        model, options=StateDictOptions(ignore_frozen_params=True)
    )
    assert sorted(found) == sorted(k for k in build().state_dict() if not k.startswith("blocks.0"))
    with pytest.warns(FutureWarning, match="Getting submodules only"):
        whole = checkpoint.get_model_state_dict(model, submodules={model.out})
    assert sorted(whole) == ["out.bias", "out.weight"]
    with pytest.warns(FutureWarning, match="Getting submodules only"):
        short = checkpoint.get_model_state_dict(
            model,
            submodules={model.out},
            options=StateDictOptions(keep_submodule_prefixes=False),
        )
    assert sorted(short) == ["bias", "weight"]


def test_a_state_may_be_a_part() -> None:
    on_ranks(_parts, 2)


def _refused(context: RankContext) -> list[list[str]]:
    model, optimizer = _trained(context)
    found = checkpoint.get_optimizer_state_dict(model, optimizer)
    if context.rank == 1:  # it alone does not name a parameter
        found["state"].pop("inp.weight")
        for group in found["param_groups"]:
            group["params"] = [name for name in group["params"] if name != "inp.weight"]
    text = {"state": {"w": {"a": "text"}}, "param_groups": []}
    optimizer.state[next(iter(optimizer.state))]["a"] = "text"
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    broadcast = StateDictOptions(broadcast_from_rank0=True)
    assert text
    return [
        error_of(lambda: checkpoint.set_optimizer_state_dict(model, optimizer, found)),
        error_of(lambda: checkpoint.get_optimizer_state_dict(model, optimizer, options=flat)),
        error_of(lambda: checkpoint.set_model_state_dict(model, {}, options=broadcast)),
        error_of(lambda: checkpoint.get_optimizer_state_dict(model, [])),
        error_of(lambda: checkpoint.set_optimizer_state_dict(model, [], {})),
    ]


def test_what_cannot_be_done_is_refused_on_every_rank() -> None:
    want = [
        ("RuntimeError", "Missing optimizer state for parameter 'inp.weight'"),
        ("NotImplementedError", "only supports tensor, int, float states"),
        ("ValueError", "full_state_dict must be True when broadcast_from_rank0 is True"),
        ("RuntimeError", "Optimizers are not passed in"),
        ("RuntimeError", "Optimizers are not passed in"),
    ]
    for errors in on_ranks(_refused, 2):
        for (name, text), (kind, fragment) in zip(errors, want, strict=True):
            assert name == kind, text
            assert fragment in text


def _plain_model(context: RankContext) -> None:
    """A model without any unit goes torch's way."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state, optim = fsdp.get_state_dict(model, optimizer)
    assert sorted(state) == ["bias", "weight"]
    assert sorted(optim["state"]) == ["bias", "weight"]
    assert sorted(checkpoint.get_model_state_dict(model)) == ["bias", "weight"]
    only = checkpoint.get_optimizer_state_dict(model, optimizer)
    fsdp.set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=only)


def test_a_plain_model_goes_the_ordinary_way() -> None:
    on_ranks(_plain_model, 1)

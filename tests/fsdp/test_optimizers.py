"""Optimizers, clipping and checkpoints of optimizer states, as users write them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp
from conformance.ranks import RankContext
from fsdp import checkpoint, fully_shard
from fsdp.empty_shard import EmptyShard
from tests.fsdp.plain import (
    DIM,
    Stack,
    batch,
    build,
    compare,
    loss_of,
    optimizer_of,
    train_plain,
    whole,
)
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_training import shard_blocks

DECAY = {"weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": DECAY,
    "Adadelta": DECAY,
    "Adafactor": DECAY,
    "Adagrad": DECAY,
    "Adam": DECAY | {"amsgrad": True},
    "AdamW": DECAY | {"fused": True},
    "Adamax": DECAY,
    "LBFGS": {"max_iter": 3},
    "Muon": DECAY | {"ns_steps": 1},  # each magnifies the rounding of bfloat16
    "NAdam": DECAY,
    "RAdam": DECAY,
    "RMSprop": DECAY | {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": DECAY | {"momentum": 0.9, "nesterov": True, "foreach": False},
    "SparseAdam": {},
}
"""All of torch's, with the options that they are tried with."""
REFUSING = {
    "Adafactor": r"Adafactor reads norms of whole tensors as numbers, .*Use AdamW, or",
    # Operators that DTensor does not have for shards: by version, or by the sizes.
    "LBFGS": r"LBFGS sees a parameter as one vector, .*'weight', a DTensor of shape \(10, 10\)",
    "Muon": r"Muon adds to a parameter what .* '\S+', a DTensor of shape \(2, 10\)",
    "Rprop": r"Rprop assigns to the elements that a mask chooses, .*Use FullyShardedDataParallel",
    "SparseAdam": r"SparseAdam takes sparse gradients only, .*Use Adam\.",
}
"""Those that are refused, or may be, and what they say."""
ALWAYS = {"Adafactor", "SparseAdam"}


def exported_optimizers() -> list[str]:
    kinds = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    return sorted(
        name
        for name, kind in kinds.items()
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    )


def local_of(param: torch.Tensor) -> torch.Tensor:
    """What this rank holds."""
    return param.detach().to_local()  # type: ignore[attr-defined]


def optimizer_called(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of ``OPTIMIZERS`` over what it takes of ``model``."""
    params = [p for p in model.parameters() if p.ndim == 2 or name != "Muon"]  # matrices only
    made: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=0.01, **OPTIMIZERS[name])
    return made


def closure_over(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world: int
) -> Callable[[], float]:
    """What ``optimizer.step`` calls to have gradients of a sharded model and the mean loss."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        dist.all_reduce(loss.detach().div_(world))  # all search along one line
        return loss.item()

    return closure


def plain_closure_over(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, world: int
) -> Callable[[], float]:
    """The same of a plain model, with the batches of all ranks."""

    def closure() -> float:
        optimizer.zero_grad()
        mean = torch.stack([loss_of(model, batch(step, rank)) for rank in range(world)]).mean()
        mean.backward()
        return mean.item()

    return closure


def test_every_optimizer_of_torch_is_tried() -> None:
    assert sorted(OPTIMIZERS) == exported_optimizers()


def _optimizer(context: RankContext, name: str, hidden: int) -> str:
    """The refusal of a step, which changed nothing; or nothing: all is as in the plain model."""
    rank, world = context.rank, context.world_size
    model, plain = shard_blocks(build(hidden=hidden)), build(hidden=hidden)
    mine, theirs = optimizer_called(name, model), optimizer_called(name, plain)
    start = [param.detach().clone() for param in plain.parameters()]
    held = [local_of(param).clone() for param in model.parameters()]
    for step in range(2):
        closure = closure_over(model, mine, step, rank, world)
        closure()
        try:
            mine.step(closure)
        except NotImplementedError as error:
            assert not mine.state
            assert all(map(torch.equal, map(local_of, model.parameters()), held))
            return str(error)
        theirs.step(plain_closure_over(plain, theirs, step, world))
    if name == "Muon":  # which computes in bfloat16, whose rounding depends on the order
        for got, want, old in zip(model.parameters(), plain.parameters(), start, strict=True):
            off = (whole(got.detach()) - want.detach()).norm()
            assert off <= 0.03 * (want.detach() - old).norm()
    else:
        # Steps that divide by a gradient's size magnify its last bits.
        compare(model, plain, tolerance=2e-4)
    return ""


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("hidden", [2, 13], ids=["empty", "uneven"])
def test_an_optimizer_of_torch_steps_as_on_whole_parameters_or_refuses(
    name: str, hidden: int
) -> None:
    """The last of three ranks has no row of what has two."""
    said = agreed(_optimizer, 3, name=name, hidden=hidden)
    assert re.match(REFUSING.get(name, "$"), said) or (said == "" and name not in ALWAYS)


def _clip(context: RankContext, norm_type: float, *, foreach: bool | None) -> list[float]:
    """Parameters of two rows over three or four ranks: some shards are empty."""
    model, plain = shard_blocks(build(Stack, hidden=2).double()), build(Stack, hidden=2).double()
    model(batch(0, context.rank).double()).pow(2).mean().backward()
    for rank in range(context.world_size):
        (plain(batch(0, rank).double()).pow(2).mean() / context.world_size).backward()
    norms = []
    for each in (model, plain):
        norm = nn.utils.clip_grad_norm_(each.parameters(), 0.05, norm_type, foreach=foreach)
        norms.append(whole(norm).item())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-8, atol=1e-12)
    optimizer = optimizer_of(model.parameters())
    optimizer.step()
    return norms


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf"), float("-inf")])
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("world", [3, 4])
def test_every_norm_counts_each_element_once_where_shards_are_empty(
    *, norm_type: float, foreach: bool | None, world: int
) -> None:
    for got, want in on_ranks(_clip, world, norm_type=norm_type, foreach=foreach):
        assert got == pytest.approx(want, rel=1e-8)  # the smallest gradient nearly cancels


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, float("inf"), float("-inf"), -1.0])
def test_the_norm_of_nothing_is_the_identity_of_its_reduction(order: float) -> None:
    empty = EmptyShard.of(torch.empty(0, 3))
    (listed, full) = torch._foreach_norm([empty, torch.full((4,), -2.0)], order)
    alone = torch.linalg.vector_norm(empty, order)
    wanted = float("inf") if order < 0 else 0.0
    assert listed.item() == alone.item() == wanted
    assert full.item() == pytest.approx(torch.linalg.vector_norm(torch.full((4,), 2.0), order))
    assert torch.linalg.vector_norm(empty, order, dtype=torch.float64).dtype is torch.float64


def test_an_empty_shard_gives_plain_tensors() -> None:
    empty = EmptyShard.of(torch.empty(0, 3))
    results = [empty + 1, empty.clone(), torch._foreach_mul([empty], 2.0)[0], empty.detach()]
    assert [type(result) for result in results] == [torch.Tensor] * 4
    assert empty.shape == (0, 3)


class Spare(nn.Module):
    """Has a part that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])
        self.spare = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x)))


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for name, param in model.named_parameters() if param in optimizer.state]


def _options(kind: str, *, saving: bool) -> checkpoint.StateDictOptions:
    return checkpoint.StateDictOptions(
        full_state_dict=kind.startswith("full"),
        cpu_offload=saving and kind == "full_rank0",
        broadcast_from_rank0=not saving and kind == "full_rank0",
        flatten_optimizer_state_dict=kind == "flat",
    )


def _unused(context: RankContext, kind: str) -> list[str]:
    model, plain = shard_blocks(build(Spare)), build(Spare)
    optimizer = optimizer_of(model.parameters())
    loss_of(model, batch(0, context.rank)).backward()
    optimizer.step()
    fresh = shard_blocks(build(Spare))
    fresh_optimizer = optimizer_of(fresh.parameters())
    if kind == "directory":
        path = str(context.directory / "checkpoint")
        saved = dict(zip(("model", "optim"), _state(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=path)
        loaded = dict(zip(("model", "optim"), _state(fresh, fresh_optimizer), strict=True))
        dcp.load(loaded, checkpoint_id=path, planner=checkpoint.LoadPlanner())
        options = None
    else:
        saving, options = _options(kind, saving=True), _options(kind, saving=False)
        states = checkpoint.get_state_dict(model, optimizer, options=saving)
        loaded = dict(zip(("model", "optim"), states, strict=True))
    checkpoint.set_state_dict(
        fresh,
        fresh_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optim"],
        options=options,
    )
    names = _names(fresh, fresh_optimizer)
    fresh_optimizer.zero_grad()
    loss_of(fresh, batch(1, context.rank)).backward()
    fresh_optimizer.step()
    train_plain(plain, context.world_size, steps=2)
    compare(fresh, plain)
    return names


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return checkpoint.get_state_dict(model, optimizer)


@pytest.mark.parametrize("kind", ["sharded", "full", "full_rank0", "flat", "directory"])
def test_a_parameter_without_optimizer_state_has_none_after_a_load(kind: str) -> None:
    wanted = [f"blocks.{i}.{name}" for i in range(2) for name in ("weight", "bias")]
    assert agreed(_unused, 2, kind=kind) == wanted


def _unknown(context: RankContext, *, strict: bool) -> str:
    model = shard_blocks(build(Spare))
    optimizer = optimizer_of(model.parameters())
    state = checkpoint.get_optimizer_state_dict(model, optimizer)
    for group in state["param_groups"]:
        group["params"].remove("spare.bias")
    del state["state"]["spare.bias"]
    options = checkpoint.StateDictOptions(strict=strict)
    try:
        checkpoint.set_optimizer_state_dict(model, [optimizer], state, options=options)
    except RuntimeError as error:
        return str(error)
    return ",".join(_names(model, optimizer)[-1:])


def test_a_state_that_does_not_name_a_parameter_is_refused() -> None:
    text = agreed(_unknown, 2, strict=True)
    assert text.startswith("Missing optimizer state for parameter 'spare.bias' in checkpoint")
    assert agreed(_unknown, 2, strict=False) == "spare.weight"


def _other_missing(context: RankContext) -> bool:
    """The planner forgives a parameter without any state, not one that has lost a part of it."""
    model = shard_blocks(build(Spare))
    optimizer = optimizer_of(model.parameters())
    path = str(context.directory / "checkpoint")
    state = checkpoint.get_optimizer_state_dict(model, optimizer)
    del state["state"]["spare.bias"]["exp_avg"]
    dcp.save({"optim": state}, checkpoint_id=path)
    fresh = optimizer_of(model.parameters())
    wanted = {"optim": checkpoint.get_optimizer_state_dict(model, fresh)}
    with pytest.raises(dcp.api.CheckpointException, match=r"spare\.bias\.exp_avg"):
        dcp.load(wanted, checkpoint_id=path, planner=checkpoint.LoadPlanner())
    return "spare.bias" in wanted["optim"]["state"]


def test_a_part_of_a_state_that_is_missing_stays_an_error() -> None:
    assert agreed(_other_missing, 2) is True


def _wrapped_names(context: RankContext) -> list[str]:
    model = build(Spare)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    fully_shard(model)
    optimizer = optimizer_of(model.parameters())
    loss_of(model, batch(0, context.rank)).backward()
    optimizer.step()
    state = checkpoint.get_optimizer_state_dict(model, optimizer)
    checkpoint.set_optimizer_state_dict(model, optimizer, state)
    return [*sorted(state["state"])[:2], str(len(_names(model, optimizer)))]


def test_names_of_wrappers_do_not_enter_the_state() -> None:
    assert agreed(_wrapped_names, 2) == ["blocks.0.bias", "blocks.0.weight", "4"]


def test_the_functions_take_the_arguments_of_torchs() -> None:
    helpers = torch.distributed.checkpoint.state_dict
    for name in ("set_optimizer_state_dict", "set_state_dict"):
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (checkpoint, helpers))
        assert list(ours.parameters) == list(theirs.parameters)


def test_the_package_offers_the_two_functions_for_whole_states() -> None:
    assert fsdp.set_state_dict is checkpoint.set_state_dict
    assert fsdp.get_state_dict is checkpoint.get_state_dict
    with pytest.raises(AttributeError, match="get_state_dicts"):
        _ = fsdp.get_state_dicts

"""What is ignored is left alone; what is on meta is made, and ranks that differ start equal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import MixedPrecision, ShardingStrategy
from tests.fsdp.plain import Residual, Stack, batch, build, loss_of, train_plain
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL, agrees, train

POLICY = ModuleWrapPolicy({Residual})


def flat_elements(model: FSDP) -> list[int]:
    """Elements of the flat parameter of each unit, without padding."""
    handles = [unit._handle for unit in FSDP.fsdp_modules(model)]
    return [0 if handle is None else handle.unsharded_numel for handle in handles]


def _nested(context: RankContext, *, manual: bool) -> list[int]:
    """What the root ignores is ignored in units below it, made before it or by its policy."""
    model = build()
    inner = model.blocks[0]
    ignored = [inner.norm, model.out]
    if manual:
        model.blocks[0] = FSDP(inner, ignored_modules=[inner.norm])
        model.blocks[1] = FSDP(model.blocks[1])
        root = FSDP(model, ignored_modules=[model.out])
    else:
        root = FSDP(model, auto_wrap_policy=POLICY, ignored_modules=ignored)
    assert inner.norm.weight.shape == (13,)
    assert isinstance(inner.norm.weight, nn.Parameter)
    assert inner.norm in root._ignored_modules
    return flat_elements(root)


@pytest.mark.parametrize("manual", [False, True])
def test_units_below_ignore_what_the_root_ignores(*, manual: bool) -> None:
    # 110 of the first layer; 143 and 130 of a block, with or without the 26 of its norm
    assert agreed(_nested, 2, manual=manual) == [110, 273, 299]


def _elsewhere(context: RankContext) -> list[int]:
    """A module outside of the wrapped one may be named, and is left alone."""
    outside = nn.Linear(3, 3)
    before = list(outside.parameters())
    model = FSDP(build(), ignored_modules=[outside])
    assert list(outside.parameters()) == before
    return flat_elements(model)


def test_an_ignored_module_may_be_elsewhere() -> None:
    assert agreed(_elsewhere, 2) == [sum(p.numel() for p in build().parameters())]


def _all_ignored(context: RankContext) -> None:
    """A unit of which everything is ignored needs no collective and changes nothing."""
    inner = build()
    plain = copy.deepcopy(inner)
    model = FSDP(inner, ignored_states=list(inner.parameters()))
    assert not model._state.groups
    assert torch.equal(model(batch(0, 0)), plain(batch(0, 0)))
    loss_of(model, batch(0, context.rank)).backward()
    loss_of(plain, batch(0, context.rank)).backward()
    for mine, wanted in zip(inner.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, wanted.grad)  # nobody has reduced it


def test_a_unit_may_ignore_everything() -> None:
    on_ranks(_all_ignored, 2)


def _meta_stays(context: RankContext) -> bool:
    model = build()
    with torch.device("meta"):
        model.aside = nn.Linear(3, 3)
    FSDP(model, ignored_modules=[model.aside])
    return model.aside.weight.is_meta


def test_an_ignored_module_on_meta_is_not_made() -> None:
    assert agreed(_meta_stays, 2) is True


def _low_into_ignored(context: RankContext) -> str:
    model = build()
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    wrapped = FSDP(model, ignored_modules=[model.out], mixed_precision=mixed)
    try:
        wrapped(batch(0, 0))
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_ignored_module_gets_what_the_computation_gives() -> None:
    assert "same dtype" in agreed(_low_into_ignored, 2)


class Deferred(Stack):
    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)


def _deferred(context: RankContext, *, original: bool, nested: bool) -> None:
    """Made late with one seed, it has the values of a model that is made at once, and trains."""
    policy = ModuleWrapPolicy({Residual, nn.Linear}) if nested else None
    options: dict[str, Any] = {"auto_wrap_policy": policy, "use_orig_params": original}

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for index, param in enumerate(module.parameters(recurse=False)):
            nn.init.constant_(param, 0.01 * (index + 1))
        if isinstance(module, Stack):
            module.scale.fill_(1.0)

    with torch.device("meta"):
        late = Deferred()
    eager = Deferred()
    for module in eager.modules():
        init(module)
    plain = copy.deepcopy(eager)
    model = FSDP(late, param_init_fn=init, **options)
    agrees(model, plain, tolerance=0)
    train(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)


@ORIGINAL
@pytest.mark.parametrize("nested", [False, True])
def test_deferred_values_are_those_of_an_eager_model(*, original: bool, nested: bool) -> None:
    on_ranks(_deferred, 2, original=original, nested=nested)


def _synced_replicas(context: RankContext) -> None:
    """Every rank starts with the values of rank 0, in its shards and in its replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(context.rank)
    inner = Stack()
    inner.scale.fill_(context.rank + 1.0)
    model = FSDP(
        inner,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
        auto_wrap_policy=POLICY,
    )
    torch.manual_seed(0)
    agrees(model, Stack(), tolerance=0)
    assert model.module.scale.item() == 1.0
    groups = {unit._state.mesh_info.groups for unit in FSDP.fsdp_modules(model)}
    assert len(groups) == 1
    assert [group.size() for group in groups.pop()] == [2, 2]


def test_replicas_start_equal_too() -> None:
    on_ranks(_synced_replicas, 4)


def _ignored_not_synced(context: RankContext) -> list[float]:
    torch.manual_seed(0)
    inner = Stack()
    with torch.no_grad():
        inner.out.bias.fill_(float(context.rank))
    inner.scale.fill_(context.rank + 1.0)
    FSDP(inner, sync_module_states=True, ignored_states=[inner.out.bias])
    return [inner.out.bias[0].item(), inner.scale.item()]


def test_what_is_ignored_is_not_made_equal() -> None:
    assert on_ranks(_ignored_not_synced, 2) == ([0.0, 1.0], [1.0, 1.0])


def _by_policy_alone(context: RankContext) -> list[int]:
    """Without groups, a hybrid strategy shards over the ranks of this host."""
    model = FSDP(build(), auto_wrap_policy=POLICY, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    train(model, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    agrees(model, plain)
    info = model._state.mesh_info
    return [info.replicate_size, info.shard_size]


def test_a_hybrid_strategy_finds_the_ranks_of_the_host() -> None:
    assert agreed(_by_policy_alone, 2) == [1, 2]


def _other_ignored(context: RankContext) -> None:
    """Ranks that ignore different parameters are told so; nobody hangs."""
    model = build()
    ignored = [model.out.bias] if context.rank == 0 else []
    wrapped = FSDP(model, ignored_states=ignored or None)
    with pytest.raises(ValueError, match=r"rank 1 has 'out\.bias'"):
        wrapped(batch(0, 0))


def test_ranks_that_ignore_different_parameters_are_told() -> None:
    on_ranks(_other_ignored, 2)


class Ends(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[-1](self[0](x))


class Between(nn.Module):
    """Modules to ignore, as many as asked for, between those that train."""

    def __init__(self, between: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        first, last = nn.Linear(10, 10), nn.Linear(10, 10)
        aside = [nn.Linear(10, 10) for _ in range(between)]
        self.inner = Ends(first, *aside, last)
        self.out = nn.Linear(10, 3)
        self.aside = aside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))


def _ignores_more(context: RankContext, *, original: bool) -> None:
    """What a rank ignores may lie between what all ranks train, under other names."""
    model = Between(context.rank)
    model.inner[-1].load_state_dict(Between(0).inner[-1].state_dict())
    model.out.load_state_dict(Between(0).out.state_dict())
    aside = model.aside
    model.inner = FSDP(model.inner, ignored_modules=aside, use_orig_params=original)
    wrapped = FSDP(model, ignored_modules=aside, use_orig_params=original)
    losses = train(wrapped, context.rank)
    plain = Between(0)
    wanted = train_plain(plain, context.world_size)
    if context.rank == 0:
        torch.testing.assert_close(losses, wanted, rtol=2e-6, atol=2e-6)
        # 30 + 3, and twice 100 + 10; original names start at multiples of 4
        assert flat_elements(wrapped) == ([35, 222] if original else [33, 220])


@ORIGINAL
def test_ranks_may_ignore_different_modules(*, original: bool) -> None:
    on_ranks(_ignores_more, 2, original=original)


def _wraps_all(context: RankContext) -> None:
    model = FSDP(build(), auto_wrap_policy=always_wrap_policy, use_orig_params=True)
    train(model, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    agrees(model, plain)


def test_units_all_the_way_down_train_alike() -> None:
    on_ranks(_wraps_all, 2)

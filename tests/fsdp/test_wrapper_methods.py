"""Methods of the wrapper face: whole parameters, states, norms, and what is refused."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp import wrapper_options as options
from fsdp.flat_parameter import FlatParameter
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import MixedPrecision, ShardingStrategy, StateDictType
from tests.fsdp.plain import Residual, Stack, batch, build, loss_of, optimizer_of, train_plain
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL, agrees, train, wrapped

HYBRID = ShardingStrategy.HYBRID_SHARD


def _names(context: RankContext, *, original: bool) -> list[Any]:
    model = wrapped(use_orig_params=original)
    outside = [name for name, _ in model.named_parameters()]
    assert "bias=False" in repr(model)  # reads attributes of modules whose parameters are gone
    with FSDP.summon_full_params(model):
        inside = [(name, p.shape == q.shape) for (name, p), (_, q) in _pairs(model)]
        kinds = {type(p) for p in model.parameters()}
    assert kinds == {nn.Parameter}
    assert [name for name, _ in model.named_parameters()] == outside
    assert all(same for _, same in inside)
    assert [name for name, _ in inside] == [name for name, _ in build().named_parameters()]
    assert [isinstance(p, FlatParameter) for p in model.parameters()] == [not original] * len(
        outside
    )
    return outside


def _pairs(model: nn.Module) -> Any:
    return zip(model.named_parameters(), build().named_parameters(), strict=True)


def test_flat_parameters_stand_in_for_the_original_names() -> None:
    prefix = "_fsdp_wrapped_module."
    assert agreed(_names, 2, original=False) == [
        f"{prefix}_flat_param",
        f"{prefix}blocks.0.{prefix}_flat_param",
        f"{prefix}blocks.1.{prefix}_flat_param",
    ]


def test_original_names_stay_behind_the_prefix() -> None:
    names = agreed(_names, 2, original=True)
    plain = [name for name, _ in build().named_parameters()]
    assert [name.replace("_fsdp_wrapped_module.", "") for name in names] == plain


def _writes_back(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    loss_of(model, batch(0, context.rank)).backward()
    before = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    with FSDP.summon_full_params(model), torch.no_grad():
        model.inp.weight.fill_(3.0)
        model.blocks[0].up.bias.data = torch.full((13,), 4.0)
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        assert bool((model.inp.weight == 3).all())
        assert bool((model.blocks[0].up.bias == 4).all())
        model.inp.weight.zero_()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        weight = model.inp.weight
        whole = weight.shape == (10, 10) and not weight.is_meta
        assert whole == (context.rank == 0)
    with (
        pytest.warns(UserWarning, match="redundant copies"),
        FSDP.summon_full_params(model, writeback=False, offload_to_cpu=True),
    ):
        assert bool((model.inp.weight == 3).all())
    with FSDP.summon_full_params(model.blocks[0], recurse=False):
        assert model.blocks[0].up.weight.shape == (13, 10)
    with FSDP.summon_full_params(model, recurse=False, writeback=False):
        assert model.inp.weight.shape == (10, 10)
        assert model.blocks[0].training_state.name == "IDLE"
    for param, wanted in zip(model.parameters(), before, strict=True):
        assert (param.grad is None) == (wanted is None)
        assert wanted is None or torch.equal(param.grad, wanted)


@ORIGINAL
def test_changes_to_whole_parameters_stay_if_asked_for(*, original: bool) -> None:
    on_ranks(_writes_back, 2, original=original)


def _raises_inside(context: RankContext, strategy: str, *, original: bool) -> list[bool]:
    """Whether a change in place, and one of what is there, stay although the body has raised."""
    model = wrapped(use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    with suppress(KeyError), FSDP.summon_full_params(model), torch.no_grad():
        model.inp.weight.fill_(3.0)
        model.inp.bias.data = torch.full((10,), 3.0)
        raise KeyError
    with FSDP.summon_full_params(model, writeback=False):
        return [bool((param == 3).any()) for param in (model.inp.weight, model.inp.bias)]


@ORIGINAL
@pytest.mark.parametrize(
    ("strategy", "stay"), [("FULL_SHARD", [False, False]), ("NO_SHARD", [True, False])]
)
def test_changes_to_shards_are_dropped_where_the_body_of_a_summon_raises(
    strategy: str, stay: list[bool], *, original: bool
) -> None:
    assert agreed(_raises_inside, 2, strategy=strategy, original=original) == stay


def _between_passes(context: RankContext, *, original: bool) -> None:
    """The root and SHARD_GRAD_OP units are whole then; backward still has what it needs."""
    model = wrapped(use_orig_params=original, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    plain = build()
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        loss = loss_of(model, batch(step, context.rank))
        with FSDP.summon_full_params(model):
            pass
        for unit in FSDP.fsdp_modules(model):
            assert [g.sharded_state.name for g in unit._state.groups] == ["UNSHARDED"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    train_plain(plain, context.world_size)
    agrees(model, plain)


@ORIGINAL
def test_a_summon_between_forward_and_backward_changes_nothing(*, original: bool) -> None:
    on_ranks(_between_passes, 2, original=original)


def _state(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    train(model, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for key, want in plain.state_dict().items():
        torch.testing.assert_close(state[key], want, rtol=2e-6, atol=2e-6)
    for value in state.values():  # each with memory of its own, not the whole unit's
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    plain.load_state_dict(state)
    other = wrapped(use_orig_params=not original)
    other.load_state_dict(state)
    agrees(other, plain, tolerance=0)
    state["inp.weight"].zero_()  # a copy
    agrees(other, plain, tolerance=0)
    found = other.load_state_dict({"nobody": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["nobody"]
    assert found.missing_keys == list(plain.state_dict())
    only = options.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, only):
        assert bool(model.state_dict()) == (context.rank == 0)
    assert FSDP.get_state_dict_type(model) == options.StateDictSettings()


@ORIGINAL
def test_a_full_state_is_that_of_the_plain_model(*, original: bool) -> None:
    on_ranks(_state, 2, original=original)


def _hybrid(context: RankContext, *, original: bool, pair: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    given: dict[str, Any] = {"process_group": groups} if pair else {"device_mesh": mesh}
    model = wrapped(use_orig_params=original, sharding_strategy=HYBRID, **given)
    train(model, context.rank, micro=2)
    plain = build()
    train_plain(plain, context.world_size, micro=2)
    agrees(model, plain)
    sizes = {unit._state.mesh_info.shard_size for unit in FSDP.fsdp_modules(model)}
    assert sizes == {2}


@ORIGINAL
@pytest.mark.parametrize("pair", [False, True], ids=["mesh", "pair"])
def test_hybrid_sharding_trains_like_the_oracle(*, original: bool, pair: bool) -> None:
    on_ranks(_hybrid, 4, original=original, pair=pair)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 10)
        self.mid = nn.Linear(10, 10)
        self.out = nn.Linear(10, 10)
        self.out.weight = self.inp.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.mid(self.inp(x))))


def _tied(context: RankContext, *, original: bool) -> None:
    policy = CustomPolicy(lambda m: isinstance(m, nn.Linear) and m.weight is not tied)
    inner = build(Tied)
    tied = inner.inp.weight
    model = FSDP(inner, auto_wrap_policy=policy, use_orig_params=original)
    assert len(FSDP.fsdp_modules(model)) == 2
    train(model, context.rank)
    plain = build(Tied)
    train_plain(plain, context.world_size)
    agrees(model, plain)
    model.load_state_dict(plain.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict())


@ORIGINAL
def test_a_tied_parameter_stays_one(*, original: bool) -> None:
    on_ranks(_tied, 2, original=original)


def _frozen(context: RankContext) -> None:
    model, plain = build(), build()
    for each in (model, plain):
        for name, param in each.named_parameters():
            param.requires_grad_("weight" not in name)
    with pytest.warns(UserWarning, match="requires_grad=True and False"):
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Residual}), use_orig_params=True)
    train(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)


def test_frozen_and_trained_parameters_share_a_unit_with_original_names() -> None:
    on_ranks(_frozen, 2)


def _ignored(context: RankContext, *, original: bool, as_params: bool) -> None:
    inner, plain = build(), build()
    out = inner.out
    objects = (out.weight, out.bias)
    given: dict[str, Any] = {"ignored_modules": [out]}
    if as_params:
        given = {"ignored_states": list(out.parameters())}
    model = FSDP(inner, auto_wrap_policy=always_wrap_policy, use_orig_params=original, **given)
    assert isinstance(model.module.out, FSDP) == as_params  # without a parameter, then
    weight, bias = model.module.out.weight, model.module.out.bias
    assert weight is objects[0]
    assert bias is objects[1]
    for param in objects:
        param.requires_grad_(False)  # nobody reduces it
    for param in plain.out.parameters():
        param.requires_grad_(False)
    train(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)


@ORIGINAL
@pytest.mark.parametrize("as_params", [False, True], ids=["modules", "params"])
def test_what_is_ignored_is_left_alone(*, original: bool, as_params: bool) -> None:
    on_ranks(_ignored, 2, original=original, as_params=as_params)


def _clips(context: RankContext, p: float, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    loss_of(model, batch(0, context.rank)).backward()
    got = model.clip_grad_norm_(0.05, p)
    plain = build()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, p)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    again = model.clip_grad_norm_(1e9, p)
    torch.testing.assert_close(again, torch.tensor(0.05), rtol=1e-4, atol=1e-6)


@ORIGINAL
@pytest.mark.parametrize("p", [1.0, 2.0, 2.5, float("inf")])
def test_the_norm_is_that_of_the_whole_gradient(p: float, *, original: bool) -> None:
    on_ranks(_clips, 2, p=p, original=original)


def _mixed(context: RankContext) -> None:
    """A replicated unit inside a sharded tree counts once."""
    policy = CustomPolicy(
        lambda m: isinstance(m, Residual) and {"sharding_strategy": ShardingStrategy.NO_SHARD}
    )
    model = wrapped(auto_wrap_policy=policy)
    loss_of(model, batch(0, context.rank)).backward()
    got = model.clip_grad_norm_(0.05)
    plain = build()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_replica_counts_once_in_the_norm() -> None:
    on_ranks(_mixed, 2)


def _no_gradients(context: RankContext) -> float:
    model = wrapped()
    with pytest.warns(UserWarning, match="with no gradients -- returning the total norm"):
        return model.clip_grad_norm_(1.0).item()


def test_the_norm_of_no_gradients_is_zero() -> None:
    assert on_ranks(_no_gradients, 2) == (0.0, 0.0)


def _from_meta(context: RankContext, *, with_init: bool) -> None:
    with torch.device("meta"):
        model = build(Bare)
    model.scale = torch.ones(1)

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.25)

    torch.manual_seed(3)
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Residual}),
        param_init_fn=init if with_init else None,
        use_orig_params=True,
    )
    with FSDP.summon_full_params(model):
        values = [p.detach() for p in model.parameters()]
        assert not any(value.is_meta or value.isnan().any() for value in values)
        assert with_init == all(bool((value == 0.25).all()) for value in values)


class Bare(Stack):
    """Only a buffer of its own, which it can make."""

    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)


@pytest.mark.parametrize("with_init", [False, True])
def test_parameters_on_meta_are_made(*, with_init: bool) -> None:
    on_ranks(_from_meta, 2, with_init=with_init)


def _synced(context: RankContext) -> None:
    torch.manual_seed(context.rank)
    inner = Stack()
    inner.scale.fill_(context.rank + 1.0)
    model = FSDP(inner, sync_module_states=True, auto_wrap_policy=ModuleWrapPolicy({Residual}))
    torch.manual_seed(0)
    plain = Stack()
    agrees(model, plain, tolerance=0)
    assert model.module.scale.item() == 1.0


def test_all_ranks_start_with_the_values_of_the_first() -> None:
    on_ranks(_synced, 2)


def _applied(context: RankContext) -> None:
    model = wrapped()

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(2.0)

    assert model.apply(fill) is model
    with FSDP.summon_full_params(model, writeback=False):
        assert all(bool((m.weight == 2).all()) for m in model.modules() if isinstance(m, nn.Linear))
        with pytest.raises(ValueError, match="expected to be in states"):
            model.apply(fill)
    assert model._is_root is None


def test_apply_sees_whole_parameters() -> None:
    on_ranks(_applied, 2)


def _precise(context: RankContext) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(10, 8)
            self.norm = nn.BatchNorm1d(8)
            self.out = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            assert x.dtype == torch.bfloat16
            x = self.norm(x)
            assert x.dtype == torch.bfloat16
            return self.out(x)

    mixed = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        model = FSDP(
            build(Normed), mixed_precision=mixed, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
        )
    loss_of(model, batch(0, context.rank)).backward()
    assert isinstance(model.norm, FSDP)
    assert model.norm.running_mean.dtype == torch.float32
    assert model.state_dict()["norm.running_mean"].dtype == torch.float32


def test_batch_norms_keep_full_precision_beside_a_policy() -> None:
    on_ranks(_precise, 2)


def _after_an_error(context: RankContext, *, original: bool) -> None:
    """A forward that raised leaves a tree that trains as if it had not been."""
    model = wrapped(use_orig_params=original)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    train(model, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    agrees(model, plain)


@ORIGINAL
def test_a_failed_forward_leaves_no_trace(*, original: bool) -> None:
    on_ranks(_after_an_error, 2, original=original)


def _like_the_module(context: RankContext) -> None:
    model = FSDP(nn.Sequential(nn.Linear(10, 4), nn.ReLU()))
    assert isinstance(model[0], nn.Linear)
    assert model.append is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    empty = FSDP(nn.ReLU())
    assert torch.equal(empty(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
    assert not list(empty.parameters())
    assert empty.state_dict() == {}
    with pytest.warns(UserWarning, match="containers that do not implement forward"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))


def test_attributes_and_items_are_those_of_the_module() -> None:
    on_ranks(_like_the_module, 2)


def _strategies_warn(context: RankContext) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(build())
        FSDP(build(), sharding_strategy=ShardingStrategy.NO_SHARD)
    kinds = (UserWarning, FutureWarning)
    return [f"{w.category.__name__}: {w.message}" for w in caught if w.category in kinds]


def test_strategies_that_shard_nothing_are_reported() -> None:
    (alone,) = on_ranks(_strategies_warn, 1)
    assert len(alone) == 1
    assert alone[0].startswith("UserWarning: FSDP is switching to use `NO_SHARD` instead of")
    two = agreed(_strategies_warn, 2)
    assert len(two) == 1
    assert two[0].startswith("FutureWarning: The `NO_SHARD` sharding strategy is deprecated")

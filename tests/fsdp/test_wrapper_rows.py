"""Single sentences about the wrapper: its names, what `device_id` moves, delays, low precision,
what forward sees, what a summon shows."""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.nn import functional

import fsdp
from conformance.models.fixtures import MixtureOfExperts, NestedWrappedModuleWithDelay
from conformance.ranks import RankContext
from conformance.scenarios.live_bytes import Patience, others_rest
from fsdp import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType, wrapper_making
from fsdp.engine import backward, forward
from fsdp.engine.division import half_of
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import Residual, batch, build, loss_of, train_plain
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.streams import COMPUTE, OrderedStreams, Races
from tests.fsdp.test_wrapper import ORIGINAL, agrees, train, wrapped
from tests.fsdp.test_wrapper_parity import Wrap, bare_parameters, same, trained, with_ddp, with_ours
from tests.state_dict.test_properties import QUICK, examples

CPU = torch.device("cpu")
LOW = torch.bfloat16

# Names

NAMES = {
    *("FullyShardedDataParallel", "ShardingStrategy", "BackwardPrefetch", "MixedPrecision"),
    *("CPUOffload", "StateDictType", "StateDictSettings", "OptimStateKeyType", "FlatParameter"),
    *("StateDictConfig", "FullStateDictConfig", "LocalStateDictConfig", "ShardedStateDictConfig"),
    *("OptimStateDictConfig", "FullOptimStateDictConfig", "LocalOptimStateDictConfig"),
    "ShardedOptimStateDictConfig",
}


def test_every_name_of_the_wrapper_is_exported() -> None:
    assert set(fsdp.__all__) >= NAMES
    assert [name for name in NAMES if getattr(fsdp, name).__name__ != name] == []


def _quiet(context: RankContext) -> None:
    model = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)


def test_the_settings_of_states_give_no_warning() -> None:
    on_ranks(_quiet, 2)


# What `device_id` moves


def _moved(context: RankContext, *, offload: bool) -> list[str]:
    model = build()
    model.blocks[0] = FSDP(model.blocks[0])
    names = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
    found: list[str] = []

    def move(tensors: list[torch.Tensor], device: torch.device) -> None:
        assert device == CPU
        found.extend(names[id(tensor)] for tensor in tensors)

    with mock.patch.object(wrapper_making, "move_to", move):
        FSDP(
            model,
            device_id=CPU,
            ignored_modules=[model.blocks[1]],
            cpu_offload=CPUOffload(offload_params=offload),
        )
    return found


@pytest.mark.parametrize("offload", [False, True])
def test_a_unit_moves_what_it_owns_alone(*, offload: bool) -> None:
    wanted = ["inp.weight", "inp.bias", "out.weight", "out.bias", "scale"]
    assert agreed(_moved, 2, offload=offload) == wanted


# Streams and delays

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicas": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "cast": {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
}


def _ordered(context: RankContext, variant: str, *, original: bool) -> list[Any]:
    """Accumulates, reduces and steps on streams of which every wait is known."""
    model, plain = wrapped(use_orig_params=original, **VARIANTS[variant]), build()
    streams = OrderedStreams()
    model._state.comm().streams = streams
    races = Races(streams)
    with races:
        train(model, context.rank, micro=2)
    train_plain(plain, context.world_size, micro=2)
    agrees(model, plain)
    return [races.found, sorted({stream for _, stream in races.kernels})]


@ORIGINAL
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_kernel_runs_beside_one_that_it_conflicts_with(variant: str, *, original: bool) -> None:
    for found, streams in on_ranks(_ordered, 2, variant=variant, original=original):
        assert found == []
        assert COMPUTE in streams
        assert "reduce" in streams or variant == "replicas"


def _delayed(context: RankContext, *, original: bool) -> None:
    """The second rank is late after its losses and in its reductions."""
    late = {"delay_after_loss_ms": 20.0, "delay_before_reduction_ms": 5.0}

    def make(rank: int, unit: Wrap) -> nn.Module:
        return NestedWrappedModuleWithDelay(rank=rank, wrap=unit, **(late if rank else {}))

    same(with_ours(make, use_orig_params=original), with_ddp(make), "DistributedDataParallel")


@ORIGINAL
def test_delays_change_nothing(*, original: bool) -> None:
    on_ranks(_delayed, 2, original=original)


def _delayed_expert(context: RankContext) -> None:
    """The device is busy where the parameters of the expert of one rank are given up."""
    alone = [dist.new_group([rank]) for rank in range(context.world_size)][context.rank]

    def expert(module: nn.Module) -> nn.Module:
        return FSDP(module, process_group=alone)

    def make(rank: int, unit: Wrap) -> nn.Module:
        return MixtureOfExperts(
            rank=rank, wrap=unit, wrap_expert=expert, delay_before_free_ms=20.0 * rank
        )

    plain = MixtureOfExperts(rank=context.rank)
    wanted = trained(plain, lambda: bare_parameters(plain), lambda: None)
    same(with_ours(make), wanted, "no wrapper")


def test_a_delay_before_parameters_are_given_up_changes_nothing() -> None:
    on_ranks(_delayed_expert, 2)


# Low precision


class Normed(nn.Module):
    """Batch norm between two layers, in its own precision; as plain arithmetic in `low`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.inp(x)))

    def low(self, x: torch.Tensor) -> torch.Tensor:
        def linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x.to(LOW), layer.weight.to(LOW), layer.bias.to(LOW))

        return linear(self.out, self.norm(linear(self.inp, x).float()))


def _normed(*, sync: bool) -> nn.Module:
    model = build(Normed)
    if sync:  # computes on accelerators alone, but for evaluation
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model).eval()
        assert type(model.norm) is nn.SyncBatchNorm
    return model


def _precise(context: RankContext, *, sync: bool) -> None:
    plain = _normed(sync=sync)
    with pytest.warns(UserWarning, match="BatchNorm"):
        model = FSDP(
            _normed(sync=sync),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32),
            use_orig_params=True,
        )
    dtypes: list[torch.dtype] = []

    def look(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        dtypes.extend([args[0].dtype, module.weight.dtype, module.running_mean.dtype])

    model.norm.module.register_forward_pre_hook(look)
    loss_of(model, batch(0, context.rank)).backward()
    assert dtypes == [torch.float32] * 3
    for rank in range(context.world_size):
        (loss_of(plain.low, batch(0, rank)) / context.world_size).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("sync", [False, True], ids=["batch_norm", "sync_batch_norm"])
def test_a_batch_norm_in_full_precision_has_the_right_gradients(*, sync: bool) -> None:
    on_ranks(_precise, 2, sync=sync)


GAP = 16
"""Bytes to which parameters are aligned."""


def _low_bytes() -> int:
    """Memory in low precision that Python knows of; not the zeros that fill gaps of a layout.

    The backend's threads let go of what was sent a moment after it has arrived: the least is read.
    """
    gc.collect()
    return Patience(others_rest).settled(_low_bytes_now, None)


def _low_bytes_now() -> int:
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = [t.untyped_storage() for t in found if t.dtype == LOW and not t.is_meta]
    return sum(size for size in {s._cdata: s.nbytes() for s in storages}.values() if size > GAP)


def _low_memory(context: RankContext, strategy: str, *, original: bool) -> list[int]:
    """Bytes in low precision before, inside and after iterations; no optimizer keeps any."""
    before = _low_bytes()
    model = wrapped(
        use_orig_params=original,
        mixed_precision=MixedPrecision(param_dtype=LOW),
        sharding_strategy=ShardingStrategy[strategy],
    )
    found = [_low_bytes() - before]
    block = model.blocks[0].module
    handle = block.register_forward_pre_hook(lambda *_: found.append(_low_bytes() - before))
    for step in range(2):
        loss_of(model, batch(step, context.rank)).backward()
        handle.remove()
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        model.zero_grad()
        found.append(_low_bytes() - before)
    return found


@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_nothing_in_low_precision_is_kept_between_iterations(
    strategy: str, *, original: bool
) -> None:
    start, inside, *after = agreed(_low_memory, 2, strategy=strategy, original=original)
    assert (start, after) == (0, [0, 0])
    assert inside >= 2 * sum(param.numel() for param in build(Residual).parameters())


# What forward sees, and what it leaves


def _in_forward(context: RankContext, *, original: bool) -> list[Any]:
    """Whole parameters are leaves of autograd, the same ones however often they are read."""
    model = wrapped(use_orig_params=original)
    weight = build().blocks[0].up.weight.detach()
    found: list[Any] = []

    def look(module: nn.Module, _args: Any, _output: Any) -> None:
        seen = module.weight
        assert torch.equal(seen, weight)
        found.extend([isinstance(seen, nn.Parameter), seen.is_leaf, seen.requires_grad])
        found.extend([seen.grad_fn is None, module.weight is seen])

    model.module.blocks[0].module.up.register_forward_hook(look)
    loss_of(model, batch(0, context.rank)).backward()
    with FSDP.summon_full_params(model):
        found.append(isinstance(model.module.blocks[0].module.up.weight, nn.Parameter))
    return found


@ORIGINAL
def test_whole_parameters_are_leaves_inside_forward(*, original: bool) -> None:
    found = agreed(_in_forward, 2, original=original)
    assert found == [original, True, True, True, True, True]


def _hooked(context: RankContext, *, original: bool) -> list[Any]:
    """How many hooks each of two forwards puts on outputs, and whose hooks backward runs."""
    model = wrapped(use_orig_params=original)
    found, ran = [], []

    def noted(state: Any, gradient: torch.Tensor) -> torch.Tensor:
        ran.append(state.name)
        return backward.pre_backward(state, gradient)

    with (
        mock.patch.object(forward, "hook_gradient", wraps=forward.hook_gradient) as hooks,
        mock.patch.object(forward, "pre_backward", noted),
    ):
        for number in (1, 2):
            output = model(batch(0, context.rank))
            found.append(hooks.call_count / number)
    model.state_dict()
    output.sum().backward()
    return [*found, ran]


@ORIGINAL
def test_outputs_are_hooked_once_per_forward_and_a_saved_state_leaves_the_hooks(
    *, original: bool
) -> None:
    first, second, ran = agreed(_hooked, 2, original=original)
    assert (first, second) == (3, 3)
    assert ran == ["FullyShardedDataParallel", "blocks.1", "blocks.0"]


# What a summon shows


def _opened(context: RankContext) -> list[list[bool]]:
    """Which units are open: the root and two blocks, from several modules with and without more."""
    del context
    model = wrapped()
    around = nn.Sequential(model)
    found = []
    for module, recurse in [(model, False), (around, False), (around, True), (model.blocks, True)]:
        with FSDP.summon_full_params(module, recurse=recurse):
            found.append([unit._is_open() for unit in FSDP.fsdp_modules(model)])
    return found


def test_a_summon_without_recursion_opens_one_unit() -> None:
    root, around, everything, blocks = agreed(_opened, 2)
    assert root == [True, False, False]
    assert around == [False, False, False]
    assert everything == [True, True, True]
    assert blocks == [False, True, True]


def _data(context: RankContext, strategy: str) -> None:
    """``.data`` inside a summon is the plain model's, and takes what is written to it."""
    del context
    plain = build()
    for original, offload, low in itertools.product((False, True), repeat=3):
        model = wrapped(
            use_orig_params=original,
            cpu_offload=CPUOffload(offload_params=offload),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16 if low else None),
            sharding_strategy=ShardingStrategy[strategy],
        )
        for factor in (1.0, 2.0):
            with FSDP.summon_full_params(model):
                for got, want in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(got.data, want.data * factor)
                    assert got.data.dtype == want.dtype
                    got.data.mul_(2.0)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_data_inside_a_summon_is_the_plain_models(strategy: str) -> None:
    on_ranks(_data, 2, strategy=strategy)


@pytest.mark.parametrize(
    ("ranks", "before"),
    [(1, 1), (2, 2), (3, 2), (4, 2), (6, 4), (8, 4), (9, 2), (12, 4), (16, 4), (64, 8)],
)
def test_gradients_are_divided_in_two_parts_of_like_size(ranks: int, before: int) -> None:
    assert half_of(ranks) == before
    assert half_of(ranks) * (ranks / half_of(ranks)) == ranks


# What a drawn case that fails shows


def test_a_drawn_case_that_fails_shows_the_model_and_its_units() -> None:
    failed: list[dict[str, Any]] = []

    @settings(QUICK, database=None, derandomize=True)
    @given(examples())
    def fails(example: dict[str, Any]) -> None:
        if len(example["dims"]) > 2:
            failed.append(example)
            raise AssertionError

    with pytest.raises(AssertionError) as caught:
        fails()
    shown = " ".join("\n".join(caught.value.__notes__).split())
    for part in ("dims", "units", "world"):  # of the last one, however small it has become
        assert f"'{part}': {failed[-1][part]}" in shown

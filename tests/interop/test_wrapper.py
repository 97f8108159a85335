"""Ours and torch's ``FullyShardedDataParallel`` are exchangeable: same bits, names and policies."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import wrap as torch_wrap

from conformance.ranks import RankContext
from fsdp import wrap as our_wrap
from fsdp import wrapper as our_wrapper
from fsdp import wrapper_options as our_options
from tests.fsdp.plain import Residual, batch, build, loss_of, optimizer_of
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_wrapper_edits import Strided
from tests.fsdp.test_wrapper_eval import Watcher
from tests.fsdp.test_wrapper_order import Ways, in_detail

CPU = torch.device("cpu")


class Ours:
    """The public names of this package, by the names of torch's."""

    wrap = our_wrap
    FSDP = our_wrapper.FullyShardedDataParallel
    ShardingStrategy = our_options.ShardingStrategy
    BackwardPrefetch = our_options.BackwardPrefetch
    MixedPrecision = our_options.MixedPrecision
    CPUOffload = our_options.CPUOffload


class Theirs:
    """Torch's."""

    wrap = torch_wrap
    FSDP = torch_fsdp.FullyShardedDataParallel
    ShardingStrategy = torch_fsdp.ShardingStrategy
    BackwardPrefetch = torch_fsdp.BackwardPrefetch
    MixedPrecision = torch_fsdp.MixedPrecision
    CPUOffload = torch_fsdp.CPUOffload


def _options(package: Any, variant: str) -> dict[str, Any]:
    return {
        "default": {},
        "keep": {"sharding_strategy": package.ShardingStrategy.SHARD_GRAD_OP},
        "replicas": {"sharding_strategy": package.ShardingStrategy.NO_SHARD},
        "post": {"backward_prefetch": package.BackwardPrefetch.BACKWARD_POST},
        "no_prefetch": {"backward_prefetch": None, "forward_prefetch": True},
        "bf16": {
            "mixed_precision": package.MixedPrecision(
                param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
            )
        },
        "bf16_reduced_in_float32": {
            "mixed_precision": package.MixedPrecision(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=True,
            )
        },
    }[variant]


def _make(package: Any, variant: str, *, original: bool, **given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return package.FSDP(
            build(),
            device_id=CPU,
            auto_wrap_policy=package.wrap.ModuleWrapPolicy({Residual}),
            use_orig_params=original,
            **{**_options(package, variant), **given},
        )


def _train(package: Any, rank: int, variant: str, *, original: bool, micro: int) -> list[Any]:
    model = _make(package, variant, original=original)
    names = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    optimizer = optimizer_of(model.parameters())
    found: list[Any] = [names]
    for step in range(3):
        for part in range(micro):
            if part < micro - 1:
                with model.no_sync():
                    loss_of(model, batch(step, rank, part)).backward()
            else:
                loss = loss_of(model, batch(step, rank, part))
                loss.backward()
        found.append(loss.item())
        found.append(model.clip_grad_norm_(0.5, (2.0, 1.0, float("inf"))[step]).item())
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    found.append({key: value.tolist() for key, value in state.items()})
    found.append({key: str(value.dtype) for key, value in state.items()})
    return found


def _same(context: RankContext, variant: str, *, original: bool, micro: int) -> list[bool]:
    ours, theirs = (
        _train(package, context.rank, variant, original=original, micro=micro)
        for package in (Ours, Theirs)
    )
    return [a == b for a, b in zip(ours, theirs, strict=True)]


VARIANTS = (
    "default",
    "keep",
    "replicas",
    "post",
    "no_prefetch",
    "bf16",
    "bf16_reduced_in_float32",
)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_losses_norms_and_states_are_the_same_bits(variant: str, *, original: bool) -> None:
    assert all(agreed(_same, 2, variant=variant, original=original, micro=1))


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_accumulation_gives_the_same_bits(*, original: bool) -> None:
    assert all(agreed(_same, 2, variant="default", original=original, micro=2))


def tree() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 5),
        nn.ModuleList([nn.Linear(5, 5), nn.Linear(3, 3)]),
        nn.Sequential(nn.Linear(5, 5), nn.ReLU()),
        nn.MultiheadAttention(4, 2),
    )


class Box(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("always_wrap_policy", {}),
        *[("size_based_auto_wrap_policy", {"min_num_params": n}) for n in (10, 12, 30, 31, 80)],
        ("size_based_auto_wrap_policy", {"min_num_params": 10, "force_leaf_modules": set()}),
        ("size_based_auto_wrap_policy", {"min_num_params": 31, "exclude_wrap_modules": set()}),
        ("transformer_auto_wrap_policy", {"transformer_layer_cls": {nn.Linear}}),
        ("lambda_auto_wrap_policy", {"lambda_fn": lambda m: isinstance(m, nn.ReLU)}),
    ],
)
def test_policies_wrap_the_same_modules(name: str, arguments: dict[str, Any]) -> None:
    ours, theirs = tree(), tree()
    ours_policy = functools.partial(getattr(our_wrap, name), **arguments)
    targets = our_wrap.choose_targets(
        ours, ours_policy, {}, ignored_modules=set(), ignored_params=set()
    )
    our_wrap.replace_targets(ours, targets, Box)
    torch_wrap._recursive_wrap(
        theirs,
        auto_wrap_policy=functools.partial(getattr(torch_wrap, name), **arguments),
        wrapper_cls=Box,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]


# Programs that both packages run on two ranks; what they return must be the same.


def _shown(model: nn.Module, *, values: bool = True) -> list[Any]:
    """Names, shapes, dtypes and elements of what users see as parameters and gradients."""
    found: list[Any] = []
    for name, param in model.named_parameters():
        gradient = param.grad
        found.append([name, list(param.shape), str(param.dtype)])
        if gradient is not None:
            shape = [list(gradient.shape), str(gradient.dtype)]
            found.append([*shape, gradient.double().tolist() if values else None])
    return found


def _gradients_in_no_sync(package: Any, rank: int, *, original: bool) -> list[Any]:
    found: list[Any] = []
    for variant in ("default", "keep", "replicas", "bf16_reduced_in_float32"):
        model = _make(package, variant, original=original)
        for part in range(2):
            with model.no_sync():
                loss_of(model, batch(0, rank, part)).backward()
            found.append(_shown(model))
        loss_of(model, batch(1, rank)).backward()
        found.append(_shown(model))
    return found


def _zeroed_in_between(package: Any, rank: int, *, original: bool) -> list[Any]:
    """Gradients of ``no_sync`` that are dropped are not reduced later."""
    model = _make(package, "default", original=original)
    found: list[Any] = []
    for to_none in (True, False):
        with model.no_sync():
            loss_of(model, batch(0, rank)).backward()
        model.zero_grad(set_to_none=to_none)
        loss = loss_of(model, batch(1, rank))
        loss.backward()
        found.append(_shown(model))
        model.zero_grad()
    return found


def _kept_low(package: Any, rank: int, *, original: bool) -> list[Any]:
    found: list[Any] = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        mixed = package.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep_low_precision_grads=True
        )
        model = _make(
            package,
            "default",
            original=original,
            mixed_precision=mixed,
            sharding_strategy=package.ShardingStrategy[strategy],
        )
        loss_of(model, batch(0, rank)).backward()
        found.append(_shown(model))
        if strategy != "NO_SHARD":  # torch adds up in the low dtype there
            loss_of(model, batch(1, rank)).backward()
            found.append(_shown(model))
    return found


def _whole_gradients(package: Any, rank: int, *, original: bool) -> list[Any]:
    found: list[Any] = []
    summon = package.FSDP.summon_full_params
    for variant in ("default", "keep", "replicas"):
        model = _make(package, variant, original=original)
        loss_of(model, batch(0, rank)).backward()
        for writeback in (False, True):
            try:
                with summon(model, writeback=writeback, with_grads=True):
                    found.append(_shown(model))
                    for param in model.parameters():
                        param.grad.mul_(2.0)
            except NotImplementedError as error:
                found.append(["NotImplementedError", str(error)])
            if writeback or variant != "replicas":
                found.append(_shown(model))
        model.zero_grad()
        if original:
            with summon(model, with_grads=True):
                found.append(_shown(model))
    return found


def _between_passes(package: Any, rank: int, *, original: bool) -> list[Any]:
    """What is registered after forward, after backward and after an evaluation."""
    found: list[Any] = []
    for variant in ("default", "keep", "replicas", "bf16"):
        model = _make(package, variant, original=original)
        loss = loss_of(model, batch(0, rank))
        found.append(_shown(model, values=False))
        loss.backward()
        found.append(_shown(model, values=False))
        with torch.no_grad():
            model(batch(0, rank))
        found.append(_shown(model, values=False))
    return found


def _edits(package: Any, rank: int, *, original: bool) -> list[Any]:
    """Parameters and gradients that the user replaces are those that train on."""
    model = _make(package, "default", original=original)
    optimizer = optimizer_of(model.parameters())
    found: list[Any] = []
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad * 2.0
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for index, param in enumerate(model.parameters()):
                if index % 2:
                    param.data = param.data * 0.5
                else:
                    param.mul_(1.5)
        found.append([loss_of(model, batch(step, rank)).item()])
    found.append({key: value.tolist() for key, value in model.state_dict().items()})
    return found


def _scaled_sum(state: list[int], gradient: torch.Tensor, output: Any = None) -> None:
    state.append(gradient.numel())
    gradient.mul_(0.25)
    dist.all_reduce(gradient)
    if output is not None:
        output.copy_(gradient.chunk(dist.get_world_size())[dist.get_rank()])


def _hooked(package: Any, rank: int, *, original: bool) -> list[Any]:
    found: list[Any] = []
    for variant in ("default", "keep", "replicas", "bf16_reduced_in_float32"):
        model = _make(package, variant, original=original)
        state: list[int] = []
        model.register_comm_hook(state, _scaled_sum)
        loss_of(model, batch(0, rank)).backward()
        found += [_shown(model), len(state)]
    return found


def _reduced_as_torch_does(package: Any, rank: int, *, original: bool) -> list[Any]:
    found: list[Any] = []
    for variant, hook in (
        ("default", default_hooks.reduce_scatter_hook),
        ("replicas", default_hooks.allreduce_hook),
    ):
        model = _make(package, variant, original=original)
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
        loss_of(model, batch(0, rank)).backward()
        found.append(_shown(model))
    return found


def _strided(package: Any, rank: int, *, original: bool) -> list[Any]:
    found: list[Any] = []
    # Torch gives original parameters of other strides permuted gradients if nothing is sharded.
    for strategy in ("FULL_SHARD",) if original else ("FULL_SHARD", "NO_SHARD"):
        model = package.FSDP(
            build(Strided),
            device_id=CPU,
            use_orig_params=original,
            sharding_strategy=package.ShardingStrategy[strategy],
        )
        optimizer = optimizer_of(model.parameters())
        for step in range(2):
            loss_of(model, batch(step, rank)).backward()
            found.append(_shown(model))
            optimizer.step()
            optimizer.zero_grad()
        with package.FSDP.summon_full_params(model):
            found += [[n, list(p.stride()), p.tolist()] for n, p in model.named_parameters()]
        found += [[n, list(v.stride()), v.tolist()] for n, v in model.state_dict().items()]
    return found


def _metadata(package: Any, rank: int, *, original: bool) -> list[Any]:
    found: list[Any] = []
    models = [package.FSDP(build(Strided), device_id=CPU, use_orig_params=original)]
    models += [_make(package, variant, original=original) for variant in ("default", "bf16")]
    for model in models:
        for unit in package.FSDP.fsdp_modules(model):
            fields = unit._handle.shard_metadata()
            found += [[list(v) if isinstance(v, tuple) else v for v in f] for f in fields]
    return found


def _precise_in_eval(package: Any, rank: int, *, original: bool) -> list[Any]:
    found: list[Any] = []
    mixed = package.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
            model = package.FSDP(
                build(Watcher),
                device_id=CPU,
                use_orig_params=original,
                mixed_precision=mixed,
                sharding_strategy=package.ShardingStrategy[strategy],
            )
        for training in (True, False, True):
            model.train(training)
            output = model(batch(0, rank))
            found += [model.module.seen, output.tolist()]
            output.sum().backward()
            found.append(_shown(model))
            model.zero_grad()
    return found


def _steps_in_backward(package: Any, rank: int, *, original: bool) -> list[Any]:
    inner = build()
    for param in inner.parameters():
        param._in_backward_optimizers = [torch.optim.SGD([param], lr=0.1, weight_decay=0.1)]
    try:
        model = package.FSDP(inner, device_id=CPU, use_orig_params=original)
    except RuntimeError as error:
        return [str(error)]
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
    return [_shown(model)]


def _gathered_by_hand(package: Any, rank: int, *, original: bool) -> list[Any]:
    model = _make(package, "default", original=original)
    found: list[Any] = [model.check_is_root()]
    model._wait_unshard_streams_on_current_stream()
    handle = model._unshard(async_op=True)
    found.append(hasattr(handle, "wait"))
    handle.wait()
    found += [list(model.module.inp.weight.shape), model.blocks[0]._unshard()]
    loss_of(model, batch(0, rank)).backward()
    return [*found, _shown(model)]


def _compared_order(package: Any, rank: int, *, original: bool) -> list[Any]:
    """How the message begins: its names are those of the flat parameters there, of ours here."""
    found: list[Any] = []
    with in_detail():
        for differs in (True, False):
            model = package.FSDP(
                build(Ways),
                device_id=CPU,
                auto_wrap_policy=package.wrap.ModuleWrapPolicy({nn.Linear}),
                use_orig_params=original,
            )
            model.module.order = [rank, 1 - rank] if differs else [0, 1]
            try:
                model(batch(0, rank)).sum().backward()
            except RuntimeError as error:
                found.append(str(error)[:70])
                continue
            model.module.order = [1, 0]
            for _ in range(2):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    model(batch(0, rank)).sum().backward()
                texts = [str(w.message)[:64] for w in caught]
                found.append(sorted({text for text in texts if "order" in text}))
    return found


PROGRAMS = {
    program.__name__.lstrip("_"): program
    for program in (
        _gradients_in_no_sync,
        _zeroed_in_between,
        _kept_low,
        _whole_gradients,
        _between_passes,
        _edits,
        _hooked,
        _reduced_as_torch_does,
        _strided,
        _metadata,
        _precise_in_eval,
        _steps_in_backward,
        _gathered_by_hand,
        _compared_order,
    )
}


# Where torch does something else, with its reason.
LEFT_OUT = {
    ("edits", False): "other memory behind a flat parameter is not looked for",
    ("compared_order", True): "naming the parameters in the message raises KeyError",
    ("steps_in_backward", False): "optimizers of before the wrapping are forgotten",
}


def _run_both(context: RankContext, name: str, *, original: bool) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = (
            PROGRAMS[name](package, context.rank, original=original) for package in (Ours, Theirs)
        )
    assert len(ours) == len(theirs)
    return [[i, a, b] for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]


@pytest.mark.parametrize(
    ("name", "original"),
    [
        pytest.param(name, original, id=f"{name}-{'original' if original else 'flat'}")
        for name in PROGRAMS
        for original in (False, True)
        if (name, original) not in LEFT_OUT
    ],
)
def test_a_program_sees_the_same_with_either(name: str, *, original: bool) -> None:
    for differences in on_ranks(_run_both, 2, name=name, original=original):
        assert differences == []


# What the names are

ENUMS = ("ShardingStrategy", "BackwardPrefetch", "StateDictType")
CONFIGS = (
    "MixedPrecision",
    "CPUOffload",
    "StateDictConfig",
    "FullStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "StateDictSettings",
)
METHODS = (
    "__init__",
    "summon_full_params",
    "clip_grad_norm_",
    "no_sync",
    "register_comm_hook",
    "fsdp_modules",
    "set_state_dict_type",
    "get_state_dict_type",
    "state_dict_type",
    "apply",
    "check_is_root",
)


def _default(value: Any) -> Any:
    """Enum members and functions by their names, configs by their fields."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _default(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return getattr(value, "__name__", value)


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_same_members(name: str) -> None:
    ours, theirs = getattr(our_options, name), getattr(torch_fsdp, name)
    assert list(ours.__members__) == list(theirs.__members__)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_have_the_same_fields_and_defaults(name: str) -> None:
    ours, theirs = getattr(our_options, name), getattr(torch_fsdp, name)
    assert [f.name for f in dataclasses.fields(ours)] == [
        f.name for f in dataclasses.fields(theirs)
    ]
    if name != "StateDictSettings":  # torch's has no defaults
        assert _default(ours()) == _default(theirs())
        assert ours() == ours()


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_the_same_arguments(name: str) -> None:
    def arguments(package: Any) -> list[Any]:
        parameters = inspect.signature(getattr(package.FSDP, name)).parameters.values()
        return [[p.name, p.kind.name, _default(p.default)] for p in parameters]

    assert arguments(Ours) == arguments(Theirs)

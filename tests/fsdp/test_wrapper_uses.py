"""Ways to use a wrapped model that trained models meet: optimizers, dtypes, containers, repeats."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from conformance.ranks import RankContext
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from tests.fsdp.plain import Residual, batch, build, loss_of, optimizer_of, train_plain
from tests.fsdp.ranks import agreed, error_of, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL, agrees, train, wrapped

POLICY = ModuleWrapPolicy({Residual})
STRATEGIES = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


def mean_gradients(plain: nn.Module, world: int, step: int) -> None:
    for rank in range(world):
        (loss_of(plain, batch(step, rank)) / world).backward()


# Optimizers over original parameters


def by_kind(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer for matrices, with two groups, and one for the rest."""
    named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in model.named_parameters()]
    first = [p for n, p in named if n.endswith("weight") and "norm" not in n]
    head, body = first[:1], first[1:]
    rest = [p for n, p in named if not n.endswith("weight") or "norm" in n]
    return [
        torch.optim.AdamW([{"params": head, "lr": 0.01}, {"params": body}], lr=0.05, foreach=True),
        torch.optim.SGD(rest, lr=0.1, momentum=0.9, foreach=True),
    ]


def _several(context: RankContext, *, before: bool, to_none: bool) -> None:
    """They may be made before the wrapping: the objects stay the user's."""
    inner, plain = build(), build()
    objects = [id(p) for p in inner.parameters()]
    optimizers = by_kind(inner) if before else []
    model = FSDP(inner, auto_wrap_policy=POLICY, use_orig_params=True)
    optimizers = optimizers or by_kind(model)
    others = by_kind(plain)
    for step in range(4):
        for each in (model, plain):  # some are frozen for a while
            for name, param in each.named_parameters():
                param.requires_grad_(not ("down" in name and step in (1, 2)))
        loss_of(model, batch(step, context.rank)).backward()
        mean_gradients(plain, context.world_size, step)
        for each in (*optimizers, *others):
            each.step()
        if step % 2:
            model.zero_grad(set_to_none=to_none)
            plain.zero_grad(set_to_none=to_none)
        else:
            for each in (*optimizers, *others):
                each.zero_grad(set_to_none=to_none)
    assert [id(p) for p in model.parameters()] == objects
    agrees(model, plain)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_several_optimizers_step_on_the_users_parameters(*, before: bool, to_none: bool) -> None:
    on_ranks(_several, 2, before=before, to_none=to_none)


def _pieces(context: RankContext) -> None:
    """While sharded, a parameter is a flat piece, without elements where another rank has all."""
    model = wrapped(use_orig_params=True)
    whole = {n: p.numel() for n, p in build().named_parameters()}
    loss_of(model, batch(0, context.rank)).backward()
    held = [[p.dim(), p.numel(), p.grad is not None] for p in model.parameters()]
    assert all(dims == 1 for dims, _, _ in held)
    assert all(graded == (numel > 0) for _, numel, graded in held)
    assert any(numel == 0 for _, numel, _ in held)
    assert any(0 < numel < size for (_, numel, _), size in zip(held, whole.values(), strict=True))


def test_parameters_of_another_rank_are_empty() -> None:
    on_ranks(_pieces, 2)


# Repeats


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Residual(), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(torch.relu(self.block(self.block(x)))))


def _repeats(context: RankContext, strategy: str, *, original: bool) -> None:
    model = wrapped(Repeats, use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    train(model, context.rank, micro=2)
    plain = build(Repeats)
    train_plain(plain, context.world_size, micro=2)
    agrees(model, plain)


@ORIGINAL
@STRATEGIES
def test_a_unit_may_run_several_times_in_one_forward(strategy: str, *, original: bool) -> None:
    on_ranks(_repeats, 2, strategy=strategy, original=original)


def _forwards(context: RankContext, strategy: str, *, original: bool, state: bool) -> None:
    """Several forwards before one backward, with a state saved in between if asked for."""
    model = wrapped(use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    plain = build()
    optimizer, other = optimizer_of(model.parameters()), optimizer_of(plain.parameters())
    for step in range(2):
        loss = sum(loss_of(model, batch(step, context.rank, part)) for part in range(2))
        if state:
            model.state_dict()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(context.world_size):
            both = sum(loss_of(plain, batch(step, rank, part)) for part in range(2))
            (both / context.world_size).backward()
        other.step()
        other.zero_grad()
    agrees(model, plain)


@ORIGINAL
@STRATEGIES
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
def test_several_forwards_come_before_one_backward(
    strategy: str, *, original: bool, state: bool
) -> None:
    on_ranks(_forwards, 2, strategy=strategy, original=original, state=state)


# Dtypes


def _cast(context: RankContext, *, original: bool, before: bool) -> None:
    """A model that is cast before or after the wrapping computes in its dtype."""
    model = build().double() if before else build()
    model = FSDP(model, auto_wrap_policy=POLICY, use_orig_params=original)
    if not before:
        model.double()
    plain = build().double()
    optimizer, other = optimizer_of(model.parameters()), optimizer_of(plain.parameters())
    for step in range(2):
        model(batch(step, context.rank).double()).pow(2).mean().backward()
        dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        assert dtypes == {torch.float64}
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(context.world_size):
            (plain(batch(step, rank).double()).pow(2).mean() / context.world_size).backward()
        other.step()
        other.zero_grad()
    agrees(model, plain, tolerance=1e-12)


@ORIGINAL
@pytest.mark.parametrize("before", [False, True])
def test_a_model_may_be_cast_before_or_after(*, original: bool, before: bool) -> None:
    on_ranks(_cast, 2, original=original, before=before)


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        return self.inner(x)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Seeing(), Seeing()

    def forward(self, x: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        assert index is None or index.dtype == torch.int64
        return self.second(self.first(x))


def chain(first: MixedPrecision | None, second: MixedPrecision | None, **root: Any) -> FSDP:
    model = build(Chain)
    model.first = FSDP(model.first, mixed_precision=first)
    model.second = FSDP(model.second, mixed_precision=second)
    return FSDP(model, **root)


LOW, LOWEST = torch.bfloat16, torch.float16


def _inputs(context: RankContext, case: str) -> list[str]:
    mixed = MixedPrecision
    model = {
        "root": lambda: chain(
            mixed(param_dtype=LOW), mixed(param_dtype=LOW), mixed_precision=mixed(param_dtype=LOW)
        ),
        "own": lambda: chain(mixed(param_dtype=LOW, cast_forward_inputs=True), None),
        "each": lambda: chain(
            mixed(param_dtype=LOW, cast_forward_inputs=True),
            mixed(param_dtype=LOWEST, cast_forward_inputs=True),
        ),
        "no_root": lambda: chain(
            mixed(param_dtype=LOW),
            mixed(param_dtype=LOW),
            mixed_precision=mixed(param_dtype=LOW, cast_root_forward_inputs=False),
        ),
        "missing": lambda: chain(
            mixed(param_dtype=LOW, cast_forward_inputs=True), mixed(param_dtype=LOWEST)
        ),
    }[case]()
    x = batch(0, 0).requires_grad_()
    error = error_of(lambda: model(x, torch.zeros(1, dtype=torch.int64)).sum().backward())
    if error[0]:
        return error
    assert x.grad.dtype == torch.float32  # that of the input
    return [str(part.seen).removeprefix("torch.") for part in (model.first, model.second)]


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("root", ["bfloat16", "bfloat16"]),
        ("each", ["bfloat16", "float16"]),
    ],
)
def test_inputs_are_cast_at_the_root_or_at_each_unit(case: str, wanted: list[str]) -> None:
    assert agreed(_inputs, 2, case=case) == wanted


@pytest.mark.parametrize("case", ["own", "no_root", "missing"])
def test_inputs_that_nobody_casts_do_not_suit(case: str) -> None:
    for kind, text in on_ranks(_inputs, 2, case=case):
        assert kind == "RuntimeError"
        assert "same dtype" in text


class Mixed(nn.Module):
    """An embedding, whose indices stay integers, and buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 10)
        self.out = nn.Linear(10, 3)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen: list[str] = []

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.out(self.table(index))
        tensors = (index, self.table.weight, self.scale, self.count)
        self.seen = [str(t.dtype).removeprefix("torch.") for t in tensors]
        return x * self.scale


def _policies(context: RankContext, roles: str, strategy: str, *, original: bool) -> None:
    """Each of the three roles is lowered by itself or not; sharded values stay as they were."""
    low = {f"{role}_dtype": LOW for role in roles.split("+") if role}
    model = wrapped(
        Mixed,
        auto_wrap_policy=None,
        mixed_precision=MixedPrecision(**low),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
    )
    reduced: list[torch.dtype] = []
    reducer = model._state.groups[0].reducer
    launch = reducer.launch

    def watched(*args: Any) -> Any:
        reduction = launch(*args)
        reduced.append(reduction._packed.dtype)
        return reduction

    reducer.launch = watched
    optimizer = optimizer_of(model.parameters())
    for _ in range(2):
        model(torch.arange(7)).float().pow(2).mean().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    param, buffer = ("bfloat16" if f"{r}_dtype" in low else "float32" for r in ("param", "buffer"))
    assert model.module.seen == ["int64", param, buffer, "int64"]
    expected = LOW if {"param_dtype", "reduce_dtype"} & set(low) else torch.float32
    assert reduced == [expected] * 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {v.dtype for v in model.state_dict().values()} == {torch.float32, torch.int64}


@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    "roles",
    [
        "",
        "param",
        "reduce",
        "buffer",
        "param+reduce",
        "param+buffer",
        "reduce+buffer",
        "param+reduce+buffer",
    ],
)
def test_each_role_has_its_own_dtype(roles: str, strategy: str, *, original: bool) -> None:
    on_ranks(_policies, 2, roles=roles, strategy=strategy, original=original)


def _halves(context: RankContext, *, before: bool, original: bool, offload: bool) -> None:
    """A model in float16 trains in float16, sums included."""
    model = build().half() if before else build()
    offloads = CPUOffload(offload_params=offload)
    model = FSDP(model, auto_wrap_policy=POLICY, use_orig_params=original, cpu_offload=offloads)
    if not before:
        model.half()
    plain = build().half()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(2):
        model(batch(step, context.rank).half()).float().pow(2).mean().backward()
        kinds = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        assert kinds == {torch.float16}
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(context.world_size):
            loss = plain(batch(step, rank).half()).float().pow(2).mean()
            (loss / context.world_size).backward()
        other.step()
        other.zero_grad()
    agrees(model, plain, tolerance=5e-3)


@ORIGINAL
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_a_model_in_half_precision_trains(*, before: bool, original: bool, offload: bool) -> None:
    on_ranks(_halves, 2, before=before, original=original, offload=offload)


def _offloaded_norm(context: RankContext, *, original: bool) -> str:
    model = wrapped(use_orig_params=original, cpu_offload=CPUOffload(offload_params=True))
    loss_of(model, batch(0, context.rank)).backward()
    norm = model.clip_grad_norm_(0.05)
    plain = build()
    mean_gradients(plain, context.world_size, 0)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=1e-6)
    return norm.device.type


@ORIGINAL
def test_the_norm_of_offloaded_gradients_is_on_the_host(*, original: bool) -> None:
    assert agreed(_offloaded_norm, 2, original=original) == "cpu"


def _norm_dtype(context: RankContext, dtypes: list[str]) -> str:
    """The norm is in the widest dtype of the gradients, and each gradient keeps its own."""
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    parts = nn.Sequential(*(nn.Linear(10, 10).to(kind) for kind in kinds))
    model = FSDP(parts, auto_wrap_policy=CustomPolicy(lambda m: isinstance(m, nn.Linear)))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    norm = model.clip_grad_norm_(1.0)
    assert [p.grad.dtype for p in model.parameters()] == kinds
    return str(norm.dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        (["float16", "float16"], "float16"),
        (["float16", "float32"], "float32"),
        (["float16", "bfloat16"], "float32"),
    ],
)
def test_the_norm_has_the_widest_dtype(dtypes: list[str], wanted: str) -> None:
    assert agreed(_norm_dtype, 2, dtypes=dtypes) == wanted


# Containers


class Named(NamedTuple):
    x: torch.Tensor
    note: str


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    note: str


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: [x, 3],
    "dict": lambda x: {"x": x, "y": None},
    "ordered": lambda x: OrderedDict([("x", x)]),
    "named": lambda x: Named(x, "kept"),
    "dataclass": lambda x: Data(x, "kept"),
    "packed": lambda x: pack_padded_sequence(x[:, None], torch.ones(len(x)), batch_first=True),
}


def tensor_in(container: Any) -> torch.Tensor:
    if isinstance(container, (PackedSequence,)):
        return container.data
    if isinstance(container, list):
        return container[0]
    return container["x"] if isinstance(container, dict) else container.x


class Opens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.kind: type | None = None

    def forward(self, given: Any, *, wrap: Callable[[torch.Tensor], Any]) -> Any:
        self.kind = type(given)
        return wrap(self.inner(tensor_in(given)))


def _containers(context: RankContext, name: str) -> None:
    make = CONTAINERS[name]
    mixed = MixedPrecision(param_dtype=LOW)
    model = wrapped(Opens, auto_wrap_policy=None, mixed_precision=mixed)
    x = batch(0, context.rank).requires_grad_()
    given = make(x)
    output = model(given, wrap=make)
    assert model.module.kind is type(given) is type(output)
    assert tensor_in(output).dtype == LOW
    tensor_in(output).sum().backward()
    assert model._flat_param.grad is not None
    assert x.grad is not None


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_types(name: str) -> None:
    on_ranks(_containers, 2, name=name)


# What children of a policy inherit


def _inherited(context: RankContext) -> None:
    given: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "cpu_offload": CPUOffload(offload_params=True),
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "mixed_precision": MixedPrecision(param_dtype=LOW),
        "forward_prefetch": True,
        "limit_all_gathers": False,
        "use_orig_params": True,
    }
    model = wrapped(**given)
    units = FSDP.fsdp_modules(model)
    assert len(units) == 3
    for unit in units:
        for name, value in given.items():
            assert getattr(unit._arguments, name) == value
        assert unit._state.mesh_info.mesh is model._state.mesh_info.mesh
    policy = CustomPolicy(
        lambda m: isinstance(m, Residual) and {"sharding_strategy": ShardingStrategy.FULL_SHARD}
    )
    model = wrapped(**{**given, "auto_wrap_policy": policy})
    strategies = [unit.sharding_strategy.name for unit in FSDP.fsdp_modules(model)]
    assert strategies == ["SHARD_GRAD_OP", "FULL_SHARD", "FULL_SHARD"]


def test_children_of_a_policy_get_what_the_root_got() -> None:
    on_ranks(_inherited, 2)


# Whole parameters of a single element


def _singleton(context: RankContext, *, original: bool) -> float:
    model = FSDP(nn.Linear(1, 1, bias=False), use_orig_params=original)
    with FSDP.summon_full_params(model), torch.no_grad():
        # Ranks should write the same; what counts is what the owner writes.
        model.weight.fill_(1.0 + context.rank)
    with FSDP.summon_full_params(model, writeback=False):
        return model.weight.item()


@ORIGINAL
def test_the_owner_writes_a_single_element(*, original: bool) -> None:
    assert agreed(_singleton, 2, original=original) == 1.0


# Beside the compiler


def _compiled(context: RankContext, *, original: bool) -> None:
    """The wrapped model inside a captured graph computes what it computes without."""
    torch._dynamo.reset()
    model, plain = wrapped(use_orig_params=original), build()
    compiled = torch.compile(model, backend="eager")
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(2):
        loss = loss_of(compiled, batch(step, context.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    wanted = train_plain(plain, context.world_size, steps=2)
    agrees(model, plain)
    if context.rank == 0:
        torch.testing.assert_close(losses, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "original",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["flat", "original"],
)
def test_a_compiled_wrapper_trains_alike(*, original: bool) -> None:
    on_ranks(_compiled, 2, original=original, fresh=True)


# Made late, in low precision, with batch norms apart


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.inp(x)))


def _late_and_low(context: RankContext, *, with_init: bool) -> None:
    with torch.device("meta"):
        inner = Normed()

    def init(module: nn.Module) -> None:
        if list(module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()

    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        model = FSDP(
            inner,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32),
            param_init_fn=init if with_init else None,
        )
    losses = train(model, context.rank)
    assert all(loss == loss for loss in losses)  # no nan
    assert model.norm.module.running_mean.dtype == torch.float32
    values = model.state_dict()
    assert list(values) == list(Normed().state_dict())
    assert all(value.isfinite().all() for value in values.values())


@pytest.mark.parametrize("with_init", [False, True])
def test_a_model_on_meta_may_be_of_low_precision(*, with_init: bool) -> None:
    on_ranks(_late_and_low, 2, with_init=with_init)

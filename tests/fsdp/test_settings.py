"""What a user may set on a unit, each with its effect and its refusals."""

from __future__ import annotations

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from conformance.ranks import RankContext
from fsdp import (
    CPUOffloadPolicy,
    FSDPMeshInfo,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    disable_fsdp_module_new_init,
    fully_shard,
    get_cls_to_fsdp_cls,
)
from fsdp.engine.group_options import GroupOptions
from fsdp.engine.layout import side_by_side
from fsdp.engine.readiness import check_ready
from fsdp.engine.reduction import uniform_dtype
from fsdp.engine.torch_private import has_replicate
from tests.fsdp.plain import (
    DIM,
    batch,
    build,
    compare,
    loss_of,
    optimizer_of,
    train_plain,
    train_sharded,
    whole,
)
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks
from tests.fsdp.test_parallel import Pair
from tests.fsdp.test_training import shard_blocks


def _async_unshard(context: RankContext) -> None:
    model, plain = shard_blocks(build()), build()
    model._set_unshard_async_op(True)
    assert all(g.settings.unshard_async_op for s in model._states(recurse=True) for g in s.groups)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


@pytest.mark.parametrize("world", [1, 2])
def test_implicit_unshards_may_be_asynchronous(world: int) -> None:
    on_ranks(_async_unshard, world)


class Waits:
    """Streams of which only the waiting is recorded."""

    def __init__(self, streams: Any) -> None:
        self._streams, self.seen = streams, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def record(self, stream: Any = None, event: Any = None) -> Any:
        return "everything so far"

    def wait(self, stream: Any, event: Any) -> None:
        self.seen.append(event)


def _optimizer_event(context: RankContext) -> list[Any]:
    model = shard_blocks(build())
    comm = fully_shard.state(model).comm()
    comm.streams = waits = Waits(comm.streams)
    first = []
    for event in (None, "the optimizer's end", None):
        if event is not None:
            model.set_post_optim_event(event)
        waits.seen.clear()
        model(batch(0, context.rank)).sum().backward()
        first.append(waits.seen[0])
    return first


def test_gathers_wait_for_the_optimizers_event_once_instead_of_everything() -> None:
    wanted = ["everything so far", "the optimizer's end", "everything so far"]
    assert agreed(_optimizer_event, 2) == wanted


def several_groups() -> nn.Module:
    """A unit whose two parameters travel in groups of their own."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    info = FSDPMeshInfo(mesh["two"], shard_mesh_dim=0)
    return fully_shard(
        nn.Linear(DIM, DIM),
        mesh=mesh["one"],
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), info) if p.ndim == 1 else None,
    )


def hybrid() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(nn.Linear(DIM, DIM), mesh=mesh)


def integer_beside_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = build(Pair)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel()})
    shard_blocks(model, mesh=mesh["dp"])
    model(batch(0, 0))
    smaller = FSDPMeshInfo(mesh["tp"], shard_mesh_dim=0)
    fully_shard.state(model.blocks[0]).groups[0].post_forward_mesh_info = smaller
    model(batch(0, 0))


def integer_with_extension() -> None:
    model = fully_shard(nn.Linear(DIM, DIM))
    local = model.weight._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(lambda self, mesh: ((self,), None), local)
    local.fsdp_post_all_gather = types.MethodType(
        lambda self, outs, meta, dtype, *, out=None: None if out is not None else (outs[0], ()),
        local,
    )
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    root = fully_shard(nn.Sequential(model))
    group = fully_shard.state(model).groups[0]
    group.post_forward_mesh_info = FSDPMeshInfo(mesh["b"], shard_mesh_dim=0)
    root(batch(0, 0))


def mixed_gradients() -> None:
    uniform_dtype([torch.ones(1), torch.ones(1, dtype=torch.float64)], "blocks.0")


def offloaded_elsewhere() -> None:
    """On a machine without accelerators no parameter is anywhere but on the CPU."""
    param = SimpleNamespace(fqn="weight", info=None)
    exposure = SimpleNamespace(local=lambda p: SimpleNamespace(device=torch.device("xla", 0)))
    options = GroupOptions(
        device=torch.device("cpu"),
        exposure=exposure,
        lay_out=side_by_side,
        mp_policy=MixedPrecisionPolicy(),
        offload_policy=CPUOffloadPolicy(),
    )
    check_ready([param], options, "")


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "gather_of_several": (
        lambda: several_groups().set_custom_all_gather(None),
        ValueError,
        "set_custom_all_gather is not supported with multiple param groups",
    ),
    "scatter_of_several": (
        lambda: several_groups().set_custom_reduce_scatter(None),
        ValueError,
        "set_custom_reduce_scatter is not supported with multiple param groups",
    ),
    "hook_of_several": (
        lambda: several_groups().set_all_reduce_hook(print),
        ValueError,
        "set_all_reduce_hook is not supported with multiple param groups",
    ),
    "group_of_several": (
        lambda: fully_shard.state(several_groups())._fsdp_param_group,
        AssertionError,
        "Expected at most 1 param group, but got 2",
    ),
    "stream_on_hybrid": (
        lambda: hybrid().set_all_reduce_hook(print, stream=object()),
        ValueError,
        "stream cannot be set when using native HSDP",
    ),
    "integer_tensor_parallel": (
        integer_beside_tensor_parallel,
        NotImplementedError,
        "Resharding to smaller mesh is not supported for DTensor parameters yet",
    ),
    "integer_extension": (
        integer_with_extension,
        NotImplementedError,
        "parameters with all-gather extensions yet",
    ),
    "gradient_dtypes": (
        mixed_gradients,
        AssertionError,
        "FSDP reduce-scatter expects uniform gradient dtype but got torch.float32, torch.float64",
    ),
    "offloaded_elsewhere": (
        offloaded_elsewhere,
        RuntimeError,
        "FSDP parameters should be materialized on CPU when enabling CPU offloading",
    ),
}


Errors = tuple[dict[str, list[str]], ...]


def _raise_all(context: RankContext) -> dict[str, list[str]]:
    return {name: error_of(call) for name, (call, *_) in CASES.items()}


@pytest.fixture(scope="module")
def errors() -> Errors:
    """Of every rank, the error of each case."""
    return on_ranks(_raise_all, 2)


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_together_is_named_on_every_rank(case: str, errors: Errors) -> None:
    _, kind, fragment = CASES[case]
    named_on_every_rank(tuple(each[case] for each in errors), kind, fragment)


def _several_groups_train(context: RankContext) -> list[Any]:
    """Groups of one unit gather and reduce separately; the unit before them is prefetched."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model, plain = build(), build()
    other = FSDPMeshInfo(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], 0)
    for unit in (*model.blocks, model):
        fully_shard(
            unit,
            mesh=mesh,
            shard_placement_fn=lambda p: (
                ShardPlacementResult(Shard(0), other) if p.ndim == 1 else None
            ),
        )
    # Both pairs see the same data: the mean over a pair is the mean over all.
    train_sharded(model, context.rank % 2)
    train_plain(plain, 2)
    compare(model, plain)
    states = [fully_shard.state(unit) for unit in (model, *model.blocks)]
    pending = [g.pending for s in states for g in s.groups]
    return [[len(s.groups) for s in states], any(pending)]


def test_units_of_several_groups_train_and_prefetch() -> None:
    assert agreed(_several_groups_train, 4) == [[2, 2, 2], False]


def _hook_stream(context: RankContext) -> list[int]:
    model = fully_shard(nn.Linear(DIM, DIM))
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda shard: seen.append(shard.clone()), stream=None)
    model.set_gradient_divide_factor(4.0)
    model.set_force_sum_reduction_for_comms(True)
    loss_of(model, batch(0, context.rank)).backward()
    shard = fully_shard.state(model).groups[0].shard
    start = shard.layout.piece(0, context.rank).offset
    local = model.weight.grad.to_local().reshape(-1)
    before = seen[0][start : start + local.numel()]
    return [len(seen), int(torch.allclose(before / 4, local))]


def test_the_all_reduce_hook_sees_the_sum_before_it_is_divided() -> None:
    assert agreed(_hook_stream, 2) == [1, 1]


def _hook_of_replicas(context: RankContext) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    plain = nn.Linear(DIM, DIM)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(DIM, DIM), mesh=mesh)
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda shard: seen.append(shard.clone()), stream=None)
    model.set_gradient_divide_factor(4.0)
    model.set_force_sum_reduction_for_comms(True)
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(context.world_size):
        loss_of(plain, batch(0, rank)).backward()
    start = fully_shard.state(model).groups[0].shard.layout.piece(0, 0).offset
    summed = seen[0][start : start + plain.weight.numel()].view_as(plain.weight)
    torch.testing.assert_close(summed, plain.weight.grad, rtol=1e-5, atol=1e-6)
    return [len(seen), int(torch.allclose(summed / 4, model.weight.grad.to_local()))]


def test_the_all_reduce_hook_sees_what_all_replicas_have_summed() -> None:
    assert agreed(_hook_of_replicas, 2) == [1, 1]


def _new_init(context: RankContext) -> list[bool]:
    cls = type(fully_shard(nn.Linear(2, 2)))
    with disable_fsdp_module_new_init():
        bare = cls(2, 2)
    made = cls(2, 2)
    return [
        type(made) is nn.Linear and hasattr(made, "weight"),
        type(bare) is nn.Linear and "_parameters" not in vars(bare),
        get_cls_to_fsdp_cls()[nn.Linear] is cls,
    ]


def test_a_swapped_class_builds_the_original_with_or_without_its_init() -> None:
    assert agreed(_new_init, 1) == [True, True, True]


class Listed(nn.ModuleList):
    """A container that can be called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


def _container(context: RankContext) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Listed([nn.Linear(DIM, DIM), nn.Linear(DIM, 2)])

    model, plain = fully_shard(make()), make()
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_a_container_with_a_forward_is_accepted() -> None:
    on_ranks(_container, 2)


def _shared_ancestors(context: RankContext) -> list[Any]:
    """A list that names a module and one below it means the module."""
    model, plain = build(), build()
    fully_shard([model, model.blocks[0], model.blocks[0].up])
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return [fully_shard.state(model.blocks[0]) is None, len(fully_shard.state(model).modules)]


def test_a_list_with_shared_ancestors_means_the_outermost() -> None:
    assert agreed(_shared_ancestors, 2) == [True, 1]


def _nested(context: RankContext) -> list[bool]:
    """Units inside units inside units."""
    model, plain = build(), build()
    for block in model.blocks:
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(model)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    units = (model, model.blocks[0], model.blocks[0].up)
    return [fully_shard.state(unit)._is_root for unit in units]


def test_units_nest_to_any_depth_under_one_root() -> None:
    assert agreed(_nested, 2) == [True, False, False]


def _replicate(context: RankContext) -> list[bool]:
    """A part that torch's ``replicate`` has taken is nobody's here."""
    model = build()
    replicate(model.blocks[0])
    fully_shard(model)
    kept = type(model.blocks[0].up.weight.data).__name__
    return [has_replicate(model.blocks[0]), kept == "Tensor"]


def test_a_replicated_module_is_left_alone() -> None:
    assert agreed(_replicate, 2) == [True, True]


class Normed(nn.Module):
    """A norm of its own dtype between blocks, and an input made in the outer forward."""

    def __init__(self, *, external: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)])
        self.external = external
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        made = torch.ones(x.shape[0], DIM) if self.external else x
        self.seen.append(made.dtype)
        return self.blocks[1](made) + x.mean()


def _norms(context: RankContext, *, own_policy: bool, external: bool) -> list[str]:
    bf16 = MixedPrecisionPolicy(torch.bfloat16)
    model = build(Normed, external=external)
    if own_policy:
        policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16, cast_forward_inputs=True)
        fully_shard(model.blocks[0], mp_policy=MixedPrecisionPolicy(torch.float32))
        fully_shard(model.blocks[1], mp_policy=policy)
    seen: list[str] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, out: seen.append(str(out.dtype)))
    fully_shard(model, mp_policy=bf16)
    try:
        model(batch(0, context.rank)).float().sum().backward()
    except RuntimeError as error:
        return [str(error)[:41]]
    return [*seen, str(model.seen[0])]


def test_an_inner_norm_computes_in_the_dtype_of_its_own_policy() -> None:
    found = agreed(_norms, 2, own_policy=True, external=True)
    # Outputs of the norm, cast by nobody, of the second block, and the input made outside.
    assert found == ["torch.float32", "torch.bfloat16", "torch.float32"]


def test_without_a_policy_of_its_own_a_norm_gets_parameters_and_buffers_of_two_dtypes() -> None:
    # torch's kernel refuses; on accelerators the text is "Expected running_mean to have type".
    (text,) = agreed(_norms, 2, own_policy=False, external=False)
    assert text.startswith("expected scalar type BFloat16 but found F")


class Members(nn.Module):
    """Two modules in one group, of which one forward runs the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def _partial_cast(context: RankContext) -> list[str]:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model = build(Members)
    fully_shard([model.first, model.second], mp_policy=policy)
    fully_shard(model)
    out = model(batch(0, context.rank))
    out.sum().backward()
    return [str(out.dtype), str(model.first.weight.grad is not None)]


def test_outputs_of_a_partial_group_are_cast_as_well() -> None:
    assert agreed(_partial_cast, 2) == ["torch.float64", "True"]


def _offloaded_states(context: RankContext) -> list[Any]:
    policy = CPUOffloadPolicy(pin_memory=False)
    model = shard_blocks(build(), offload_policy=policy)
    saved = model.state_dict()
    with torch.device("meta"):
        fresh = build()
    shard_blocks(fresh, offload_policy=policy)
    fresh.load_state_dict(saved, assign=True)
    train_sharded(fresh, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    compare(fresh, plain)
    tensors = [v for name, v in saved.items() if name != "scale"]
    return [{t.to_local().device.type for t in tensors} == {"cpu"}, tensors[0].device_mesh.ndim]


def test_an_offloaded_state_dict_fills_a_model_on_meta() -> None:
    assert agreed(_offloaded_states, 2) == [True, 1]


def _reduced_once(context: RankContext, *, prefetch: bool) -> list[int]:
    """After no_sync, a unit that runs three times in one forward is reduced once."""

    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList([nn.Linear(DIM, DIM)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for _ in range(3):
                x = torch.tanh(self.blocks[0](x))
            return x

    model, plain = shard_blocks(build(Reused)), build(Reused)
    if prefetch:
        model.blocks[0].set_modules_to_backward_prefetch([model])
    counts = []

    def before(module: nn.Module, part: int) -> None:
        module.set_requires_gradient_sync(part == 1)
        counts.append(sum(r.op == "reduce_scatter" for r in context.recorder.records))

    train_sharded(model, context.rank, micro=2, before_micro=before)
    train_plain(plain, context.world_size, micro=2)
    compare(model, plain)
    counts.append(sum(r.op == "reduce_scatter" for r in context.recorder.records))
    return counts


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_unit_called_several_times_is_reduced_once_after_no_sync(*, prefetch: bool) -> None:
    # At the start of each micro-batch: two groups reduce in the second of each step.
    assert agreed(_reduced_once, 2, prefetch=prefetch) == [0, 0, 2, 2, 4, 4, 6]


WAITING: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("set_requires_gradient_sync", {}),
    "in_the_reduce_dtype": (
        "set_requires_gradient_sync",
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    ),
    "for_replicas": ("set_requires_all_reduce", {}),
}


def _dropped(context: RankContext, waiting: str, way: str) -> None:
    """What waits is dropped, in one block alone if it is told so."""
    setter, options = WAITING[waiting]
    shape, names = (context.world_size,), ("shard",)
    if waiting == "for_replicas":
        shape, names = (context.world_size, 1), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, plain = shard_blocks(build(), mesh=mesh, **options), build()
    getattr(model, setter)(False)
    loss_of(model, batch(9, context.rank)).backward()
    getattr(model, setter)(True)
    dropped = [model, plain]
    if way == "zero_grad of a block":
        dropped = [model.blocks[0], plain.blocks[0]]
    getattr(dropped[0], way.partition(" ")[0])()
    loss_of(model, batch(0, context.rank)).backward()
    for step in (9, 0):
        for rank in range(context.world_size):
            (loss_of(plain, batch(step, rank)) / context.world_size).backward()
        if step == 9:
            dropped[1].zero_grad()
    for module in (model, plain):
        optimizer_of(module.parameters(), "sgd").step()
    compare(model, plain)


@pytest.mark.parametrize("way", ["zero_grad", "zero_grad of a block", "reset_iter_state"])
@pytest.mark.parametrize("waiting", WAITING)
def test_gradients_that_wait_can_be_dropped(waiting: str, way: str) -> None:
    on_ranks(_dropped, 2, waiting=waiting, way=way)


def _left_over(context: RankContext) -> list[bool]:
    """A branch runs forward twice, but backward goes through one of them only."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList([nn.Linear(DIM, DIM)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            kept = self.blocks[0](x)
            self.blocks[0](kept)  # nobody uses this one
            return kept

    model, plain = shard_blocks(build(Branch)), build(Branch)

    def before(module: nn.Module, part: int) -> None:
        module.set_requires_gradient_sync(part == 1)

    train_sharded(model, context.rank, micro=2, before_micro=before)
    train_plain(plain, context.world_size, micro=2)
    compare(model, plain)
    return [p.grad is None for p in model.parameters()]


def test_gradients_held_back_are_reduced_at_the_end_of_backward_at_the_latest() -> None:
    assert all(agreed(_left_over, 2))


def _evaluations(context: RankContext) -> list[int]:
    model = shard_blocks(build())
    loss_of(model, batch(0, context.rank)).backward()
    comm = fully_shard.state(model).comm()
    groups = [g for s in model._states(recurse=True) for g in s.groups]
    with torch.no_grad():
        for _ in range(3):
            model(batch(0, context.rank))
    return [len(comm.post_forward_order), sum(len(g.post_forward_indices) for g in groups)]


def test_evaluations_leave_no_order_behind() -> None:
    assert agreed(_evaluations, 2) == [0, 0]


def _stale_gather(context: RankContext, kind: str) -> bool:
    """Loading a state while a gather is in flight shows the loaded values."""
    # One matrix whose rows divide is gathered in place, into what the parameter is a view of.
    model = nn.Module()
    block = nn.Linear(8, 8, bias=False) if kind == "in_place" else build().blocks[0]
    model.blocks = nn.ModuleList([block])
    shard_blocks(model)
    zeros = {name: torch.zeros_like(p) for name, p in block.state_dict().items()}
    block.unshard(async_op=True)
    block.load_state_dict(zeros)
    (group,) = fully_shard.state(block).groups
    assert group._whole._buffer.data.untyped_storage().nbytes() == 0
    block.unshard()
    return not any(p.any() for p in block.parameters())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["in_place", "copied_out"])
def test_a_gather_in_flight_is_dropped_when_a_state_is_loaded(world: int, kind: str) -> None:
    assert agreed(_stale_gather, world, kind=kind) is True


def test_an_offload_policy_by_itself_offloads_nothing() -> None:
    policies = (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False), CPUOffloadPolicy())
    found = [
        (options.offload, options.pin_memory)
        for device in ("meta", "cpu")
        for policy in policies
        for options in [
            GroupOptions(
                device=torch.device(device),
                exposure=None,
                lay_out=side_by_side,
                mp_policy=MixedPrecisionPolicy(),
                offload_policy=policy,
            )
        ]
    ]
    elsewhere, on_the_host = found[:3], found[3:]
    assert elsewhere == [(False, False), (True, False), (True, True)]
    # where the host computes there is nothing to copy to
    assert on_the_host == [(False, False), (True, False), (True, False)]


def _deprecated(context: RankContext) -> list[Any]:
    model = fully_shard(nn.Linear(DIM, DIM))
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(3.0)
    return [fully_shard.state(model).groups[0].settings.gradient_divide_factor]


def test_the_old_name_of_the_divide_factor_warns() -> None:
    assert agreed(_deprecated, 1) == [3.0]


def _extension_mesh(context: RankContext) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(DIM, DIM), mesh=mesh)
    local, seen = model.weight._local_tensor, []

    def before(self: torch.Tensor, mesh: Any) -> Any:
        seen.extend([mesh.ndim, mesh.size()])
        return (self.detach(),), None

    local.fsdp_pre_all_gather = types.MethodType(before, local)
    local.fsdp_post_all_gather = types.MethodType(
        lambda self, outs, meta, dtype, *, out=None: None if out is not None else (outs[0], ()),
        local,
    )
    loss_of(model, batch(0, context.rank)).backward()
    plain = nn.Linear(DIM, DIM)
    assert whole(model.weight.grad).shape == plain.weight.shape
    return seen


def test_an_extension_is_given_the_shard_mesh_only() -> None:
    assert agreed(_extension_mesh, 4)[:2] == [1, 2]

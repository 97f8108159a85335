"""Bad input is named: by type, by fragment, on every rank, without a hang."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from conformance.ranks import RankContext
from fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from tests.fsdp.plain import DIM, batch, build, loss_of
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks
from tests.fsdp.test_training import shard_blocks


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded() -> nn.Module:
    return fully_shard(linear())


def twice() -> None:
    fully_shard(sharded())


def scalar() -> None:
    module = linear()
    module.temperature = nn.Parameter(torch.tensor(1.0))
    fully_shard(module)


def strided() -> None:
    module = linear()
    module.weight = nn.Parameter(torch.randn(DIM, DIM).t())
    fully_shard(module)


def two_dtypes() -> None:
    module = nn.Sequential(linear(), linear().to(torch.float64))
    fully_shard(module)(batch(0, 0))


def grouped_root() -> None:
    modules = [linear(), linear()]
    fully_shard(modules)
    modules[0](batch(0, 0))


def child_first() -> None:
    model = shard_blocks(build())
    model.blocks[0](batch(0, 0))
    model(batch(0, 0))


def old_optimizer() -> None:
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fully_shard(module)
    optimizer.step()


def early_optimizer() -> None:
    module = sharded()
    loss = module(batch(0, 0)).sum()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()


def replaced() -> None:
    module = sharded()
    module.weight = nn.Parameter(torch.zeros(DIM, DIM))
    module(batch(0, 0))


def plain_on_named_mesh() -> None:
    named = mesh(2, 1, names=("dp", "tp"))
    fully_shard(linear(), mesh=named, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def root_first() -> None:
    model = nn.Sequential(linear())
    fully_shard(model)
    fully_shard(model[0])


class _Named:
    """Classes that have the names of this package's."""

    class MixedPrecisionPolicy:
        pass

    class CPUOffloadPolicy:
        pass


def reset_inner() -> None:
    model = shard_blocks(build())
    model(batch(0, 0))
    model.blocks[0].reset_iter_state()


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "twice": (twice, AssertionError, "can only be applied to a module once"),
    "container": (
        lambda: fully_shard(nn.ModuleList([linear()])),
        ValueError,
        "does not support containers that do not implement forward",
    ),
    "mesh_3d": (
        lambda: fully_shard(linear(), mesh=mesh(2, 1, 1, names=("a", "b", "c"))),
        ValueError,
        "fully_shard expects a 1D or 2D DeviceMesh but got",
    ),
    "mesh_2d_unnamed": (
        lambda: fully_shard(linear(), mesh=mesh(1, 2)),
        AssertionError,
        "Please init the 2D mesh for HSDP with mesh_dim_names specified",
    ),
    "scalar": (scalar, ValueError, "fully_shard doesn't support scalar parameters"),
    "strided": (strided, NotImplementedError, "does not support non-contiguous parameters"),
    "deepcopy": (
        lambda: copy.deepcopy(sharded()),
        AssertionError,
        "FSDP does not support deepcopy",
    ),
    "int_no_factor": (
        lambda: fully_shard(linear(), reshard_after_forward=3),
        ValueError,
        "it should be a factor of",
    ),
    "reshard_type": (
        lambda: fully_shard(linear(), reshard_after_forward="yes"),
        ValueError,
        "reshard_after_forward should be a bool or an int",
    ),
    "placement": (
        lambda: fully_shard(linear(), shard_placement_fn=lambda p: 1),
        ValueError,
        "Invalid shard_placement_fn result",
    ),
    "placement_dim": (
        lambda: fully_shard(linear(), shard_placement_fn=lambda p: Shard(2)),
        AssertionError,
        "Shard dim 2 is invalid for 2D tensor",
    ),
    "uneven_dim_1": (
        lambda: fully_shard(nn.Linear(3, 4, bias=False), shard_placement_fn=lambda p: Shard(1)),
        NotImplementedError,
        "FSDP does not support uneven sharding on dim 1",
    ),
    "two_dtypes": (two_dtypes, AssertionError, "FSDP expects uniform original parameter dtype"),
    "meta": (
        lambda: fully_shard(nn.Linear(4, 4, device="meta"))(torch.ones(1, 4)),
        RuntimeError,
        "FSDP parameters should be materialized from meta device before training",
    ),
    "grouped_root": (grouped_root, RuntimeError, "FSDP requires a single root module but got"),
    "child_first": (
        child_first,
        RuntimeError,
        "FSDP state has already been lazily initialized for blocks.0",
    ),
    "prefetch": (
        lambda: sharded().set_modules_to_forward_prefetch([linear()]),
        ValueError,
        "Expects FSDPModule but got",
    ),
    "reshard_setter": (
        lambda: sharded().set_reshard_after_forward(2),
        ValueError,
        "reshard_after_forward should be a bool",
    ),
    "buffers_bool": (
        lambda: sharded().set_reduce_scatter_max_input_buffers(True),
        TypeError,
        "max_input_buffers must be an int",
    ),
    "buffers_zero": (
        lambda: sharded().set_reduce_scatter_max_input_buffers(0),
        ValueError,
        "max_input_buffers must be a positive int",
    ),
    "method": (
        lambda: register_fsdp_forward_method(sharded(), "encode"),
        ValueError,
        "does not have a method encode",
    ),
    "share": (lambda: share_comm_ctx([linear()]), ValueError, "Expects FSDPModule but got"),
    "old_optimizer": (old_optimizer, ValueError, "sharded after it was made (weight, bias)"),
    "early_optimizer": (early_optimizer, ValueError, "whole when it was made (weight, bias)"),
    "replaced": (replaced, ValueError, "parameter 'weight' was replaced after sharding"),
    "plain_on_named_mesh": (
        plain_on_named_mesh,
        ValueError,
        "all parameters must be DTensors on the full SPMD mesh",
    ),
    "no_dims": (
        lambda: DataParallelMeshDims(),
        ValueError,
        "At least one of shard or replicate must be set",
    ),
    "unknown_dim": (
        lambda: fully_shard(
            linear(),
            mesh=mesh(2, 1, names=("dp", "tp")),
            dp_mesh_dims=DataParallelMeshDims(shard="cp"),
        ),
        ValueError,
        "Mesh dim name 'cp' not found",
    ),
    "unnamed_mesh": (
        lambda: fully_shard(linear(), mesh=mesh(2), dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        ValueError,
        "mesh must have mesh_dim_names",
    ),
    "reset_inner": (
        reset_inner,
        RuntimeError,
        "reset_iter_state must be called on the root FSDP module",
    ),
    "dtype_type": (
        lambda: MixedPrecisionPolicy(param_dtype="bf16"),
        TypeError,
        "param_dtype must be a torch.dtype",
    ),
    "dtype_int": (
        lambda: MixedPrecisionPolicy(reduce_dtype=torch.int32),
        ValueError,
        "reduce_dtype must be a floating-point dtype",
    ),
    "empty_list": (lambda: fully_shard([]), ValueError, "empty sequence"),
    "no_module": (
        lambda: fully_shard(None),
        TypeError,
        "fully_shard shards an nn.Module or a sequence of them, got None",
    ),
    "parameters": (
        lambda: fully_shard(linear().parameters()),
        TypeError,
        "got a sequence with Parameter of shape (10, 10)",
    ),
    "module_dict": (lambda: fully_shard({"a": linear()}), TypeError, "of them, got dict {'a'"),
    "module_class": (lambda: fully_shard(nn.Linear), TypeError, "of them, got <class 'torch.nn"),
    "none_in_list": (
        lambda: fully_shard([linear(), None]),
        TypeError,
        "got a sequence with None",
    ),
    "mesh_name": (
        lambda: fully_shard(linear(), mesh="x"),
        TypeError,
        "fully_shard: mesh must be a DeviceMesh, got str 'x'; make one by init_device_mesh",
    ),
    "mesh_group": (
        lambda: fully_shard(linear(), mesh=dist.group.WORLD),
        TypeError,
        "make one with DeviceMesh.from_group",
    ),
    "mesh_device": (
        lambda: fully_shard(linear(), mesh=DeviceMesh("meta", [0, 1])),
        ValueError,
        "fully_shard: the mesh is of 'meta' devices, and here are cpu",
    ),
    "mp_none": (
        lambda: fully_shard(linear(), mp_policy=None),
        TypeError,
        "fully_shard: mp_policy must be a MixedPrecisionPolicy of fsdp, got None; leave it out",
    ),
    "mp_dtype": (
        lambda: fully_shard(linear(), mp_policy=torch.bfloat16),
        TypeError,
        "pass MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    ),
    "mp_class": (
        lambda: fully_shard(linear(), mp_policy=MixedPrecisionPolicy),
        TypeError,
        "got <class 'fsdp.api.MixedPrecisionPolicy'>",
    ),
    "mp_other": (
        lambda: fully_shard(linear(), mp_policy=_Named.MixedPrecisionPolicy()),
        TypeError,
        "; policies of torch.distributed.fsdp are other classes",
    ),
    "offload_true": (
        lambda: fully_shard(linear(), offload_policy=True),
        TypeError,
        "fully_shard: offload_policy must be an OffloadPolicy of fsdp, got bool True; pass"
        " CPUOffloadPolicy() to offload",
    ),
    "offload_class": (
        lambda: fully_shard(linear(), offload_policy=CPUOffloadPolicy),
        TypeError,
        "got <class 'fsdp.api.CPUOffloadPolicy'>",
    ),
    "offload_other": (
        lambda: fully_shard(linear(), offload_policy=_Named.CPUOffloadPolicy()),
        TypeError,
        "; policies of torch.distributed.fsdp are other classes",
    ),
    "ignored_name": (
        lambda: fully_shard(linear(), ignored_params={"weight"}),
        TypeError,
        "a member of ignored_params must be a parameter, got str 'weight'; pass"
        " module.get_parameter('weight')",
    ),
    "ignored_module": (
        lambda: fully_shard(linear(), ignored_params=linear()),
        TypeError,
        "ignored_params must be a set of parameters, got Linear Linear(in_features=10",
    ),
    "ignored_bool": (
        lambda: fully_shard(linear(), ignored_params=True),
        TypeError,
        "ignored_params must be a set of parameters, got bool True",
    ),
    "ignored_one": (
        lambda: fully_shard(linear(), ignored_params=linear().weight),
        TypeError,
        "ignored_params must be a set of parameters, got Parameter of shape (10, 10)",
    ),
    "placement_fn": (
        lambda: fully_shard(linear(), shard_placement_fn="x"),
        TypeError,
        "fully_shard: shard_placement_fn must be a function of a parameter, got str 'x'",
    ),
    "placement_no_fn": (
        lambda: fully_shard(linear(), shard_placement_fn=Shard(1)),
        TypeError,
        "pass lambda param: Shard(1)",
    ),
    "dims_name": (
        lambda: fully_shard(linear(), dp_mesh_dims="dp"),
        TypeError,
        "fully_shard: dp_mesh_dims must be a DataParallelMeshDims of fsdp, got str 'dp'",
    ),
    "reshard_without_parameters": (
        lambda: fully_shard(nn.ReLU(), reshard_after_forward="yes"),
        ValueError,
        "reshard_after_forward should be a bool or an int",
    ),
    "int_no_factor_remedy": (
        lambda: fully_shard(linear(), reshard_after_forward=3),
        ValueError,
        "a factor of 2, not 3: parameters are sharded over 2 of 2 ranks. Pass one of 1, 2, or True",
    ),
    "root_first": (
        root_first,
        ValueError,
        "an earlier call, on FSDPSequential, has sharded parameter 'weight' of Linear already."
        " Call fully_shard on inner modules first",
    ),
    "pickle": (
        lambda: pickle.dumps(sharded()),
        pickle.PicklingError,
        "FSDP does not support pickling or copying a sharded module, here FSDPLinear. Save its"
        " state_dict()",
    ),
    "torch_save": (
        lambda: torch.save(nn.Sequential(sharded()), io.BytesIO()),
        pickle.PicklingError,
        "FSDP does not support pickling",
    ),
    "copy": (lambda: copy.copy(sharded()), pickle.PicklingError, "pickling or copying"),
    "cast_type": (
        lambda: MixedPrecisionPolicy(cast_forward_inputs="no"),
        TypeError,
        "MixedPrecisionPolicy: cast_forward_inputs must be a bool, got 'no'",
    ),
    "pin_type": (
        lambda: CPUOffloadPolicy(pin_memory="no"),
        TypeError,
        "CPUOffloadPolicy: pin_memory must be a bool, got 'no'",
    ),
    "dims_type": (
        lambda: DataParallelMeshDims(shard=1),
        TypeError,
        "DataParallelMeshDims: shard must be the name of a mesh dim or several, got 1",
    ),
    "dims_empty": (
        lambda: DataParallelMeshDims(shard=()),
        ValueError,
        "At least one of shard or replicate must be set",
    ),
}


def _raises(context: RankContext, case: str) -> list[str]:
    return error_of(CASES[case][0])


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_on_every_rank(case: str) -> None:
    _, kind, fragment = CASES[case]
    named_on_every_rank(on_ranks(_raises, 2, case=case), kind, fragment)


def _half_good() -> nn.Module:
    """Its last parameter cannot be sharded."""
    model = nn.Sequential(linear(), linear())
    model.strided = nn.Parameter(torch.randn(DIM, DIM + 1).t())
    return model


UNCHANGED: dict[str, dict[str, Any]] = {
    "parameter": {},
    "placement": {"shard_placement_fn": lambda p: Shard(p.ndim)},
    "function": {"shard_placement_fn": lambda p: 1 / 0 if p.ndim == 1 else None},
    "number": {"reshard_after_forward": 3},
    "policy": {"mp_policy": None},
}


def _refused(context: RankContext, what: str) -> list[Any]:
    model = _half_good()
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    name = error_of(lambda: fully_shard(model, **UNCHANGED[what]))[0]
    after = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    del model.strided
    fully_shard(model)  # no trace is left of the first call
    model(batch(0, context.rank))
    return [name, before == after]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("parameter", "NotImplementedError"),
        ("placement", "AssertionError"),
        ("function", "ZeroDivisionError"),
        ("number", "ValueError"),
        ("policy", "TypeError"),
    ],
)
def test_a_refused_call_changes_nothing(what: str, error: str) -> None:
    assert agreed(_refused, 2, what=what) == [error, True]


def _outside(context: RankContext) -> list[str]:
    inside = DeviceMesh("cpu", [0])
    return error_of(lambda: fully_shard(linear(), mesh=inside)(batch(0, 0)))


def test_a_rank_that_is_not_in_the_mesh_is_told_so() -> None:
    inside, outside = on_ranks(_outside, 2)
    assert inside == ["", ""]
    assert outside[0] == "ValueError"
    assert outside[1].startswith("fully_shard: rank 1 is not in the mesh, whose ranks are [0].")


def test_a_missing_group_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    kind, text = error_of(lambda: fully_shard(linear()))
    assert kind == "ValueError"
    assert "there is no process group, and none could be started: Error initializing" in text
    assert text.endswith("init_process_group first, or start the script with torchrun.")


def _ignored_part(context: RankContext, names: list[str]) -> list[list[str]]:
    """What the outer call ignores, an inner one that ignores the rest may shard later."""
    model = nn.Sequential(linear(), linear())
    kinds = []
    later = {model[0].get_parameter(name) for name in names}
    fully_shard(model, ignored_params=later)
    kinds.append([type(p).__name__ for p in model.parameters()])
    fully_shard(model[0], ignored_params=set(model[0].parameters()) - later)
    kinds.append([type(p).__name__ for p in model.parameters()])
    return kinds


@pytest.mark.parametrize("names", [["bias"], ["weight", "bias"]])
def test_parameters_that_an_outer_call_ignored_may_be_sharded_later(names: list[str]) -> None:
    before, after = agreed(_ignored_part, 2, names=names)
    assert before.count("Parameter") == len(names)
    assert after == ["DTensor"] * 4


def _different_models(context: RankContext, what: str) -> str:
    torch.manual_seed(0)
    width = 12 if what == "shape" and context.rank == 1 else 13
    model = nn.Sequential(nn.Linear(DIM, width), nn.Linear(width, DIM))
    if what == "dtype" and context.rank == 1:
        model.to(torch.float64)
    if what == "frozen" and context.rank == 1:
        model[1].bias.requires_grad_(False)
    if what == "missing" and context.rank == 1:
        model = nn.Sequential(nn.Linear(DIM, width))
    fully_shard(model)
    try:
        model(batch(0, 0).to(model[0].weight.dtype))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "fragment"),
    [
        ("shape", "rank 0 has '0.weight' (13, 10) float32"),
        ("dtype", "rank 1 has '0.weight' (13, 10) float64"),
        ("frozen", "rank 1 has '1.bias' (10,) float32 frozen"),
        ("missing", "rank 1 has no more parameters"),
    ],
)
def test_ranks_with_different_models_all_hear_the_first_difference(
    what: str, fragment: str
) -> None:
    assert fragment in agreed(_different_models, 2, what=what)


def _refused_twice(context: RankContext) -> list[list[str]]:
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fully_shard(module)
    return [error_of(optimizer.step) for _ in range(2)]


def test_an_optimizer_that_was_refused_is_refused_again() -> None:
    first, again = agreed(_refused_twice, 2)
    assert first == again
    assert first[0] == "ValueError"


def _problem_on_one_rank(context: RankContext) -> list[str]:
    module = nn.Linear(DIM, DIM, device="meta" if context.rank == 1 else "cpu")
    fully_shard(module)
    try:
        module(batch(0, 0))
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    return []


def test_a_problem_of_one_rank_is_raised_on_all() -> None:
    first, second = on_ranks(_problem_on_one_rank, 2)
    assert first[0] == second[0] == "RuntimeError"
    assert first[1].startswith("on rank 1: FSDP parameters should be materialized")
    assert second[1].startswith("FSDP parameters should be materialized")


def _repairable(context: RankContext) -> bool:
    module = fully_shard(nn.Linear(DIM, DIM, device="meta"))
    try:
        module(batch(0, 0))
    except RuntimeError:
        module.to_empty(device="cpu")
        module.apply(lambda m: m.reset_parameters())
    return module(batch(0, 0)).isfinite().all().item()


def test_a_refused_start_can_be_repaired() -> None:
    assert agreed(_repairable, 2) is True


def _offload_elsewhere(context: RankContext) -> str:
    module = fully_shard(
        nn.Linear(4, 4, device="meta"), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    try:
        module.unshard()
    except RuntimeError as error:
        return str(error)
    return ""


def test_meta_parameters_are_named() -> None:
    assert "['weight', 'bias']" in agreed(_offload_elsewhere, 2)


def _nan(context: RankContext) -> list[bool]:
    module = fully_shard(nn.Linear(DIM, 2))
    x = batch(0, context.rank)
    if context.rank == 1:
        x[0, 0] = float("nan")
    loss_of(module, x).backward()
    return [p.grad.full_tensor().isnan().all().item() for p in module.parameters()]


def test_nan_gradients_are_kept() -> None:
    assert agreed(_nan, 2) == [True, True]


def test_a_sharded_class_can_be_told() -> None:
    assert not isinstance(linear(), FSDPModule)
    assert fully_shard.state(linear()) is None

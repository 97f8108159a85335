"""Small parts by themselves, on one rank or on none where that is enough."""

from __future__ import annotations

import linecache
import logging
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard, wrapper
from fsdp.empty_shard import EmptyShard
from fsdp.engine.extension import ExtendedParams
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.reduction import Reduction
from fsdp.flat_parameter import set_gradient
from fsdp.outer_form import outer_form
from fsdp.wrapper_making import own_tensors
from fsdp.wrapper_setup import materialize
from tests.fsdp.ranks import agreed
from tests.fsdp.streams import OrderedStreams
from tests.fsdp.test_wrapper_errors import WARNINGS

# Gradients


def test_a_norm_of_no_given_order_is_the_second_beside_nothing_as_well() -> None:
    empty = EmptyShard.of(torch.empty(0, 3))
    _, full = torch._foreach_norm([empty, torch.full((4,), -2.0)])
    assert full.item() == 4.0
    assert torch.linalg.vector_norm(empty).item() == 0.0


def test_a_gradient_that_fits_is_set_as_it_is() -> None:
    param, gradient = nn.Parameter(torch.ones(2)), torch.ones(2)
    set_gradient(param, gradient)
    assert param.grad is gradient


def _zeros_first(context: RankContext) -> list[Any]:
    """The first parameter has no gradient but the zeros that a user sets; the others have."""
    model = FSDP(nn.Linear(2, 2), use_orig_params=True)
    model(torch.ones(1, 2)).sum().backward()
    weight, bias = model.parameters()
    weight.grad = None
    with FSDP.summon_full_params(model, with_grads=True):
        weight.grad = torch.zeros(2, 2)
        bias.grad *= 3
    return [weight.grad is None, bias.grad.tolist()]


def test_zeros_that_stand_for_no_gradient_hide_no_later_one() -> None:
    assert agreed(_zeros_first, 1) == [True, [3.0, 3.0]]


@pytest.mark.parametrize(("last", "outlives"), [("reduce", False), ("all-reduce", True)])
def test_a_reduced_shard_is_kept_for_another_stream_only(last: str, *, outlives: bool) -> None:
    reduction = Reduction.__new__(Reduction)
    reduction._streams = OrderedStreams()
    reduction.end = (last, None)
    assert reduction.outlives_scatter is outlives


# Rows and meshes


@pytest.mark.parametrize("rows", [1, 2])
def test_a_rank_of_fewer_rows_sends_as_many_as_the_others(rows: int) -> None:
    info: Any = SimpleNamespace(shard_size=2)
    param: Any = SimpleNamespace(shape=torch.Size([3, 4]), dim=0)
    device, exposure = torch.device("cpu"), mock.Mock()
    extended = ExtendedParams([], exposure, info, device, MixedPrecisionPolicy())
    sent = extended._padded(param, torch.empty(rows, 4), torch.ones(rows, 5))
    assert sent.shape == (2, 5)
    assert torch.equal(sent[:rows], torch.ones(rows, 5))
    assert not sent[rows:].any()


def _meshes(context: RankContext) -> list[Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    whole = torch.arange(12.0).view(3, 4)
    cut = outer_form(nn.Parameter(distribute_tensor(whole, mesh["model"], [Shard(1)])))
    alike = outer_form(nn.Parameter(distribute_tensor(whole, mesh["model"], [Replicate()])))
    assert cut is not None
    assert alike is not None
    assert torch.equal(cut.inside(whole), whole.chunk(2, 1)[context.rank])
    assert cut.inside(torch.ones(2)).tolist() == [1, 1]
    assert torch.equal(alike.inside(whole), whole)
    over = DataParallelMeshInfo(mesh["data"], shard_mesh_dim=0)
    spec = cut.chunk_spec(over, torch.float64)
    assert spec.placements == (Shard(0), Shard(1))
    assert spec.tensor_meta.dtype is torch.float64
    both = DataParallelMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return [both.shard_mesh.size(), *(both.shard_mesh.mesh_dim_names or ())]


def test_parts_beside_tensor_parallelism_and_the_mesh_of_shards() -> None:
    assert agreed(_meshes, 2) == [2, "model"]


# What a wrapper does when it is made


def test_a_module_owns_the_buffers_that_are_registered_on_it_alone() -> None:
    norm = nn.BatchNorm1d(2)
    assert own_tensors(nn.Sequential(norm), set()) == []
    assert len(own_tensors(norm, set())) == 5


def test_a_container_on_meta_is_not_asked_to_initialise_itself() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(2, affine=False))
    materialize([model, model[0]], torch.device("cpu"), None)
    assert model[0].running_var.tolist() == [1, 1]


def _stop(*_: Any) -> Any:
    raise InterruptedError


def beside_an_accelerator() -> None:
    with (
        mock.patch.object(wrapper, "compute_device", return_value=torch.device("meta")),
        mock.patch.object(wrapper, "make_mesh", _stop),
        pytest.raises(InterruptedError),
    ):
        FSDP(nn.Linear(2, 2))


def of_no_index() -> None:
    accelerator: Any = SimpleNamespace(
        current_accelerator=lambda **_: torch.device("meta"), current_device_index=lambda: 0
    )
    with (
        mock.patch.object(torch, "accelerator", accelerator),
        mock.patch.object(wrapper, "make_mesh", _stop),
        pytest.raises(InterruptedError),
    ):
        FSDP(nn.Linear(2, 2), device_id=torch.device("meta"))


def of_one_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "alone"))
    FSDP(nn.Linear(2, 2), device_mesh=mesh["alone"])


def not_sharded() -> None:
    FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)


SAID: dict[str, Callable[[], None]] = {
    **{case: cause for case, (cause, _, _) in WARNINGS.items()},
    "beside_an_accelerator": beside_an_accelerator,
    "of_no_index": of_no_index,
    "of_one_rank": of_one_rank,
    "not_sharded": not_sharded,
}


def _said(context: RankContext) -> dict[str, list[str]]:
    """The lines of code at which each warning points."""
    found = {}
    for case, cause in SAID.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cause()
        lines = [linecache.getline(each.filename, each.lineno).strip() for each in caught]
        found[case] = sorted(set(lines))
    return found


def test_warnings_point_at_the_call_of_the_user() -> None:
    found = agreed(_said, 2)
    assert found.keys() == SAID.keys()
    for case, lines in found.items():
        assert lines, case
        for line in lines:
            wanted = ("FSDP(", "clip_grad_norm_(", "summon_full_params(")
            assert any(call in line for call in wanted), f"{case}: {line}"


# Forward


class Again(nn.Module):
    """A block that is run again in backward, to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(False):
            return checkpoint(self.block, x, use_reentrant=False).sum()


def _run_again(context: RankContext) -> list[str]:
    """What the log says of the block."""
    model = Again()
    fully_shard(model.block)
    fully_shard(model)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        model(torch.ones(1, 2, requires_grad=True)).backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return [text.removeprefix("FSDP::").split()[0] for text in said if "(block)" in text]


def test_a_forward_that_is_run_again_ends_nothing() -> None:
    passes = ["pre_forward", "post_forward", "pre_backward", "post_backward"]
    assert agreed(_run_again, 1) == passes

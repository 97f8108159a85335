"""Parts of the engine by themselves, and the names and guards that surround it."""

from __future__ import annotations

import gc
import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fsdp
from conformance.ranks import RankContext
from fsdp import FSDPMeshInfo, fully_shard
from fsdp.clip import norm_of
from fsdp.engine import division
from fsdp.engine.division import choose_division
from fsdp.engine.managed import move_to
from fsdp.engine.optimizer_guard import refuse_in_optimizers
from fsdp.engine.state import TRAINING_STATE_CHANGES, TrainingState, check_change
from fsdp.engine.tree import to_device
from tests.fsdp.plain import batch, build, compare, train_plain, train_sharded
from tests.fsdp.ranks import agreed, error_of
from tests.fsdp.test_extension import Doubled
from tests.fsdp.test_training import shard_blocks


def _read_names(context: RankContext) -> list[bool]:
    model = shard_blocks(build())
    model(batch(0, context.rank))
    state, inner = (module._get_fsdp_state() for module in (model, model.blocks[0]))
    return [
        state._fsdp_param_groups == [state._fsdp_param_group],
        state._fsdp_param_group.fsdp_params[0].fqn == "inp.weight",
        "inp.weight" in repr(state._fsdp_param_group.fsdp_params[0]),
        "blocks.0" in repr(inner._fsdp_param_group),
        state._is_root is True and inner._is_root is False,
        inner._state_ctx is state._state_ctx and len(state._state_ctx.all_states) == 3,
        inner._comm_ctx is state._comm_ctx,
        inner._training_state.name == "IDLE",
    ]


def test_the_names_that_users_of_pytorchs_read_are_there() -> None:
    assert all(agreed(_read_names, 2))


def test_public_names_say_that_they_come_from_this_package() -> None:
    homes = {getattr(getattr(fsdp, name), "__module__", "fsdp") for name in fsdp.__all__}
    assert {home.partition(".")[0] for home in homes} == {"fsdp"}


def test_every_change_of_state_that_the_table_lacks_is_named() -> None:
    for change in itertools.product(TrainingState, TrainingState):
        if change in TRAINING_STATE_CHANGES:
            check_change("blocks.0", *change)
            continue
        with pytest.raises(RuntimeError, match=r"'blocks\.0' cannot go from .* If an exception"):
            check_change("blocks.0", *change)


def _own_process_group(context: RankContext) -> list[Any]:
    """Without a process group, the first call starts one from the environment."""
    dist.destroy_process_group()
    # Port 0 is one that is free when it is taken, not a moment before.
    launched = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in launched.items()})
    model, plain = fully_shard(build()), build()
    started = dist.is_initialized()
    train_sharded(model, 0)
    train_plain(plain, 1)
    compare(model, plain)
    return [started, dist.get_world_size()]


def test_a_process_group_is_started_if_there_is_none() -> None:
    assert agreed(_own_process_group, 1, fresh=True) == [True, 1]


def test_an_optimizer_that_holds_refused_parameters_is_named_at_its_first_step() -> None:
    refused, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    refuse_in_optimizers(refused, "block.weight", "were sharded after it was made")
    for param in (refused, other):
        param.grad = torch.ones(2)
    torch.optim.SGD([other], lr=1.0).step()
    assert other.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"SGD holds 1 parameters that were .*block\.weight"):
        torch.optim.SGD([refused], lr=1.0).step()
    assert refused.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("count", "shown"), [(3, "p0, p1, p2"), (4, "p0, p1, p2, ...")])
def test_of_many_refused_parameters_the_first_few_are_named(count: int, shown: str) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    for index, param in enumerate(params):
        refuse_in_optimizers(param, f"p{index}", "were sharded after it was made")
    with pytest.raises(ValueError, match=f"^SGD holds {count} parameters .* \\({shown}\\): "):
        torch.optim.SGD(params, lr=1.0).step()


def test_a_parameter_is_refused_still_when_another_that_was_is_gone() -> None:
    stays, goes = (nn.Parameter(torch.ones(2)) for _ in range(2))
    for param in (stays, goes):
        refuse_in_optimizers(param, "weight", "were sharded after it was made")
    del param, goes
    gc.collect()
    with pytest.raises(ValueError, match=r"SGD holds 1 parameters that were sharded after"):
        torch.optim.SGD([stays], lr=1.0).step()


META = torch.device("meta")


def test_tensors_that_cannot_be_set_are_swapped_for_moved_ones() -> None:
    param = nn.Parameter(Doubled(torch.ones(2, 3)), requires_grad=False)
    holder = nn.ParameterList([param])
    move_to(holder.parameters(), META)
    assert holder[0] is param
    assert param.device == META
    assert param.requires_grad is False


def _on_another_device(context: RankContext) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    # The only other device of this type is the same one under another name.
    return error_of(lambda: move_to([tensor], torch.device("cpu", 0)))


def test_a_dtensor_on_another_device_of_its_mesh_is_refused() -> None:
    kind, text = agreed(_on_another_device, 2)
    assert (kind, text) == ("AssertionError", "Expects DTensor to be moved to cpu but got cpu")


def test_only_tensors_that_are_elsewhere_are_moved() -> None:
    there, here = torch.ones(2, device=META), torch.ones(3)
    moved = to_device({"a": [there, 1], "b": (here,)}, META)
    assert moved["a"][0] is there
    assert moved["a"][1] == 1
    assert (moved["b"][0].device, moved["b"][0].shape) == (META, here.shape)


def _divisions(context: RankContext) -> list[Any]:
    """Who divides, for a factor that is not the number of ranks."""
    info = FSDPMeshInfo(init_device_mesh("cpu", (2,)), shard_mesh_dim=0)
    options: dict[str, Any] = {"factor": 8.0, "force_sum": False}
    found = []
    for premultiplies in (False, True):
        division = choose_division(info, torch.float32, premultiplies=premultiplies, **options)
        is_sum = division.scatter_op == dist.ReduceOp.SUM
        found.append([division.before, is_sum, division.after])
    return found


def test_a_backend_that_can_multiply_first_divides_in_the_reduction() -> None:
    assert agreed(_divisions, 2) == [[1.0, True, 8.0], [1.0, False, 1.0]]


def _divided_by(op: Any, ranks: int) -> float:
    """What a reduction over `ranks` divides the sum by."""
    if isinstance(op, SimpleNamespace):
        return 1 / op.factor
    return float(ranks) if op == dist.ReduceOp.AVG else 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [None, 1.0, 2.0, 3.0, 8.0])
def test_all_divisions_together_are_by_the_factor_or_the_number_of_ranks(
    factor: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "premul_sum", lambda factor: SimpleNamespace(factor=factor))
    for shards, replicas in itertools.product((1, 2, 3, 8), repeat=2):
        info: Any = SimpleNamespace(shard_size=shards, replicate_size=replicas)
        for force_sum, premultiplies in itertools.product((False, True), repeat=2):
            found = choose_division(
                info, dtype, factor=factor, force_sum=force_sum, premultiplies=premultiplies
            )
            # A reduction over one rank is left out.
            divided = found.before * found.after
            divided *= _divided_by(found.scatter_op, shards) if shards > 1 else 1.0
            divided *= _divided_by(found.all_reduce_op, replicas) if replicas > 1 else 1.0
            wanted = shards * replicas if factor is None else factor
            assert divided == pytest.approx(wanted), (shards, replicas, force_sum, premultiplies)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_gradients_of_several_dtypes_is_that_of_all(
    p: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    dtypes = (dtype, torch.bfloat16, torch.float16, torch.bfloat16)
    parts = [torch.randn(5, 3, generator=generator).mul_(200.0).to(dtype) for dtype in dtypes]
    wanted = torch.linalg.vector_norm(torch.cat([p.double().flatten() for p in parts]), p)
    got = norm_of([parts[0].new_empty(0), *parts], p, torch.device("cpu"), dtype)
    assert got.dtype == dtype
    assert got.item() == pytest.approx(wanted.item(), rel=8 * torch.finfo(dtype).eps)

"""The engine serves a face of flat parameters as well: a small one stands here."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp.api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp.engine.exposure import CutShard
from fsdp.engine.group_options import GroupOptions
from fsdp.engine.hooks import install_forward_hooks
from fsdp.engine.layout import Extent, end_to_end
from fsdp.engine.managed import managed_modules, managed_states
from fsdp.engine.mesh import DataParallelMeshInfo, default_mesh, device_of, mesh_info_of
from fsdp.engine.param import FSDPParam, find_owners, uid_of
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.unit import FSDPState, state_of
from tests.fsdp.plain import batch, build, loss_of, optimizer_of, train_plain
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks


class FlatExposure:
    """While sharded, one flat parameter on the unit; the original names are gone."""

    def __init__(self, owner: nn.Module, pieces: dict[FSDPParam, torch.Tensor]) -> None:
        self.owner = owner
        self.pieces = pieces
        self.flat: nn.Parameter | None = None

    def local(self, param: FSDPParam) -> torch.Tensor:
        return self.pieces[param]

    def bind(
        self, params: Sequence[FSDPParam], shard: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> None:
        self.pieces = dict(zip(params, pieces, strict=True))
        if self.flat is None:
            self.flat = nn.Parameter(shard)
        self.flat.data = shard
        self.show_sharded(params)

    def changed(self, params: Sequence[FSDPParam]) -> bool:
        """Nobody replaces a flat parameter here."""
        return False

    def reread(self, params: Sequence[FSDPParam]) -> None:
        """Nobody has replaced one."""

    def requires_grad(self, params: Sequence[FSDPParam]) -> list[bool]:
        return [self.flat.requires_grad] * len(params)

    def leaf(self, param: FSDPParam, whole: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(whole)

    def show_sharded(self, params: Sequence[FSDPParam]) -> None:
        for param in params:
            for module, name, _ in param.slots:
                module._parameters.pop(name, None)
        self.owner._parameters["flat"] = self.flat

    def show_whole(self, params: Sequence[FSDPParam]) -> None:
        self.owner._parameters.pop("flat")
        for param in params:
            param.install(param.unsharded)

    def optimized(self, params: Sequence[FSDPParam]) -> list[torch.Tensor]:
        return [self.flat]

    def check_whole(self, params: Sequence[FSDPParam]) -> None:
        """Nor a whole one."""

    def show_post_forward(self, params: Any, pieces: Any, info: Any) -> None:
        raise AssertionError("a flat parameter is not resharded to a smaller mesh")

    def plain_gradients(
        self, params: Sequence[FSDPParam], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return list(gradients)

    def accumulates(self, params: Sequence[FSDPParam]) -> bool:
        return self.flat.grad is not None

    def hand_over(self, params: Sequence[FSDPParam], shard: torch.Tensor, cut: CutShard) -> None:
        if self.flat.grad is None:
            self.flat.grad = shard
        else:
            self.flat.grad += shard


def _param(original: nn.Parameter, owners: Any) -> FSDPParam:
    return FSDPParam(
        info=owners,
        uid=uid_of(original),
        shape=original.shape,
        dim=None,
        dtype=original.dtype,
    )


def flatten(module: nn.Module, info: DataParallelMeshInfo, **options: Any) -> FSDPParamGroup:
    """Make ``module`` a unit with a flat parameter."""
    device = device_of(info.mesh)
    originals, _ = managed_states(managed_modules((module,), frozenset()), frozenset())
    params = [
        _param(o, i) for o, i in zip(originals, find_owners(originals, (module,)), strict=True)
    ]
    layout = end_to_end([Extent.flat(o.numel()) for o in originals], info.shard_size, align=4)
    pieces = {}
    for index, (param, original) in enumerate(zip(params, originals, strict=True)):
        piece = layout.piece(index, info.shard_rank)
        pieces[param] = original.detach().view(-1)[piece.start : piece.stop].clone()
    policy = options.pop("mp_policy", MixedPrecisionPolicy())
    state = FSDPState((module,), info, device, policy, auto_reshard=True)
    group = FSDPParamGroup(
        params,
        (module,),
        info,
        info,
        GroupOptions(
            device=device,
            exposure=FlatExposure(module, pieces),
            lay_out=end_to_end,
            mp_policy=policy,
            offload_policy=options.pop("offload_policy", OffloadPolicy()),
            whole_reductions=True,
        ),
    )
    state.groups.append(group)
    install_forward_hooks(state)
    return group


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce_in_float64": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def _flat(context: RankContext, variant: str, micro: int) -> list[Any]:
    model, info = build(), mesh_info_of(default_mesh(), None)
    units = [*model.blocks, model]
    groups = [flatten(unit, info, **VARIANTS[variant]) for unit in units]
    names = [name for name, _ in model.named_parameters()]
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        for part in range(micro):
            for group in groups:
                group.settings.reduce_grads = part == micro - 1
            loss_of(model, batch(step, context.rank, part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = build()
    train_plain(plain, context.world_size, micro=micro)
    for group in groups:
        group.unshard()
        group.wait_for_unshard()
    for name, want in plain.named_parameters():
        got = model.get_parameter(name)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, msg=name)
    in_place = [group._whole._plan.in_place for group in groups]
    return [names, in_place]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_face_of_flat_parameters_uses_the_same_engine(
    variant: str, world: int, micro: int
) -> None:
    for names, in_place in on_ranks(_flat, world, variant=variant, micro=micro):
        assert names == ["flat", "blocks.0.flat", "blocks.1.flat"]
        assert in_place == [True] * 3  # concatenated parameters are views of what was gathered


def _half_used(context: RankContext) -> bool:
    """A parameter without a gradient counts as zero, since the flat one has one gradient."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(10, 3)
            self.spare = nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = build(Half)
    group = flatten(model, mesh_info_of(default_mesh(), None))
    loss_of(model, batch(0, context.rank)).backward()
    flat = group.options.exposure.flat
    gathered = torch.empty(group.shard.layout.total_numel)
    torch.distributed.all_gather_into_tensor(gathered, flat.grad)
    plain = build(Half)
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    wanted = [plain.used.weight.grad, plain.used.bias.grad]
    offsets = group.shard.layout.unsharded_offsets
    for start, want in zip(offsets, wanted, strict=False):
        got = gathered[start : start + want.numel()]
        torch.testing.assert_close(got, want.reshape(-1), rtol=1e-5, atol=1e-6)
    return not gathered[offsets[2] :].any()


def test_a_flat_gradient_is_zero_where_nothing_was_used() -> None:
    assert on_ranks(_half_used, 2) == (True, True)


def _single(context: RankContext) -> None:
    """One matrix whose rows do not divide: borders lie inside rows."""
    model = build(nn.Linear, in_features=10, out_features=3, bias=False)
    group = flatten(model, mesh_info_of(default_mesh(), None))
    loss = loss_of(model, batch(0, context.rank))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an output of the wrong size is enlarged with a warning
        loss.backward()
    plain = build(nn.Linear, in_features=10, out_features=3, bias=False)
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    got = group.options.exposure.flat.grad
    wanted = plain.weight.grad.view(-1)
    first = context.rank * got.numel()
    wanted = wanted[first : first + got.numel()]
    torch.testing.assert_close(got[: wanted.numel()], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 4])
def test_a_border_may_lie_inside_a_row(world: int) -> None:
    on_ranks(_single, world)


def _smaller_mesh(context: RankContext, *, single: bool) -> list[str]:
    """What remains on a smaller mesh is cut by rows, and runs of elements have none."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "one"))
    model = build()
    if single:
        model.blocks = nn.ModuleList([nn.Linear(10, 10, bias=False)])
    info = mesh_info_of(mesh["dp"], None)
    for unit in (*model.blocks, model):
        flatten(unit, info)
    block = state_of(model.blocks[0]).groups[0]
    block.post_forward_mesh_info = mesh_info_of(mesh["one"], None)
    return error_of(lambda: model(batch(0, context.rank)))


@pytest.mark.parametrize("single", [False, True])
def test_a_flat_parameter_is_not_kept_on_a_smaller_mesh(*, single: bool) -> None:
    errors = on_ranks(_smaller_mesh, 2, single=single)
    named_on_every_rank(errors, NotImplementedError, "cuts each parameter by itself")

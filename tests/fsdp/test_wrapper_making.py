"""What wrapping does to modules beside a unit, to their optimizers, and over which ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp.engine.layout import Extent
from fsdp.flat_parameter import EndToEnd, FlatParameter
from fsdp.wrap import ModuleWrapPolicy, choose_targets
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import MixedPrecision
from tests.fsdp.plain import batch, build, loss_of, optimizer_of
from tests.fsdp.ranks import agreed, error_of, on_ranks
from tests.fsdp.test_wrapper import wrapped

FLOATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_original_parameters_begin_at_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    extents = [Extent.flat(numel) for numel in (3, 1, 18, 33, 5)]
    layout = EndToEnd.of(dtype, use_orig_params=True)(extents, 2, align=1)
    starts = [offset * dtype.itemsize for offset in layout.unsharded_offsets]
    assert [start % 16 for start in starts] == [0] * len(extents)


class Asked(nn.Module):
    """A leaf that is not looked into, beside one that becomes a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = nn.Sequential(nn.Linear(3, 3, bias=False))  # 9 elements
        self.unit = nn.Linear(2, 2, bias=False)  # 4 elements
        self.weight = nn.Parameter(torch.ones(5))


def test_a_policy_hears_of_every_element_that_no_unit_has_taken() -> None:
    model = nn.Sequential(Asked())
    asked: dict[nn.Module, int] = {}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:  # noqa: FBT001
        if recurse:
            return not isinstance(module, nn.Sequential) or module is model
        asked[module] = nonwrapped_numel
        return isinstance(module, nn.Linear)

    choose_targets(model, policy, {}, ignored_modules=set(), ignored_params=set())
    assert asked == {model[0].unit: 4, model[0]: 9 + 5}


class Beside(nn.Module):
    """Weights of its own around another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.inner = inner

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 3.0)


def _values(model: FSDP) -> dict[str, list[float]]:
    with FSDP.summon_full_params(model):
        return {name: p.unique().tolist() for name, p in model.named_parameters()}


def _beside_meta(context: RankContext) -> list[Any]:
    ignored = nn.Module()
    ignored.register_buffer("later", torch.empty(2, device="meta"))
    given = FSDP(Beside(ignored), ignored_modules=[ignored])

    with torch.device("meta"):
        model = Beside(nn.Identity())
    linear = nn.Linear(2, 2, bias=False)
    nn.init.constant_(linear.weight, 7.0)
    model.inner = FSDP(linear)
    return [_values(given), _values(FSDP(model))]


def test_only_what_a_unit_owns_is_made_anew() -> None:
    given, made = agreed(_beside_meta, 2)
    assert given == {"weight": [2.0]}
    assert made == {"weight": [3.0], "inner.weight": [7.0]}


def _optimizer_before(context: RankContext) -> bool:
    model = build()
    optimizer = optimizer_of(model.parameters())
    params = list(model.parameters())
    model = FSDP(model, use_orig_params=True)
    before = [p.detach().clone().flatten() for p in params]
    loss_of(model, batch(0, context.rank)).backward()
    optimizer.step()
    same = all(p is mine for p, mine in zip(model.parameters(), params, strict=True))
    return same and all(
        not torch.equal(a, b) for a, b in zip(before, params, strict=True) if len(a)
    )


def test_an_optimizer_made_before_trains_original_parameters() -> None:
    assert all(on_ranks(_optimizer_before, 2))


def _mesh_of_two_dims(context: RankContext, shape: tuple[int, int]) -> list[Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "other"))
    model = FSDP(nn.Linear(4, 4, bias=False), device_mesh=mesh)
    return [model.sharding_strategy.name, model.module._flat_param.numel()]


def test_the_first_dim_of_a_mesh_is_sharded() -> None:
    assert agreed(_mesh_of_two_dims, 2, shape=(2, 1)) == ["FULL_SHARD", 8]


class Sees(nn.Linear):
    """Remembers the dtype of what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        return super().forward(x.to(self.weight.dtype))


class Between(nn.Module):
    """Computes in float32 before its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Sees(4, 4), Sees(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).float())


def _inputs(context: RankContext) -> list[str]:
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(Between(), auto_wrap_policy=ModuleWrapPolicy({Sees}), mixed_precision=policy)
    model(torch.ones(1, 4))
    return [str(module.seen) for module in model.modules() if isinstance(module, Sees)]


def test_inputs_are_cast_for_the_root_only_unless_asked_for() -> None:
    assert agreed(_inputs, 2) == ["torch.bfloat16", "torch.float32"]


def _replaced(context: RankContext) -> list[bool]:
    model = wrapped(auto_wrap_policy=None)
    loss_of(model, batch(0, context.rank)).backward()
    found = nn.Parameter(model.module._flat_param.detach().clone())
    model.module._flat_param = found
    model(batch(0, context.rank))
    return [model.module._flat_param is found, isinstance(found, FlatParameter)]


def test_what_replaces_a_flat_parameter_is_one() -> None:
    assert agreed(_replaced, 2) == [True, True]


def _shortened(context: RankContext) -> list[str]:
    model = FSDP(nn.Linear(4, 4, bias=False), use_orig_params=True)
    model(torch.ones(1, 4)).sum().backward()
    model.module.weight.data = model.module.weight.data[:1]
    return error_of(lambda: model(torch.ones(1, 4)))


def test_a_parameter_that_lost_elements_is_named() -> None:
    for kind, text in on_ranks(_shortened, 2):
        assert kind == "RuntimeError"
        assert "Cannot writeback when the parameter shape changes" in text


def _looked_for(context: RankContext) -> int:
    model = wrapped(use_orig_params=True)
    loss_of(model, batch(0, context.rank)).backward()
    calls = []
    for unit in FSDP.fsdp_modules(model):
        for group in unit._state.groups:
            usual = group.shard.relink
            group.shard.relink = lambda usual=usual: (calls.append(1), usual())[1]
    loss_of(model, batch(1, context.rank)).backward()
    return len(calls)


def test_what_nobody_has_changed_is_not_taken_in_again() -> None:
    assert agreed(_looked_for, 2) == 0


def _stages(context: RankContext, *, original: bool) -> list[list[str]]:
    """Which modules are filled, and what they are made of by then; then the values of all ranks."""
    with torch.device("meta"):
        model = build()
    filled: list[list[str]] = []

    def fill(module: nn.Module) -> None:
        children = sorted({type(child).__name__ for child in module.children()})
        filled.append([type(module).__name__, *children])
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.fill_(context.rank + 1.0)

    made = wrapped(
        lambda: model,
        param_init_fn=fill,
        sync_module_states=True,
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    with FSDP.summon_full_params(made, writeback=False):
        values = {v for p in made.parameters() for v in p.unique().tolist()}
    found = [*filled, sorted(map(str, values))]
    found.append(sorted({name.split(".")[-1] for name, _ in made.named_parameters()}))
    return found


@pytest.mark.parametrize(
    ("original", "names"), [(False, ["_flat_param"]), (True, ["bias", "weight"])]
)
def test_inner_units_come_first_and_each_is_filled_then_broadcast_then_flattened(
    names: list[str], *, original: bool
) -> None:
    block = [["LayerNorm"], ["Linear"], ["Linear"], ["Residual", "LayerNorm", "Linear"]]
    *filled, values, found = agreed(_stages, 2, original=original)
    assert sorted(filled[:4]) == sorted(filled[4:8]) == block
    assert "Stack" in {kind for kind, *_ in filled[8:]}
    assert values == ["1.0"]
    assert found == names

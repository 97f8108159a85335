"""Sharded parameters are replaced, swapped, shared or freed: what is there trains on, or errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import (
    is_parametrized,
    register_parametrization,
    remove_parametrizations,
)

from conformance.ranks import RankContext
from fsdp import fully_shard
from fsdp.flat_parameter import FlatParameter
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import Stack, batch, build, compare, train_plain, train_sharded, whole
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks
from tests.fsdp.test_training import shard_blocks
from tests.fsdp.test_wrapper import agrees, wrapped

FACES = pytest.mark.parametrize("face", ["fully", "flat", "original"])
WRAPPERS = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


def both_train(context: RankContext, model: nn.Module, plain: nn.Module) -> None:
    """The model on the batches of this rank, the plain one on those of all."""
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)


def made(face: str) -> nn.Module:
    return shard_blocks(build()) if face == "fully" else wrapped(use_orig_params=face == "original")


def equal(model: nn.Module, plain: nn.Module) -> None:
    (agrees if isinstance(model, FSDP) else compare)(model, plain)


def groups_of(model: nn.Module) -> list[Any]:
    if isinstance(model, FSDP):
        return [group for unit in FSDP.fsdp_modules(model) for group in unit._state.groups]
    units = (fully_shard.state(module) for module in model.modules())  # type: ignore[attr-defined]
    return [group for unit in units if unit is not None for group in unit.groups]


def stays(model: nn.Module) -> bool:
    """Whether every group finds its parameters where it has put them."""
    groups = groups_of(model)
    assert len(groups) == 3
    return not any(group.options.exposure.changed(group.fsdp_params) for group in groups)


def local_of(param: torch.Tensor) -> torch.Tensor:
    return param.detach().to_local() if isinstance(param, DTensor) else param.data


# Replaced


def _half(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(param.detach() * 0.5)


def _register(module: nn.Module) -> None:
    new = _half(module.weight)
    del module.weight
    module.register_parameter("weight", new)


def _move(module: nn.Module) -> None:
    local = local_of(module.weight)
    with torch.no_grad():
        local.set_(local * 0.5)  # type: ignore[call-overload]


REPLACING: dict[str, Callable[[nn.Module], object]] = {
    "set": lambda module: setattr(module, "weight", _half(module.weight)),
    "registered": _register,
    "assigned": lambda module: module.load_state_dict(
        {"weight": _half(module.weight)}, assign=True, strict=False
    ),
}


def _inner(model: nn.Module) -> list[nn.Module]:
    """Modules inside the root's unit and inside another one; none is a unit itself."""
    return [model.out, model.blocks[0].down]


def _replaces(context: RankContext, *, way: str) -> None:
    """After steps, where the unit has shown its own again and again; optimizers are made anew."""
    model, plain = made("fully"), build()
    for _ in range(2):
        both_train(context, model, plain)
        for module in (*_inner(model), *_inner(plain)):
            REPLACING[way](module)
    both_train(context, model, plain)
    compare(model, plain)
    assert stays(model)


@pytest.mark.parametrize("way", REPLACING)
def test_what_has_replaced_a_parameter_between_steps_is_trained(way: str) -> None:
    on_ranks(_replaces, 2, way=way)


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(10, 3, bias=False)
        self.twin.weight = self.out.weight


class TiedAround(Stack):
    """The root shares with a module inside of it, which is loaded before the root is through."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Module()
        self.weight = self.twin.weight = self.out.weight


def _assigns(context: RankContext, *, kind: type[nn.Module]) -> None:
    """A load replaces in one place after another."""
    model = shard_blocks(build(kind))
    for _ in range(2):
        state = {name: value * 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model.twin.weight is model.out.weight
        torch.testing.assert_close(local_of(model.out.weight), local_of(state["out.weight"]))
        train_sharded(model, context.rank)


@pytest.mark.parametrize("kind", [Tied, TiedAround])
def test_what_a_load_assigns_stays_tied(kind: type[nn.Module]) -> None:
    on_ranks(_assigns, 2, kind=kind)


class Loading(nn.Module):
    """Loads what it has inside by itself, in the midst of the walk around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 3)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        prefix += "inner."
        own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        self.inner.load_state_dict(own, assign=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class TiedAcross(nn.Module):
    """Two places of a weight on either side of a module that loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.between, self.twin = nn.Linear(10, 3), Loading(), nn.Linear(10, 3)
        self.twin.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) + self.between(x) * self.twin(x)


def _by_torch(model: nn.Module, state: dict[str, Any]) -> None:
    model.load_state_dict(state, assign=True)


def _one_by_one(model: nn.Module, state: dict[str, Any]) -> None:
    """As loaders do that walk by themselves; what they untie they tie again."""
    metadata = {"assign_to_params_buffers": True}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        module._load_from_state_dict(state, prefix, metadata, True, [], [], [])
    model.twin.weight = model.out.weight


def _loads(context: RankContext, *, kind: type[nn.Module], load: Callable[..., None]) -> None:
    model, plain = fully_shard(build(kind)), build(kind)
    for _ in range(2):
        both_train(context, model, plain)
        load(model, {name: value * 0.5 for name, value in model.state_dict().items()})
        assert model.twin.weight is model.out.weight
        plain.load_state_dict({name: value * 0.5 for name, value in plain.state_dict().items()})
    both_train(context, model, plain)
    compare(model, plain)


@pytest.mark.parametrize(("kind", "load"), [(TiedAcross, _by_torch), (Tied, _one_by_one)])
def test_a_load_may_come_to_a_module_in_the_midst_of_another(
    kind: type[nn.Module], load: Callable[..., None]
) -> None:
    on_ranks(_loads, 2, kind=kind, load=load)


def _back(context: RankContext, *, face: str) -> None:
    """As averages of weights are put in for an evaluation; the others' values wait in them."""
    model = made(face)
    train_sharded(model, context.rank)
    places = [
        (m, name) for m in model.modules() for name, p in m._parameters.items() if p is not None
    ]
    with torch.no_grad():
        expected = model(batch(0, 0))
        _give_up(model)
        before = [module._parameters[name] for module, name in places]
        for module, name in places:
            setattr(module, name, _half(module._parameters[name]))
        halved = model(batch(0, 0))
        _give_up(model)
        for (module, name), param in zip(places, before, strict=True):
            setattr(module, name, param)
        torch.testing.assert_close(model(batch(0, 0)), expected, rtol=0, atol=0)
    assert not torch.equal(halved, expected)


def _give_up(model: nn.Module) -> None:
    for group in groups_of(model):
        group.to_sharded()


@FACES
def test_a_parameter_that_is_put_back_has_its_values(face: str) -> None:
    on_ranks(_back, 2, face=face)


def _in_flight(context: RankContext, *, way: str, waits: bool) -> None:
    """Of a gather that shows the values of before, nothing is seen."""
    model, plain = made("fully"), build()
    both_train(context, model, plain)
    handles = [module.unshard(async_op=True) for module in (model, *model.blocks)]
    for module in (*_inner(model), *_inner(plain)):
        _move(module) if way == "moved" else REPLACING[way](module)
    if waits:
        for handle in handles:
            handle.wait()
        for name, param in plain.named_parameters():
            found = whole(model.get_parameter(name).detach())
            torch.testing.assert_close(found, param.detach(), rtol=2e-6, atol=2e-6)
        for module in (model, *model.blocks):
            module.reshard()
    both_train(context, model, plain)
    compare(model, plain)
    assert stays(model)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("way", [*REPLACING, "moved"])
def test_what_has_replaced_a_parameter_while_it_is_gathered_is_trained(
    way: str, *, waits: bool
) -> None:
    on_ranks(_in_flight, 2, way=way, waits=waits)


def _freezes(context: RankContext) -> bool:
    """The gradient goes to what is registered, which wants none."""
    model = made("fully")
    train_sharded(model, context.rank)
    model.out.weight = nn.Parameter(model.out.weight.detach(), requires_grad=False)
    model(batch(0, 0)).sum().backward()
    return model.out.weight.grad is None and model.out.bias.grad is not None


def test_a_replacement_that_is_frozen_gets_no_gradient() -> None:
    assert agreed(_freezes, 2)


def _plain_weight(model: nn.Module) -> None:
    model.out.weight = nn.Parameter(torch.ones(3, 10))


def _whole_then_plain(model: nn.Module) -> None:
    """The root is whole after an evaluation, which users need not know."""
    with torch.no_grad():
        model(batch(0, 0))
    _plain_weight(model)
    model.reshard()


def _before_backward(model: nn.Module, *, memory: bool) -> None:
    loss = model(batch(0, 0)).sum()
    if memory:
        model.out.weight.data = torch.ones(3, 10)
    else:
        _plain_weight(model)
    loss.backward()


def _in_one_place(model: nn.Module) -> None:
    model.twin.weight = _half(model.twin.weight)


UNFIT: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "plain": (_plain_weight, "was replaced after sharding by a plain Parameter; wanted"),
    "deleted": (
        lambda m: delattr(m.out, "weight"),
        "was replaced after sharding by nothing; wanted",
    ),
    "none": (
        lambda m: setattr(m.out, "weight", None),
        "was replaced after sharding by nothing; wanted",
    ),
    "parametrized": (
        lambda m: register_parametrization(m.out, "weight", nn.Identity()),
        "was replaced after sharding by nothing; wanted",
    ),
    "whole": (_whole_then_plain, "was replaced after sharding by a plain Parameter; wanted"),
    "leaf": (
        lambda m: _before_backward(m, memory=False),
        "or its memory, was replaced between forward and backward",
    ),
    "leaf_memory": (
        lambda m: _before_backward(m, memory=True),
        "or its memory, was replaced between forward and backward",
    ),
    "one_place": (_in_one_place, "was replaced after sharding in one of its places only"),
}

NEXT: dict[str, Callable[[nn.Module, dict[str, Any]], object]] = {
    "trained": lambda model, _: model(batch(0, 0)),
    "saved": lambda model, _: model.state_dict(),
    "unit_saved": lambda model, _: model.out.state_dict(),
    "loaded": lambda model, state: model.load_state_dict(state),
    "assigned": lambda model, state: model.load_state_dict(state, assign=True),
}


def _unfit(context: RankContext, *, way: str, then: str) -> list[str]:
    """Nothing else has happened: what was there may be put back, and trains on."""
    kind = Tied if way == "one_place" else Stack
    model, plain = shard_blocks(build(kind)), build(kind)
    both_train(context, model, plain)
    old, bias = model.out.weight, model.out.bias
    # Without the root's buffer, which torch loads before it looks at what the root has inside.
    state = {name: value * 0.5 for name, value in model.state_dict().items() if name != "scale"}
    error = error_of(lambda: (UNFIT[way][0](model), NEXT[then](model, state)))
    model.reset_iter_state()
    model.reshard()
    if is_parametrized(model.out):
        remove_parametrizations(model.out, "weight", leave_parametrized=False)
    model.out._parameters.clear()  # for the order
    model.out.weight, model.out.bias = old, bias
    if way == "one_place":
        model.twin.weight = old
    both_train(context, model, plain)
    compare(model, plain)
    return error


@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("way", UNFIT)
def test_a_replacement_that_does_not_fit_is_named_and_may_be_undone(way: str, then: str) -> None:
    named_on_every_rank(on_ranks(_unfit, 2, way=way, then=then), ValueError, UNFIT[way][1])


def _saves(context: RankContext) -> None:
    """What fits is saved before any gather has adopted it, and is what trains on."""
    model, plain = made("fully"), build()
    both_train(context, model, plain)
    for module in (*_inner(model), *_inner(plain)):
        REPLACING["set"](module)
    state = model.state_dict()
    for name, param in model.named_parameters():
        assert local_of(state[name]).data_ptr() == local_of(param).data_ptr(), name
    assert stays(model)
    both_train(context, model, plain)
    compare(model, plain)


def test_a_replacement_that_fits_is_saved() -> None:
    on_ranks(_saves, 2)


def _leaf(context: RankContext) -> None:
    """As values that are changed in place are: the next gather brings those of the shard."""
    model = made("fully")
    train_sharded(model, context.rank)
    with torch.no_grad():
        expected = model(batch(0, 0))
        model.out.weight.data = torch.ones(3, 10)
        model.reshard()
        torch.testing.assert_close(model(batch(0, 0)), expected, rtol=0, atol=0)


def test_memory_of_a_whole_parameter_lasts_until_it_is_given_up() -> None:
    on_ranks(_leaf, 2)


def _functional(context: RankContext) -> None:
    """It puts back what was registered, while the root stays whole."""
    model, plain = made("fully"), build()

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        own = dict(module.named_parameters())
        return torch.func.functional_call(module, own, (x,)).pow(2).mean()

    train_sharded(model, context.rank, loss=loss)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_a_functional_call_with_its_own_parameters_trains() -> None:
    on_ranks(_functional, 2)


def _functional_whole(context: RankContext) -> None:
    """The units reshard in their forwards, and then it puts back what was whole before."""
    model, plain = shard_blocks(build(), reshard_after_forward=True), build()
    for module in (model, *model.blocks):
        module.unshard()
    given = {name: param.detach() * 0.5 for name, param in model.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(model, given, (batch(0, 0),))
        model(batch(0, 0))  # shows the sharded ones again
        model.reshard()
    both_train(context, model, plain)
    compare(model, plain)


def test_a_functional_call_may_put_back_whole_parameters() -> None:
    on_ranks(_functional_whole, 2)


# Swapped


def _swapped(context: RankContext, *, face: str, once: bool) -> None:
    """Before training, and while it goes on with the optimizer's moments."""
    model, plain = made(face), build()
    for _ in range(2):
        if once:
            both_train(context, model, plain)
        for param in model.parameters():
            torch.utils.swap_tensors(param, nn.Parameter(param.detach() * 0.5))
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.5)
    both_train(context, model, plain)
    equal(model, plain)
    assert stays(model)
    assert face != "flat" or all(isinstance(p, FlatParameter) for p in model.parameters())


@pytest.mark.parametrize("once", [False, True], ids=["fresh", "trained"])
@FACES
def test_what_was_swapped_into_a_parameter_is_trained(face: str, *, once: bool) -> None:
    """As torch does when a module is moved under ``set_swap_module_params_on_conversion``."""
    on_ranks(_swapped, 2, face=face, once=once)


def _converts(context: RankContext, *, face: str) -> None:
    """Of a module inside a unit, whose methods are torch's own."""
    model, plain = made(face), build()
    both_train(context, model, plain)
    inner = model.module.out if isinstance(model, FSDP) else model.out
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        inner._apply(lambda tensor: tensor * 0.5)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        for param in plain.out.parameters():
            param.mul_(0.5)
    both_train(context, model, plain)
    equal(model, plain)


@pytest.mark.parametrize("face", ["fully", "original"])
def test_a_conversion_of_a_module_inside_a_unit_is_seen(face: str) -> None:
    on_ranks(_converts, 2, face=face)


def _plain(context: RankContext) -> list[str]:
    model = made("fully")
    train_sharded(model, context.rank)
    # Of the same class, or torch refuses: the slots of a DTensor are not those of a plain tensor.
    param = model.out.weight
    other = nn.Parameter(DTensor.from_local(torch.ones(3, 10), param.device_mesh))
    torch.utils.swap_tensors(param, other)
    return error_of(lambda: model(batch(0, 0)))


def _on_mesh(context: RankContext, *, ranks: list[int], names: tuple[str, ...]) -> list[str]:
    model, plain = made("fully"), build()
    both_train(context, model, plain)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    value = whole(model.out.weight.detach()) * 0.5
    old, rows = model.out.weight, value.chunk(len(ranks))[ranks.index(context.rank)]
    new = DTensor.from_local(rows, mesh, [Shard(0)], shape=value.shape, stride=value.stride())
    model.out.weight = nn.Parameter(new)
    error = error_of(lambda: model(batch(0, 0)))
    if error[0]:
        model.out.weight = old
    else:
        REPLACING["set"](plain.out)
    model.reshard()
    both_train(context, model, plain)
    compare(model, plain)
    return error


def test_a_mesh_of_the_same_ranks_may_have_names() -> None:
    assert agreed(_on_mesh, 2, ranks=[0, 1], names=("any",)) == ["", ""]


def test_a_mesh_of_other_ranks_is_refused_by_name() -> None:
    """Each rank would gather the rows of the others in its own order."""
    errors = on_ranks(_on_mesh, 2, ranks=[1, 0], names=())
    fragment = "'out.weight' was replaced after sharding by one of shape (3, 10) and placements "
    named_on_every_rank(errors, ValueError, fragment)
    named_on_every_rank(errors, ValueError, "over cpu ranks [1, 0]; wanted")


def test_what_is_no_part_of_the_parameter_is_refused_by_name() -> None:
    errors = on_ranks(_plain, 2)
    named_on_every_rank(errors, ValueError, "parameter 'out.weight' was replaced after sharding")


# Shared with other processes


def _shares(context: RankContext, *, original: bool) -> None:
    model, plain = made("original" if original else "flat"), build()
    for _ in range(2):
        model.share_memory()
        assert all(param.is_shared() for param in model.parameters())
        both_train(context, model, plain)
        assert all(param.is_shared() for param in model.parameters())
        assert stays(model)
    equal(model, plain)


@WRAPPERS
def test_a_wrapped_module_is_shared_and_trains_on(*, original: bool) -> None:
    on_ranks(_shares, 2, original=original)


SHARING: dict[str, Callable[[nn.Module], object]] = {
    "root": lambda model: model.share_memory(),
    "unit": lambda model: model.blocks[0].share_memory(),
    "around": lambda model: nn.Sequential(model).share_memory(),
    "inside": lambda model: model.out.share_memory(),
    "whole": lambda model: _evaluate_and_share(model),
    "swapped": lambda model: _swap_and_share(model),
}


def _evaluate_and_share(model: nn.Module) -> None:
    """The root stays whole after a forward, and its memory must be freed."""
    with torch.no_grad():
        model(batch(0, 0))
    model.out.share_memory()


def _swap_and_share(model: nn.Module) -> None:
    """What a parameter has lost by a swap is no reason to share it."""
    for param in model.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
    with torch.no_grad():
        model(batch(0, 0))
    model.reshard()
    model.out.share_memory()


def _refuses(context: RankContext, *, way: str) -> list[str]:
    model, plain = made("fully"), build()
    both_train(context, model, plain)
    error = error_of(lambda: SHARING[way](model))
    assert not any(local_of(param).is_shared() for param in model.parameters())  # whole ones too
    assert not any(buffer.is_shared() for buffer in model.buffers())
    model.reshard()
    both_train(context, model, plain)
    compare(model, plain)
    return error


@pytest.mark.parametrize("way", SHARING)
def test_a_module_of_dtensors_is_not_shared_and_says_so(way: str) -> None:
    """Torch would look for the storage of a DTensor, and crash."""
    errors = on_ranks(_refuses, 2, way=way)
    named_on_every_rank(errors, NotImplementedError, "cannot be shared with other processes")


# Freed


def _freed(context: RankContext, *, face: str) -> list[str]:
    """The memory of one parameter is given back, and comes again with its values."""
    model, plain = made(face), build()
    both_train(context, model, plain)
    param = next(model.parameters())
    storage = local_of(param).untyped_storage()
    nbytes, kept = storage.nbytes(), torch.empty(0).set_(storage.clone())  # type: ignore[call-overload]
    error = error_of(lambda: (storage.resize_(0), model(batch(0, 0))))
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
        torch.empty(0).set_(storage).copy_(kept)  # type: ignore[call-overload]
    both_train(context, model, plain)
    equal(model, plain)
    assert stays(model)
    return error


@pytest.mark.parametrize(
    ("face", "fragment"),
    [
        ("fully", "resize storage that is not resizable"),  # torch's words: nothing was freed
        ("flat", "the memory of the flat parameter that begins with 'inp.weight' was freed"),
        ("original", "the memory of 'inp.weight' was freed"),
    ],
)
def test_memory_that_was_freed_is_missed_by_name_and_may_come_again(
    face: str, fragment: str
) -> None:
    named_on_every_rank(on_ranks(_freed, 2, face=face), RuntimeError, fragment)


def test_what_a_gather_is_asked_is_cheap() -> None:
    """No tensor is made to see whether parameters are where they were."""
    assert agreed(_asked, 2) == 0


def _asked(context: RankContext) -> int:
    made_tensors = 0

    class Operators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal made_tensors
            made_tensors += 1
            return func(*args, **(kwargs or {}))

    models = [made(face) for face in ("fully", "flat", "original")]
    with Operators():
        assert all(map(stays, models))
    return made_tensors

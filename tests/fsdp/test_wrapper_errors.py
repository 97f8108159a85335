"""Bad input of the wrapper face is named: by type, by fragment, on every rank, without a hang."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from conformance.ranks import RankContext
from fsdp import wrapper_mesh, wrapper_options
from fsdp.flat_parameter import FlatParameter
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from fsdp.wrapper_setup import broadcast_states
from tests.fsdp.plain import Residual, Stack, batch, build, loss_of
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks
from tests.fsdp.test_wrapper import wrapped

HYBRID = ShardingStrategy.HYBRID_SHARD
LINEARS = ModuleWrapPolicy({nn.Linear})

# The constructor: (module and arguments, error, fragment of its text)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(10, 10), nn.Linear(10, 10)
        self.out.weight = self.inp.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inp(x))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def half_frozen() -> nn.Module:
    model = build()
    model.inp.weight.requires_grad_(False)
    return model


def with_param(value: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(value, requires_grad=value.is_floating_point())
    return module


def two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


def last_unit_is_fine() -> tuple[nn.Module, dict[str, Any]]:
    mixed, fine = two_dtypes(), nn.Linear(2, 2)
    policy = CustomPolicy(lambda m: m in (mixed, fine))
    return nn.Sequential(mixed, fine), {"auto_wrap_policy": policy}


def already() -> nn.Module:
    return nn.Sequential(wrapped())


def steps_in_backward() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight._in_backward_optimizers = [torch.optim.SGD([module.weight], lr=0.1)]
    return module


def flat_inside() -> nn.Module:
    module = nn.Linear(2, 2)
    module.flat = FlatParameter(torch.ones(3))
    return module


def dtensor_inside() -> nn.Module:
    module = nn.Linear(2, 2)
    whole = torch.ones(2, 2)
    module.weight = nn.Parameter(distribute_tensor(whole, line(), [Replicate()]))
    return module


def shared_with_another_unit() -> nn.Module:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    FSDP(first, use_orig_params=True)
    return second


Made = tuple[nn.Module, dict[str, Any]]

CONSTRUCTOR: dict[str, tuple[Callable[[], Made], type[Exception], str]] = {
    "group_and_mesh": (
        lambda: (build(), {"process_group": world(), "device_mesh": line()}),
        ValueError,
        "Cannot pass both process_group and device_mesh",
    ),
    "hybrid_alone": (
        lambda: (build(), {"sharding_strategy": HYBRID}),
        ValueError,
        "requires explicit specification of process group or device_mesh.",
    ),
    "hybrid_one_group": (
        lambda: (build(), {"sharding_strategy": HYBRID, "process_group": world()}),
        ValueError,
        "Expected process_group to be passed in as either None or",
    ),
    "hybrid_line": (
        lambda: (build(), {"sharding_strategy": HYBRID, "device_mesh": line()}),
        ValueError,
        "Expected device_mesh to have ndim=2 but got 1",
    ),
    "two_groups": (
        lambda: (build(), {"process_group": (world(), world())}),
        ValueError,
        "process_group should be a ProcessGroup",
    ),
    "strategy": (
        lambda: (build(), {"sharding_strategy": "FULL_SHARD"}),
        TypeError,
        "sharding_strategy got 'FULL_SHARD'",
    ),
    "offload": (lambda: (build(), {"cpu_offload": True}), TypeError, "cpu_offload got True"),
    "precision": (
        lambda: (build(), {"mixed_precision": torch.bfloat16}),
        TypeError,
        "mixed_precision got torch.bfloat16",
    ),
    "prefetch": (
        lambda: (build(), {"backward_prefetch": "pre"}),
        TypeError,
        "backward_prefetch got 'pre'",
    ),
    "init_fn": (lambda: (build(), {"param_init_fn": 3}), ValueError, "Expected 3 to be callable"),
    "policy": (
        lambda: (build(), {"auto_wrap_policy": 3}),
        ValueError,
        "auto_wrap_policy should be a policy object or a callable",
    ),
    "ignored_type": (
        lambda: (build(), {"ignored_modules": [1]}),
        ValueError,
        "ignored_modules expects nn.Module list elements but got types",
    ),
    "ignored_iterable": (
        lambda: (build(), {"ignored_modules": 1}),
        TypeError,
        "not iterable",
    ),
    "ignored_mixed": (
        lambda: (build(), {"ignored_states": [nn.Linear(1, 1), nn.Parameter(torch.ones(1))]}),
        ValueError,
        "ignored_states expects all nn.Parameter or all nn.Module list elements but got types",
    ),
    "ignored_twice": (
        lambda: (build(), {"ignored_modules": [], "ignored_states": []}),
        ValueError,
        "Cannot pass both ignored_modules and ignored_states",
    ),
    "ignored_unit": (
        lambda: (build(), {"ignored_modules": [wrapped()]}),
        ValueError,
        "`ignored_modules` should not include FSDP modules",
    ),
    "unit_below": (
        lambda: (already(), {"auto_wrap_policy": LINEARS}),
        ValueError,
        "FSDP auto wrapping requires modules to not already have FSDP applied but found 0 in",
    ),
    "tied_in_two_units": (
        lambda: (build(Tied), {"auto_wrap_policy": LINEARS}),
        ValueError,
        "shared between two units",
    ),
    "tied_to_another_unit": (
        lambda: (shared_with_another_unit(), {}),
        ValueError,
        "is shared with a unit that was wrapped before",
    ),
    "half_frozen": (
        lambda: (half_frozen(), {}),
        ValueError,
        "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
    ),
    "half_frozen_target": (
        lambda: (
            nn.Sequential(half_frozen()),
            {"auto_wrap_policy": ModuleWrapPolicy({Stack})},
        ),
        ValueError,
        "has both parameters with requires_grad=True and False",
    ),
    "scalar": (
        lambda: (with_param(torch.tensor(1.0)), {}),
        ValueError,
        "FSDP doesn't support scalar parameters. Change extra to a 1D tensor",
    ),
    "integers": (
        lambda: (with_param(torch.ones(2, dtype=torch.int64)), {"use_orig_params": True}),
        ValueError,
        "Cannot flatten integer dtype tensors",
    ),
    "flat": (lambda: (flat_inside(), {}), ValueError, "Cannot flatten a `FlatParameter`"),
    "two_dtypes": (
        lambda: (two_dtypes(), {}),
        ValueError,
        "Must flatten tensors with uniform dtype but got",
    ),
    "last_unit_is_fine": (
        last_unit_is_fine,
        ValueError,
        "Must flatten tensors with uniform dtype but got",
    ),
    "dtensor": (lambda: (dtensor_inside(), {}), ValueError, "no device_mesh was given"),
    "steps_in_backward": (
        lambda: (steps_in_backward(), {}),
        RuntimeError,
        "FSDP optimizer in backward only supported with use_orig_params=True!",
    ),
}


def _constructed(context: RankContext, case: str) -> list[str]:
    module, given = CONSTRUCTOR[case][0]()
    before = [id(param) for param in module.parameters()]
    error = error_of(lambda: FSDP(module, **given))
    assert [id(param) for param in module.parameters()] == before
    return error


@pytest.mark.parametrize("case", CONSTRUCTOR)
def test_bad_arguments_are_refused_before_anything_happens(case: str) -> None:
    _, kind, fragment = CONSTRUCTOR[case]
    named_on_every_rank(on_ranks(_constructed, 2, case=case), kind, fragment)


# The wrong moment, or the wrong module


def summoned(**given: Any) -> Callable[[], None]:
    def call() -> None:
        original = given.pop("original", True)
        strategy = given.pop("strategy", ShardingStrategy.FULL_SHARD)
        model = wrapped(use_orig_params=original, sharding_strategy=strategy)
        with FSDP.summon_full_params(model, **given):
            pass

    return call


def inner(method: str, *args: Any) -> Callable[[], None]:
    def call() -> None:
        model = wrapped()
        result = getattr(model.blocks[0], method)(*args)
        if hasattr(result, "__enter__"):
            result.__enter__()

    return call


def in_summon(method: str, *args: Any) -> Callable[[], None]:
    def call() -> None:
        model = wrapped()
        with FSDP.summon_full_params(model):
            result = getattr(model, method)(*args)
            if hasattr(result, "__enter__"):
                result.__enter__()

    return call


def nested_summon() -> None:
    model = wrapped()
    with FSDP.summon_full_params(model), FSDP.summon_full_params(model.blocks[0]):
        pass


def summon_in(where: str) -> Callable[[], None]:
    def call() -> None:
        model = wrapped()
        errors: list[Exception] = []

        def summon(*_: Any) -> None:
            try:
                with FSDP.summon_full_params(model.blocks[1]):
                    pass
            except AssertionError as error:
                errors.append(error)

        if where == "forward":
            model.module.out.register_forward_hook(summon)
        else:
            model.module.blocks[0].register_full_backward_hook(summon)
        loss_of(model, batch(0, 0)).backward()
        raise errors[0]

    return call


def hook_twice() -> None:
    model = wrapped()
    model.register_comm_hook(None, print)
    model.register_comm_hook(None, print)


def hook_on_hybrid() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    wrapped(sharding_strategy=HYBRID, device_mesh=mesh).register_comm_hook(None, print)


def gradients_of_gradients() -> None:
    model = wrapped()
    loss_of(model, batch(0, 0)).backward(create_graph=True)


def flat_steps_in_backward() -> None:
    model = wrapped()
    flat = model._flat_param
    flat._in_backward_optimizers = [torch.optim.SGD([flat], lr=0.1)]
    model(batch(0, 0))


def two_kinds_of_units() -> None:
    policy = CustomPolicy(lambda m: isinstance(m, Residual) and {"use_orig_params": True})
    wrapped(auto_wrap_policy=policy)(batch(0, 0))


def two_limits() -> None:
    policy = CustomPolicy(lambda m: isinstance(m, Residual) and {"limit_all_gathers": False})
    wrapped(auto_wrap_policy=policy)(batch(0, 0))


def two_precisions_in_eval() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        precise = wrapped(Residual, auto_wrap_policy=None)
    FSDP(nn.Sequential(precise))(batch(0, 0))


def left_on_meta() -> None:
    model = wrapped(use_orig_params=True)
    model.to("meta")
    model(batch(0, 0))


def offloaded_elsewhere() -> None:
    model = wrapped(cpu_offload=CPUOffload(offload_params=True))
    model.to("meta")
    model(batch(0, 0))


def inner_first() -> None:
    model = wrapped()
    model.blocks[0](batch(0, 0))
    model(batch(0, 0))


def wrong_shape_in_summon() -> None:
    model = wrapped(use_orig_params=True)
    with FSDP.summon_full_params(model):
        model.module.inp.weight.data = torch.ones(2)


def old_optimizer() -> None:
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    FSDP(module)
    optimizer.step()


def no_reset_parameters() -> None:
    with torch.device("meta"):
        module = nn.Sequential(build())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        FSDP(module)


def types_of_state() -> None:
    FSDP.set_state_dict_type(
        wrapped(),
        StateDictType.FULL_STATE_DICT,
        wrapper_options.FullStateDictConfig(),
        wrapper_options.OptimStateDictConfig(),
    )


def states_differ() -> None:
    model = wrapped()
    config = wrapper_options.FullStateDictConfig(offload_to_cpu=True)
    FSDP.set_state_dict_type(model.blocks[0], StateDictType.FULL_STATE_DICT, config)
    FSDP.get_state_dict_type(model)


MOMENTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no_sync_inner": (
        inner("no_sync"),
        RuntimeError,
        "`no_sync()` on inner FSDP instances is not supported",
    ),
    "no_sync_open": (in_summon("no_sync"), ValueError, "expected to be in states"),
    "apply_open": (in_summon("apply", print), ValueError, "expected to be in states"),
    "clip_inner": (
        inner("clip_grad_norm_", 1.0),
        RuntimeError,
        "should only be called on the root FSDP instance",
    ),
    "hook_inner": (
        inner("register_comm_hook", None, print),
        AssertionError,
        "register_comm_hook can only be called on a root instance.",
    ),
    "hook_type": (
        lambda: wrapped().register_comm_hook(None, 3),
        ValueError,
        "The communication hook must be callable but got 3",
    ),
    "hook_twice": (hook_twice, AssertionError, "A communication hook is already registered"),
    "hook_hybrid": (
        hook_on_hybrid,
        AssertionError,
        "Communication hook is not supported for hybrid strategies",
    ),
    "summon_twice": (nested_summon, AssertionError, "when already unsharding parameters"),
    "summon_forward": (
        summon_in("forward"),
        AssertionError,
        "Cannot manually unshard parameters during forward/backward",
    ),
    "summon_backward": (
        summon_in("backward"),
        AssertionError,
        "Cannot manually unshard parameters during forward/backward",
    ),
    "summon_rank0_writeback": (
        summoned(rank0_only=True),
        NotImplementedError,
        "writeback=True and rank0_only=True is not supported yet",
    ),
    "summon_offload_replicas": (
        summoned(offload_to_cpu=True, strategy=ShardingStrategy.NO_SHARD),
        NotImplementedError,
        "offload_to_cpu=True and NO_SHARD is not supported yet",
    ),
    "summon_flat_grads": (
        summoned(with_grads=True, original=False),
        NotImplementedError,
        "with_grads=True, use_orig_params=False, offload_to_cpu=False is not supported yet",
    ),
    "summon_offload_grads": (
        summoned(with_grads=True, offload_to_cpu=True),
        NotImplementedError,
        "with_grads=True, use_orig_params=True, offload_to_cpu=True is not supported yet",
    ),
    "summon_shape": (wrong_shape_in_summon, RuntimeError, "Cannot writeback when the parameter"),
    "gradients_of_gradients": (
        gradients_of_gradients,
        RuntimeError,
        "FSDP does not support gradients of gradients",
    ),
    "flat_steps_in_backward": (
        flat_steps_in_backward,
        RuntimeError,
        "FSDP optimizer in backward only supported with use_orig_params=True!",
    ),
    "two_kinds": (
        two_kinds_of_units,
        ValueError,
        "Expects one homogeneous value for _use_orig_params",
    ),
    "two_limits": (
        two_limits,
        ValueError,
        "Expects one homogeneous value for limit_all_gathers",
    ),
    "two_precisions": (
        two_precisions_in_eval,
        ValueError,
        "Expects one homogeneous value for _use_full_prec_in_eval",
    ),
    "left_on_meta": (
        left_on_meta,
        RuntimeError,
        "An FSDP-managed module unexpectedly has parameters on meta. Make sure to move the module",
    ),
    "offloaded_elsewhere": (
        offloaded_elsewhere,
        RuntimeError,
        "An FSDP-managed module with parameter CPU offloading enabled has parameters on meta",
    ),
    "inner_first": (
        inner_first,
        RuntimeError,
        "FSDP state has already been lazily initialized for blocks.0\n",
    ),
    "old_optimizer": (old_optimizer, ValueError, "flattened after it was made"),
    "no_reset_parameters": (no_reset_parameters, AttributeError, "reset_parameters"),
    "state_config": (
        lambda: FSDP.set_state_dict_type(
            wrapped(), StateDictType.FULL_STATE_DICT, wrapper_options.StateDictConfig()
        ),
        RuntimeError,
        "Expected state_dict_config of type FullStateDictConfig",
    ),
    "optim_config": (
        types_of_state,
        RuntimeError,
        "Expected optim_state_dict_config of type FullOptimStateDictConfig",
    ),
    "states_differ": (states_differ, AssertionError, "All FSDP modules must have the same"),
    "attribute": (lambda: wrapped().nothing, AttributeError, "nothing"),
}


def _at_the_moment(context: RankContext, case: str) -> list[str]:
    return error_of(MOMENTS[case][0])


@pytest.mark.parametrize("case", MOMENTS)
def test_the_wrong_moment_is_named_on_every_rank(case: str) -> None:
    _, kind, fragment = MOMENTS[case]
    named_on_every_rank(on_ranks(_at_the_moment, 2, case=case), kind, fragment)


# Devices, as values: no accelerator is needed to say which is meant

ACCELERATOR, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


def at(*devices: torch.device) -> list[Any]:
    return [SimpleNamespace(device=device) for device in devices]


CPU = torch.device("cpu")

DEVICES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "two_devices": (
        lambda: wrapper_mesh.compute_device(None, at(ACCELERATOR, OTHER), 0),
        RuntimeError,
        "FSDP only supports single device modules",
    ),
    "two_kinds_of_devices": (
        lambda: wrapper_mesh.compute_device(None, at(ACCELERATOR, torch.device("xpu", 0)), 0),
        RuntimeError,
        "FSDP only supports single device modules",
    ),
    "some_on_the_cpu": (
        lambda: wrapper_mesh.compute_device(None, at(CPU, ACCELERATOR), 0),
        RuntimeError,
        "please pass in device_id argument",
    ),
    "elsewhere": (
        lambda: wrapper_mesh.compute_device(OTHER, at(ACCELERATOR), 3),
        ValueError,
        "Inconsistent compute device and `device_id` on rank 3: cuda:0 vs cuda:1",
    ),
    "sync_on_the_cpu": (
        lambda: broadcast_states(at(CPU), SimpleNamespace(groups=()), ACCELERATOR),
        ValueError,
        "The module has CPU parameters or buffers when `sync_module_states=True`",
    ),
}


@pytest.mark.parametrize("case", DEVICES)
def test_devices_that_do_not_fit_are_named(case: str) -> None:
    call, kind, fragment = DEVICES[case]
    error = error_of(call)
    assert error[0] == kind.__name__, error
    assert fragment in error[1]


@pytest.mark.parametrize(
    ("given", "tensors", "wanted"),
    [
        (None, at(ACCELERATOR, ACCELERATOR), ACCELERATOR),
        (CPU, at(CPU), CPU),
        (ACCELERATOR, at(CPU, ACCELERATOR), ACCELERATOR),
        (OTHER, at(CPU), OTHER),
        (ACCELERATOR, [], ACCELERATOR),
        ("cuda:1", at(torch.device("meta")), OTHER),
    ],
)
def test_the_device_is_as_asked_or_where_the_tensors_are(
    given: Any, tensors: list[Any], wanted: torch.device
) -> None:
    assert wrapper_mesh.compute_device(given, tensors, 0) == wanted


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    with pytest.warns(UserWarning, match="does not have an explicit index"):
        assert wrapper_mesh.compute_device(torch.device("cuda"), [], 0) == OTHER


def test_a_module_on_the_cpu_is_reported_beside_an_accelerator() -> None:
    with pytest.warns(UserWarning, match="is on CPU and will thus have"):
        wrapper_mesh.warn_about_cpu(at(CPU), ACCELERATOR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapper_mesh.warn_about_cpu(at(CPU), CPU)
        wrapper_mesh.warn_about_cpu(at(ACCELERATOR), ACCELERATOR)


# Warnings


def ignored_itself() -> None:
    module = build()
    FSDP(module, ignored_modules=[module])


def containers() -> None:
    FSDP(nn.ModuleDict({"a": nn.Linear(2, 2)}))


def half_frozen_with_originals() -> None:
    FSDP(
        nn.Sequential(half_frozen()),
        auto_wrap_policy=ModuleWrapPolicy({Stack}),
        use_orig_params=True,
    )


def cannot_reset() -> None:
    with torch.device("meta"):
        module = nn.Sequential(build())
    error_of(lambda: FSDP(module))


def no_gradients() -> None:
    wrapped().clip_grad_norm_(1.0)


def norms_apart() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    FSDP(
        Normed(),
        auto_wrap_policy=LINEARS,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )


WARNINGS: dict[str, tuple[Callable[[], None], type[Warning], str]] = {
    "ignored_itself": (ignored_itself, UserWarning, "Trying to ignore the top-level module"),
    "container": (containers, UserWarning, "FSDP will not all-gather parameters for containers"),
    "half_frozen": (half_frozen_with_originals, UserWarning, "have requires_grad=False"),
    "cannot_reset": (cannot_reset, UserWarning, "Unable to call `reset_parameters()`"),
    "no_gradients": (
        no_gradients,
        UserWarning,
        "with no gradients -- returning the total norm in the default dtype torch.float32",
    ),
    "redundant": (
        summoned(offload_to_cpu=True, writeback=False),
        UserWarning,
        "offload_to_cpu=True and rank0_only=False may result in",
    ),
    "norms_apart": (norms_apart, UserWarning, "BatchNorm1d"),
}


def _warned(context: RankContext, case: str) -> list[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WARNINGS[case][0]()
    return [[w.category.__name__, str(w.message)] for w in caught]


@pytest.mark.parametrize("case", WARNINGS)
def test_what_is_doubtful_is_reported(case: str) -> None:
    _, kind, fragment = WARNINGS[case]
    found = agreed(_warned, 2, case=case)
    assert any(name == kind.__name__ and fragment in text for name, text in found), found


def _problem_of_one_rank(context: RankContext, what: str) -> list[str]:
    model = wrapped(use_orig_params=True)
    if context.rank == 1 and what == "shape":
        model.module.inp.weight.data = torch.ones(3, 3)
    if context.rank == 1 and what == "device":
        model.to("meta")
    return error_of(lambda: model(batch(0, 0)))


@pytest.mark.parametrize(
    ("what", "fragment"),
    [
        ("shape", "Cannot writeback when the parameter shape changes"),
        ("device", "An FSDP-managed module unexpectedly has parameters on meta"),
    ],
)
def test_a_problem_of_one_rank_is_raised_on_all(what: str, fragment: str) -> None:
    first, second = on_ranks(_problem_of_one_rank, 2, what=what)
    assert first[0] == second[0] == "RuntimeError"
    assert first[1].startswith(f"on rank 1: {fragment}")
    assert second[1].startswith(fragment)


def _model_of_one_rank(context: RankContext) -> list[str]:
    width = 12 if context.rank == 1 else 13
    model = wrapped(lambda: Stack(hidden=width))
    return error_of(lambda: model(batch(0, 0)))


def test_ranks_with_different_models_all_hear_the_first_difference() -> None:
    for kind, text in on_ranks(_model_of_one_rank, 2):
        assert kind == "ValueError"
        assert "rank 0 has 'blocks.0.up.weight' (13, 10) float32" in text

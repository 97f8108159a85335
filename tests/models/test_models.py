"""What each model is: its size, its weights, its parameter groups, the traits that it states."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from conformance.models import ModelCase, cases
from conformance.models.seeding import seeded

from . import facts

ROOT = Path(__file__).parents[2]

every_case = pytest.mark.parametrize("case", cases().values(), ids=lambda case: case.name)


def checksum() -> str:
    """A digest of all weights, buffers and one batch of every case."""
    digest = hashlib.sha256()
    for case in cases().values():
        batch = facts.tensors(case.batch(1, 2, 3))
        for tensor in (*case.build().state_dict().values(), *batch):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def other_defaults() -> Iterator[None]:
    """A caller that works in float64 on the meta device."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@every_case
def test_a_model_is_small_on_the_cpu_in_float32_and_in_training_mode(case: ModelCase) -> None:
    module = case.build()
    parameters = list(module.parameters())
    assert {p.dtype for p in parameters} == {torch.float32}
    assert {t.device.type for t in (*parameters, *module.buffers())} == {"cpu"}
    assert sum(p.numel() for p in parameters) <= (80_000 if "wide" in case.traits else 20_000)
    assert module.training


@every_case
def test_weights_are_the_same_at_every_call(case: ModelCase) -> None:
    torch.manual_seed(1)
    first = case.build().state_dict()
    torch.manual_seed(2)
    second = case.build().state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(first[k].data_ptr() == second[k].data_ptr() for k in first)


def test_weights_and_batches_are_the_same_in_another_process() -> None:
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    other = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import checksum; print(checksum())"],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert other.stdout.strip() == checksum()


@every_case
def test_building_drawing_and_running_leave_the_random_state_alone(case: ModelCase) -> None:
    before = torch.get_rng_state()
    module = case.build()
    case.loss(module, case.batch(0, 0, 0)).backward()
    assert torch.equal(torch.get_rng_state(), before)


@every_case
def test_the_callers_default_device_and_dtype_change_nothing(case: ModelCase) -> None:
    weights = case.build().state_dict()
    batch = facts.tensors(case.batch(0, 1, 2))
    with other_defaults():
        others = case.build().state_dict()
        other_batch = facts.tensors(case.batch(0, 1, 2))
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device().type == "meta"
    assert all(torch.equal(weights[key], others[key]) for key in weights)
    assert all(torch.equal(a, b) for a, b in zip(batch, other_batch, strict=True))


def build_and_fail() -> None:
    with seeded("broken"):
        torch.rand(1)
        raise RuntimeError("no model")


def test_a_model_that_cannot_be_built_leaves_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    with other_defaults():
        with pytest.raises(RuntimeError, match="no model"):
            build_and_fail()
        assert torch.get_default_dtype() == torch.float64
    assert torch.equal(torch.get_rng_state(), before)


@every_case
def test_the_stated_traits_are_those_measured(case: ModelCase) -> None:
    assert set(case.traits) == facts.traits(case)
    assert case.concatenate != bool(case.traits & {"batchnorm", "varying"})
    assert case.leaves_out == bool(case.traits & {"unused", "varying"})


@every_case
def test_the_loss_is_a_number_from_one_forward(case: ModelCase) -> None:
    calls, _ = facts.calls_and_outputs(case)
    assert calls[""] == 1
    loss = case.loss(case.build(), case.batch(0, 0, 0))
    assert loss.shape == ()
    assert loss.isfinite()


@every_case
def test_every_parameter_group_has_parameters_and_the_root_is_one(case: ModelCase) -> None:
    module = case.build()
    units = {name for name, inner in module.named_modules() if isinstance(inner, case.units)}
    assert set(facts.owners(case, module).values()) == {"", *units}
    present = {type(inner) for inner in module.modules()}
    assert set(case.units) <= present


@every_case
def test_a_parameter_group_mixes_kinds_only_where_stated_and_holds_all_names_of_its_parameters(
    case: ModelCase,
) -> None:
    module = case.build()
    owner = facts.owners(case, module)
    trainable, groups = defaultdict(set), defaultdict(set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        trainable[owner[name]].add(parameter.requires_grad)
        groups[id(parameter)].add(owner[name])
    assert all(len(kinds) == 1 for kinds in trainable.values()) != ("mixed" in case.traits)
    assert all(len(places) == 1 for places in groups.values())


def test_the_tied_weight_is_one_tensor_under_both_names() -> None:
    module = cases()["transformer"].build()
    state = module.state_dict()
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert module.get_submodule("head").weight is module.get_submodule("embedding").weight


def test_tiny_parameters_have_the_three_shapes_and_one_is_a_group_alone() -> None:
    case = cases()["tiny"]
    module = case.build()
    shapes = {tuple(p.shape) for p in module.parameters()}
    assert {(1,), (1, 18), (3,)} <= shapes
    assert [n for n, owner in facts.owners(case, module).items() if owner == "gain"] == [
        "gain.gain"
    ]


def test_unused_parameters_are_a_whole_unit_and_a_part_of_used_ones() -> None:
    case = cases()["unused"]
    gradients = facts.gradients(case, [case.batch(0, 0, 0)])
    assert {name for name, gradient in gradients.items() if gradient is None} == {
        "branch.linear.weight",
        "branch.linear.bias",
        "first.spare",
        "second.spare",
    }


def test_frozen_units_stand_before_and_within_the_path_of_the_gradient() -> None:
    case = cases()["frozen"]
    module = case.build()
    needs = {}
    for name in ("encoder", "layers.0", "layers.1"):
        module.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: needs.update({name: output.requires_grad})
        )
    case.loss(module, case.batch(0, 0, 0))
    assert needs == {"encoder": False, "layers.0": False, "layers.1": True}


def test_batchnorm_has_float_integer_and_unsaved_buffers() -> None:
    module = cases()["batchnorm"].build()
    buffers = dict(module.named_buffers())
    assert {b.dtype for b in buffers.values()} == {torch.float32, torch.int64}
    assert set(buffers) - set(module.state_dict()) == {"input_scale"}


def test_batchnorm_statistics_differ_between_ranks() -> None:
    case = cases()["batchnorm"]
    modules = [case.build() for _ in range(2)]
    for rank, module in enumerate(modules):
        case.loss(module, case.batch(rank, 0, 0))
    first, second = (module.get_buffer("first.norm.running_mean") for module in modules)
    assert not torch.allclose(first, second)
    assert [m.get_buffer("second.norm.num_batches_tracked").item() for m in modules] == [1, 1]


def test_strided_parameters_are_channels_last_and_transposed() -> None:
    module = cases()["strided"].build()
    convolutions = [module.get_parameter(f"{name}.conv.weight") for name in ("first", "second")]
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in convolutions)
    assert not any(w.is_contiguous() for w in convolutions)
    head = module.get_parameter("head.weight")
    assert head.stride() == (1, 4)
    assert head.shape == (4, 12)

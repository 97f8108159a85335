"""Fixture models: shapes, determinism, where units are wrapped. No processes."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from conformance.adapter import StateKind
from conformance.models import fixtures
from conformance.models.fixtures import DEVICEInitMode, FSDPInitMode
from conformance.testing import DummyProcessGroup

# class: (shapes of the inputs, shape of the output, parameters, units of a recursive wrap)
MODELS: dict[type[fixtures.FSDPTestModel], tuple[list[tuple[int, ...]], tuple[int, ...], int, int]]
MODELS = {
    fixtures.TransformerWithSharedParams: ([(6, 2), (4, 2)], (4, 2, 23), 8427, 4),
    fixtures.NestedWrappedModule: ([(4, 8)], (4, 8), 496, 3),
    fixtures.AlwaysWrapNestedWrappedModule: ([(4, 8)], (4, 8), 496, 7),
    fixtures.NonUniformReqGradNWM: ([(4, 8)], (4, 8), 496, 3),
    fixtures.NestedWrappedModuleWithDelay: ([(4, 8)], (4, 8), 496, 3),
    fixtures.MixtureOfExperts: ([(4, 8)], (4, 8), 799, 1),
    fixtures.SkipModel: ([(2, 10)], (2, 10), 300, 2),
    fixtures.NestedModel: ([(8, 5)], (8, 5), 296, 6),
    fixtures.TestDummyModel: ([(8, 8)], (8, 8), 3320, 4),
    fixtures.SimpleModel: ([(2, 2)], (2, 4), 12, 1),
    fixtures.FakeMPModel: ([(2, 2)], (2, 2), 22, 1),
    fixtures.Model: ([(2, 4)], (2, 5), 45, 1),
    fixtures.TiedDummyModel: ([(8, 8)], (8, 8), 562, 2),
    fixtures.TestDummyModelUneven: ([(8, 5)], (8, 5), 860, 4),
    fixtures.LoraModel: ([(4, 16)], (4, 16), 800, 2),
    fixtures.SaveForwardInputsModel: ([(4, 100)], (4, 100), 20200, 2),
    fixtures.Transformer: ([(4, 16)], (4, 16, 8), 6848, 2),
    fixtures.BlocksModel: ([(4, 64)], (4, 64), 66560, 8),
    fixtures.SeqModel: ([(4, 8)], (4, 8), 432, 6),
    fixtures.NestedSeqModel: ([(4, 8)], (4, 8), 432, 6),
}
GROUP = DummyProcessGroup(1, 2)
every_model = pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)


class Unit(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@every_model
def test_shapes_are_those_that_the_docstring_says(cls: type[fixtures.FSDPTestModel]) -> None:
    inputs, output, parameters, _ = MODELS[cls]
    model = cls.init(GROUP)
    given = model.get_input("cpu")
    result = model(*given)
    assert [tuple(tensor.shape) for tensor in given] == inputs
    assert tuple(result.shape) == output
    assert sum(p.numel() for p in model.parameters()) == parameters
    loss = model.get_loss(given, result)
    model.run_backward(loss)
    used = [p for p in model.parameters() if p.grad is not None]
    assert loss.dim() == 0
    assert used
    assert all(p.requires_grad for p in used)


@every_model
def test_weights_depend_on_the_seed_alone(cls: type[fixtures.FSDPTestModel]) -> None:
    state = torch.get_rng_state()
    one, same = cls.init(GROUP), cls.init(GROUP)
    other: Any = cls
    different = other.init(GROUP, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    # biases and scales of norms are constants
    pairs = list(zip(one.parameters(), same.parameters(), different.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert all(not torch.equal(a, c) for a, _, c in pairs if a.dim() > 1)


@every_model
def test_inputs_repeat_and_differ_between_ranks(cls: type[fixtures.FSDPTestModel]) -> None:
    first, again = (cls.init(GROUP).get_input("cpu") for _ in range(2))
    elsewhere = cls.init(DummyProcessGroup(0, 2)).get_input("cpu")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, elsewhere, strict=True))


@every_model
def test_units_are_wrapped_only_when_asked(cls: type[fixtures.FSDPTestModel]) -> None:
    plain = cls.init(GROUP, FSDPInitMode.NO_FSDP, wrap=Unit)
    wrapped = cls.init(GROUP, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, wrap=Unit)
    assert not any(isinstance(m, Unit) for m in plain.modules())
    assert sum(isinstance(m, Unit) for m in wrapped.modules()) == MODELS[cls][3]
    plain.eval()
    wrapped.eval()
    given = plain.get_input("cpu")
    torch.testing.assert_close(plain(*given), wrapped(*given))


def is_model(value: object) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, nn.Module)
        and value is not fixtures.FSDPTestModel
    )


@pytest.mark.parametrize("name", [n for n in fixtures.__all__ if is_model(getattr(fixtures, n))])
def test_a_model_says_what_it_is_for(name: str) -> None:
    cls = getattr(fixtures, name)
    for part in ("Purpose: ", "Exposes: "):
        assert part in cls.__doc__


def test_the_output_projection_is_the_embedding() -> None:
    model = fixtures.TransformerWithSharedParams()
    assert model.output_proj.weight is model.embed_tokens.weight
    assert model.long_buffer.dtype == torch.long


def test_experts_differ_and_the_rest_does_not() -> None:
    one, other = (fixtures.MixtureOfExperts(rank=rank) for rank in (0, 1))
    same = [torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    assert same == [True, True, True, True, False, False, True, True]


def test_only_the_last_layer_trains() -> None:
    model = fixtures.NonUniformReqGradNWM()
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "module.2.1.weight",
        "module.2.1.bias",
    ]


def test_delays_take_time() -> None:
    import time

    model = fixtures.NestedWrappedModuleWithDelay(delay_after_loss_ms=50.0)
    given = model.get_input("cpu")
    output = model(*given)
    started = time.monotonic()
    model.get_loss(given, output)
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (fixtures.MLP(5, with_buffer=True), (2, 5)),
        (fixtures.MLPStack(6, with_seq_parallel=True), (2, 3, 6)),
        (fixtures.DoubleLinear(4, use_second_linear=False), (2, 4)),
        (fixtures.LinearWithSleep(4, 0.0), (2, 4)),
        (fixtures.SkipModule(), (2, 10)),
        (fixtures.NestedLinear(), (2, 10)),
        (fixtures.DummyDDP(fixtures.SkipModule()), (2, 10)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_keep_the_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    output: Tensor = model(torch.ones(shape))
    assert output.shape == shape
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for n, p in model.named_parameters() if "lin2" not in n)


def test_a_stack_has_multipliers_3_4_3() -> None:
    widths = [m.in_proj.out_features for m in fixtures.MLPStack(6) if isinstance(m, fixtures.MLP)]
    assert widths == [18, 24, 18]


def test_a_stack_checkpoints_and_wraps_every_mlp() -> None:
    plain, stack = fixtures.MLPStack(4), fixtures.MLPStack(4)
    wrapped = stack.parallelize(None, Unit, use_activation_checkpointing=True)
    assert sum(isinstance(m, Unit) for m in wrapped.modules()) == 4
    x = torch.ones(2, 4)
    assert torch.equal(wrapped(x), plain(x))


def test_both_outputs_of_a_double_linear_train() -> None:
    first, second = fixtures.DoubleLinear(3)(torch.ones(2, 3))
    assert (first.shape, second.shape) == ((2, 3), (2, 3))


def test_a_meta_mlp_has_no_data() -> None:
    model = fixtures.MLP(3, device="meta", with_buffer=True)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu").reset_parameters()
    assert model.buffer is not None
    assert bool(model.buffer.isfinite().all())


def test_nested_model_has_the_other_wrappings() -> None:
    assert (
        sum(isinstance(m, Unit) for m in fixtures.NestedModel().wrap_units_alt(Unit).modules()) == 2
    )
    for add_to_unit in (True, False):
        model, added = fixtures.NestedModel().wrap_units_with_unmanaged_params(
            Unit, add_to_unit=add_to_unit
        )
        owners = [type(m) for m in model.modules() for p in m._parameters.values()
                  if any(p is a for a in added)]  # fmt: skip
        assert [tuple(p.shape) for p in added] == [(5, 5), (5, 5)]
        assert [owner is Unit for owner in owners] == [add_to_unit] * 2
    groups = fixtures.NestedModel().two_groups()
    assert [len(group["params"]) for group in groups] == [11, 5]


def test_a_timed_layer_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]  # seconds, on a clock that goes while somebody sleeps
    monkeypatch.setattr("time.sleep", passed.append)
    monkeypatch.setattr("time.perf_counter", lambda: sum(passed))
    layer = fixtures.Layer(30.0)
    with pytest.raises(RuntimeError, match="there was no forward"):
        layer.get_time()
    inputs = torch.ones(2, 8)
    assert layer.weight is not None
    assert torch.equal(layer(inputs), inputs @ layer.weight)
    assert layer.get_time() == pytest.approx(30.0)
    plain = fixtures.Layer(0.0, has_params=False)
    assert torch.equal(plain(inputs), inputs)
    assert not list(plain.parameters())
    assert plain.get_time() == 0.0


def test_the_language_model_ties_recomputes_and_masks() -> None:
    args = fixtures.ModelArgs(dropout_p=0.0)
    model = fixtures.Transformer(args)
    assert model.output.weight is model.tok_embeddings.weight
    (tokens,) = model.get_input("cpu")
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % args.vocab_size
    logits = model(tokens)
    assert torch.equal(logits[:, :-1], model(changed)[:, :-1])
    assert not torch.equal(logits[:, -1], model(changed)[:, -1])
    logits.sum().backward()
    again = fixtures.Transformer(fixtures.ModelArgs(dropout_p=0.0, checkpoint_activations=True))
    again.load_state_dict(model.state_dict())
    again(tokens).sum().backward()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    untied = fixtures.Transformer(fixtures.ModelArgs(weight_tying=False))
    assert untied.output.weight is not untied.tok_embeddings.weight
    with pytest.raises(ValueError, match="17 tokens, the model has 16 places"):
        model(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="16 cannot be divided among 3 heads"):
        fixtures.Transformer(fixtures.ModelArgs(n_heads=3))


def test_kinds_of_state_dicts_are_those_of_adapters() -> None:
    assert set(fixtures.STATE_DICT_MAPPING.values()) == set(get_args(StateKind))
    assert set(fixtures.STATE_DICT_TYPES) < set(get_args(StateKind))
    assert [len(kind) for kind in (fixtures._OSDCommMethod, fixtures._ModelClass)] == [3, 2]


class Placed(Unit):
    """Remembers where its module was when it was wrapped."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.then = {parameter.device.type for parameter in module.parameters()}


@pytest.mark.parametrize(
    ("mode", "wrapped_on", "ends_on"),
    [
        (DEVICEInitMode.DEVICE_BEFORE, "meta", "meta"),
        (DEVICEInitMode.DEVICE_AFTER, "cpu", "meta"),
        (DEVICEInitMode.DEVICE_NEVER, "cpu", "cpu"),
    ],
)
def test_the_device_mode_says_when_a_model_moves(
    mode: DEVICEInitMode, wrapped_on: str, ends_on: str
) -> None:
    model = fixtures.NestedWrappedModule.init(
        GROUP, FSDPInitMode.RECURSIVE, mode, wrap=Placed, device="meta"
    )
    placed = [module.then for module in model.modules() if isinstance(module, Placed)]
    assert placed == [{wrapped_on}] * 3
    assert {parameter.device.type for parameter in model.parameters()} == {ends_on}

"""Optimizers that need whole tensors are refused on shards; those that do not are left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import fully_shard
from fsdp.optim_state.probe import is_elementwise
from fsdp.wrapper_options import ShardingStrategy
from tests.fsdp.plain import batch, build, compare, loss_of, whole
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_training import shard_blocks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import OPTIMIZERS, params_of, step, wrapped

CPU = torch.device("cpu")


class TrustRatio(torch.optim.Optimizer):
    """Scales each step by the ratio of two norms, as LAMB and LARS do; its state looks harmless."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    entry = self.state[param]
                    mean = entry.setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.1)
                    param.sub_(mean * (param.norm() / (mean.norm() + 1e-6)), alpha=group["lr"])


class GlobalNorm(TrustRatio):
    """Divides by the norm of all gradients together, as some do to clip."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=0.01)


class Factored(TrustRatio):
    """Keeps one number per row; what it keeps beside its groups is not plain."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.scale = torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = param.grad.reshape(-1, 1).mean(0, keepdim=True)
                    self.state[param]["rows"] = rows
                    param.sub_(rows.sum() * self.scale, alpha=group["lr"])


class LAMB(Factored):
    """Cannot be tried, and keeps nothing that would tell: known by its name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        raise AssertionError("it is refused before")


class Noisy(TrustRatio):
    """Adds noise: the same for no two runs, and right on shards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


class Holding(torch.optim.SGD):
    """Holds another optimizer, which a copy of it would step for real."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        params = list(params)
        super().__init__(params, lr=lr)
        self.inner = torch.optim.SGD(params, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


NEEDS_WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "trust_ratio": TrustRatio,
    "global_norm": GlobalNorm,
    "known_by_name": LAMB,
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.01),
    "sparse": lambda params: torch.optim.SparseAdam(list(params)),
}


def _refused(context: RankContext, name: str, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    before = params_of(model)
    optimizer = NEEDS_WHOLE[name](model.parameters())
    loss_of(model, batch(0, context.rank)).backward()
    with pytest.raises(NotImplementedError, match=r"with whole tensors|sparse gradients only"):
        optimizer.step(lambda: torch.ones(()))  # type: ignore[arg-type, return-value]
    after = params_of(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())


@ORIGINAL
@pytest.mark.parametrize("name", NEEDS_WHOLE)
def test_an_optimizer_that_needs_whole_tensors_is_refused_before_it_steps(
    name: str, *, original: bool
) -> None:
    on_ranks(_refused, 2, name=name, original=original)


def _told_by_shapes(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    optimizer = Factored(model.parameters())
    loss_of(model, batch(0, context.rank)).backward()
    with pytest.raises(NotImplementedError, match=r"'rows' with the shape \(1, 1\)"):
        optimizer.step()


@ORIGINAL
def test_an_optimizer_that_cannot_be_tried_is_told_by_its_states(*, original: bool) -> None:
    on_ranks(_told_by_shapes, 2, original=original)


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "noisy": Noisy,
    "holding": Holding,
    "asgd": torch.optim.ASGD,
    "adadelta": torch.optim.Adadelta,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "adamax": torch.optim.Adamax,
}


def _left_alone(context: RankContext, name: str, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    optimizer = ELEMENTWISE[name](model.parameters())
    before = torch.get_rng_state() if name != "noisy" else None
    twin = copy.deepcopy(torch.get_rng_state())
    step(model, optimizer, 0, context.rank)
    step(model, optimizer, 1, context.rank)
    assert before is None or torch.equal(torch.get_rng_state(), twin)


@ORIGINAL
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_that_works_element_by_element_is_left_alone(
    name: str, *, original: bool
) -> None:
    on_ranks(_left_alone, 2, name=name, original=original)


def _whole(context: RankContext, name: str) -> None:
    """Original parameters that are not sharded are whole: everything works on them."""
    model, plain = (
        wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
        build(),
    )
    make = {"adafactor": torch.optim.Adafactor, "trust_ratio": TrustRatio}[name]
    mine, theirs = make(model.parameters()), make(plain.parameters())
    for number in range(2):
        step(model, mine, number, context.rank)
        for rank in range(context.world_size):
            (loss_of(plain, batch(number, rank)) / context.world_size).backward()
        theirs.step()
        theirs.zero_grad()
    for key, value in params_of(model).items():
        torch.testing.assert_close(value, plain.get_parameter(key), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adafactor", "trust_ratio"])
def test_whole_parameters_take_any_optimizer(name: str) -> None:
    on_ranks(_whole, 2, name=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_of_torch_are_known_to_work_element_by_element(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    param = nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, kind)([param], weight_decay=0.1, **options)
    before = copy.deepcopy(optimizer.state_dict())
    assert is_elementwise(optimizer, optimizer.param_groups[0], CPU) is True
    assert str(optimizer.state_dict()) == str(before)
    assert torch.equal(param, torch.ones(3))


class MadeAtOnce(torch.optim.Optimizer):
    """Its states are made with it, as Adagrad's of torch 2.11, and no step could make them."""

    def __init__(self, params: Any, start: float | None = 2.0) -> None:
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            sums = torch.arange(float(param.numel())).view_as(param)
            sums = sums if start is None else torch.full_like(param, start)
            self.state[param] = {"sum": sums, "step": torch.tensor(0.0), "name": "sum"}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] += 1
            state["sum"].add_(param.grad**2)
            param.sub_(0.1 * param.grad / state["sum"].sqrt() / state["step"])


class NormMadeAtOnce(MadeAtOnce):
    """Its sum is of all elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"].add_((param.grad**2).sum())
            param.sub_(0.1 * param.grad / self.state[param]["sum"].sqrt())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (MadeAtOnce, True),
        (NormMadeAtOnce, False),
        (lambda params: MadeAtOnce(params, None), None),  # another one for each element
        (lambda params: MadeAtOnce([*params, nn.Parameter(torch.ones(0))]), True),
    ],
)
def test_states_that_no_step_makes_are_tried_from_what_they_start_with(
    make: Any, *, expected: bool | None
) -> None:
    optimizer = make([nn.Parameter(torch.ones(3))])
    before = str(optimizer.state_dict())
    assert is_elementwise(optimizer, optimizer.param_groups[0], CPU) is expected
    assert str(optimizer.state_dict()) == before


def test_an_optimizer_is_tried_as_it_is_used() -> None:
    """A scheduler and a gradient scaler leave things on the optimizer that a trial must not use."""
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param], fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    assert is_elementwise(optimizer, optimizer.param_groups[0], CPU) is True
    assert not calls
    assert scheduler.last_epoch == 0
    for made in (Noisy([param]), Holding([param]), torch.optim.LBFGS([param])):
        assert is_elementwise(made, made.param_groups[0], CPU) is None
    assert torch.equal(param, torch.ones(3))


@pytest.mark.parametrize("rate", [0.0, 1e-12, torch.tensor(0.0)], ids=["zero", "tiny", "tensor"])
def test_a_rate_that_moves_nothing_yet_hides_nothing(rate: Any) -> None:
    """Warm-up starts at zero, and an optimizer is looked at once."""
    param = nn.Parameter(torch.ones(3))
    for made, wanted in ((TrustRatio([param], lr=rate), False), (Noisy([param], lr=rate), None)):
        assert is_elementwise(made, made.param_groups[0], CPU) is wanted
    adam = torch.optim.Adam([param], lr=float(rate))
    assert is_elementwise(adam, adam.param_groups[0], CPU) is True


class Idle(TrustRatio):
    """Moves nothing in its first steps, whatever its rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        return None


class NovoGrad(torch.optim.SGD):
    """Looks element by element on a few numbers; its name says otherwise."""


def test_a_trial_that_moves_nothing_says_nothing() -> None:
    made = Idle([nn.Parameter(torch.ones(3))])
    assert is_elementwise(made, made.param_groups[0], CPU) is None


def _known_name(context: RankContext) -> None:
    model = wrapped()
    optimizer = NovoGrad(model.parameters(), lr=0.01)
    loss_of(model, batch(0, context.rank)).backward()
    with pytest.raises(NotImplementedError, match="NovoGrad does not step element by element"):
        optimizer.step()


def test_a_known_name_counts_more_than_a_trial() -> None:
    on_ranks(_known_name, 2)


class Vectors(nn.Module):
    """Parameters that divide by two and three, of one dim alone or of two."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ParameterList([torch.randn(shape)]) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (block[0] for block in self.blocks)
        return (torch.tanh(x[:, None, :6] * first) * second).sum(1)


def _on_dtensors(context: RankContext, name: str, shape: tuple[int, ...]) -> str:
    """A step of ``fully_shard``'s DTensors: that of the plain model, or a refusal."""
    plain = build(Vectors, shape=shape) if shape else build()
    model = copy.deepcopy(plain)
    fully_shard(model) if shape else shard_blocks(model)
    mine, theirs = (NEEDS_WHOLE[name](each.parameters()) for each in (model, plain))
    before = [whole(param.detach()) for param in model.parameters()]

    def sharded() -> torch.Tensor:
        mine.zero_grad()
        loss = loss_of(model, batch(0, context.rank))
        loss.backward()
        return loss

    def unsharded() -> torch.Tensor:
        theirs.zero_grad()
        losses = [loss_of(plain, batch(0, r)) / context.world_size for r in range(2)]
        total = torch.stack(losses).sum()
        total.backward()
        return total

    sharded(), unsharded()
    closures = (sharded, unsharded) if name == "lbfgs" else ()
    try:
        mine.step(*closures[:1])  # type: ignore[arg-type]
    except NotImplementedError as error:
        after = [whole(param.detach()) for param in model.parameters()]
        assert all(map(torch.equal, before, after))
        return str(error)
    theirs.step(*closures[1:])  # type: ignore[arg-type]
    compare(model, plain, tolerance=1e-5)
    return "right"


@pytest.mark.parametrize(
    ("name", "shape"),
    [("trust_ratio", ()), ("global_norm", ()), ("lbfgs", (6,)), ("lbfgs", (4, 6))],
)
def test_dtensors_are_stepped_on_as_whole_tensors(name: str, shape: tuple[int, ...]) -> None:
    """They know what they are a part of."""
    assert agreed(_on_dtensors, 2, name=name, shape=shape) == "right"


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        # Here no operator is missing: it would be wrong without a word.
        ("adafactor", (6,), "Adafactor reads norms of whole tensors as numbers"),
        ("adafactor", (), "Adafactor reads norms of whole tensors as numbers"),
        ("sparse", (), "SparseAdam takes sparse gradients only"),
        ("lbfgs", (), "LBFGS sees a parameter as one vector"),
    ],
)
def test_what_dtensors_do_not_serve_is_refused_on_all_ranks(
    name: str, shape: tuple[int, ...], reason: str
) -> None:
    assert agreed(_on_dtensors, 2, name=name, shape=shape).startswith(reason)


def _replaced(context: RankContext) -> str:
    """A DTensor that the user registers in the place of a parameter is looked at as well."""
    model = fully_shard(nn.Linear(6, 6))
    fresh = nn.Parameter(torch.zeros_like(model.weight))
    model.weight = fresh
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(NotImplementedError) as caught:
        torch.optim.Rprop([fresh]).step()
    return str(caught.value)


def test_a_parameter_that_was_replaced_is_refused_to_the_same_optimizers() -> None:
    assert "'weight', a DTensor of shape (6, 6)" in agreed(_replaced, 2)

"""The oracle against arithmetic done by hand, and against one process that sees all the data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.adapter import BuildConfig, Conventions, OptimizerFactory
from conformance.execute import oracle_runs
from conformance.oracle import VirtualRanks
from conformance.per_rank import PerRank

SGD = OptimizerFactory(name="sgd", optimizer_class=torch.optim.SGD, defaults={"lr": 0.1})
CONFIG = BuildConfig(device=torch.device("cpu"), world_size=3)


def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = module(batch)
    return output.square().mean()


def data(world: int, size: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(size, 2, generator=generator) for _ in range(world))


def linear() -> nn.Linear:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
        module.bias.copy_(torch.tensor([0.25, -1.0]))
    return module


def virtual(world: int, **conventions: str) -> VirtualRanks:
    return VirtualRanks(world, Conventions(**conventions), frozenset(), seed=0)  # type: ignore[arg-type]


def test_one_step_is_the_step_on_the_concatenated_batch() -> None:
    oracle, batches = virtual(3), data(3)
    w = oracle.build(linear(), SGD, CONFIG)
    result = oracle.step(w, [PerRank(batches)], loss)
    plain = linear()
    whole = loss(plain, torch.cat(batches))
    whole.backward()
    for parameter, expected in zip(w.module.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(parameter, expected - 0.1 * expected.grad)
    per_rank = torch.stack(list(result.losses[0].values))  # type: ignore[attr-defined]
    torch.testing.assert_close(per_rank.mean(), whole.detach())


def trained(world: int, conventions: Conventions, *, reverse: bool) -> list[torch.Tensor]:
    """Parameters after steps of two micro-batches of every rank."""
    oracle = VirtualRanks(world, conventions, frozenset(), seed=0, reverse=reverse)
    w = oracle.build(linear(), SGD, CONFIG)
    batches = data(2 * world, size=64)
    for _ in range(5):
        oracle.step(w, [PerRank(batches[:world]), PerRank(batches[world:])], loss)
    return [p.detach() for p in w.module.parameters()]


@pytest.mark.parametrize("reduced_as", ["parameter", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_run_with_the_other_order_is_made_where_the_order_makes_a_difference(
    world: int, reduced_as: str
) -> None:
    conventions = Conventions(reduced_as=reduced_as)
    pairs = zip(
        trained(world, conventions, reverse=False),
        trained(world, conventions, reverse=True),
        strict=True,
    )
    differ = not all(torch.equal(one, other) for one, other in pairs)
    made = "reversed" in oracle_runs(conventions, world)
    assert made >= differ  # of four summands, vector units may take pairs: either order is the same
    assert made == (world > 2)


@pytest.mark.parametrize("world", [2, 3])
def test_a_model_in_float64_has_a_run_in_float32_for_one_in_float64(world: int) -> None:
    plain = oracle_runs(Conventions(), world)
    double = oracle_runs(Conventions(), world, dtype=torch.float64)
    assert [each.replace("double", "single") for each in plain] == list(double)
    assert [run.dtype for run in double.values()].count(torch.float32) == 1


def test_three_micro_batches_are_the_mean_of_their_gradients() -> None:
    oracle, batches = virtual(2), data(6)
    w = oracle.build(linear(), SGD, CONFIG)
    micro = [PerRank((batches[i], batches[i + 3])) for i in range(3)]
    oracle.step(w, micro, loss)
    plain = linear()
    loss(plain, torch.cat(batches)).backward()
    for parameter, expected in zip(w.module.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(parameter, expected - 0.1 * expected.grad)


@pytest.mark.parametrize("convention", ["mean", "sum"])
def test_clipping_leaves_a_ranks_own_gradient(convention: str) -> None:
    oracle = virtual(1, gradients=convention)
    w = oracle.build(linear(), SGD, CONFIG)
    seen: dict[str, list[PerRank]] = {}
    w.observe = lambda moment, index=0: seen.setdefault(moment, []).append(oracle.rank_gradients(w))
    oracle.step(w, [PerRank(data(1))], loss, max_norm=1e-3)
    plain = linear()
    loss(plain, *data(1)).backward()
    for moment in ("gradients", "clipped"):
        [own] = seen[moment][0].values
        for fqn, parameter in plain.named_parameters():
            torch.testing.assert_close(own[fqn], parameter.grad)


def test_gradients_are_reduced_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []
    made = VirtualRanks.reduced
    monkeypatch.setattr(
        VirtualRanks, "reduced", lambda self, *a: reduced.append(1) or made(self, *a)
    )
    oracle, batches = virtual(2), data(6)
    w = oracle.build(linear(), SGD, CONFIG)
    oracle.step(w, [PerRank((batches[i], batches[i + 3])) for i in range(3)], loss)
    assert len(reduced) == 1


def test_a_declared_sum_is_the_world_times_the_mean() -> None:
    batches, seen = data(2), {}
    for convention in ("mean", "sum"):
        oracle = virtual(2, gradients=convention)
        w = oracle.build(linear(), SGD, CONFIG)
        w.observe = lambda moment, index=0, w=w, c=convention: (
            seen.update({c: w.module.weight.grad.clone()}) if moment == "gradients" else None
        )
        oracle.step(w, [PerRank(batches)], loss)
    assert torch.equal(seen["sum"], 2 * seen["mean"])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.used(x)
        return output


def test_an_unused_parameter_gets_what_is_declared() -> None:
    for convention, there in (("none", False), ("zero", True)):
        oracle = virtual(2, unused_grad=convention)
        w = oracle.build(Unused(), SGD, CONFIG)
        seen: list[bool] = []
        w.observe = lambda moment, index=0, w=w, seen=seen: (
            seen.append(w.module.unused.weight.grad is not None) if moment == "gradients" else None
        )
        oracle.step(w, [PerRank(data(2))], loss)
        assert seen == [there]


def test_a_parameter_has_gradients_and_moves_while_it_is_not_frozen() -> None:
    for convention in ("none", "zero", "unit"):
        oracle, batches = virtual(2, unused_grad=convention), data(2)
        w = oracle.build(nn.Sequential(linear(), linear()), SGD, CONFIG)
        for trains in (False, True, False):
            oracle.set_trainable(w, "0", trains=trains)
            oracle.zero_grad(w)
            before = [p.detach().clone() for p in w.module.parameters()]
            oracle.backward(w, oracle.forward(w, PerRank(batches), loss))
            given = [g is not None for g in oracle.full_gradients(w).values()]
            oracle.optimizer_step(w)
            after = [p.detach() for p in w.module.parameters()]
            moved = [not torch.equal(b, a) for b, a in zip(before, after, strict=True)]
            assert given == moved == [trains, trains, True, True]


def test_every_rank_keeps_its_own_running_statistics() -> None:
    batches = data(2)
    w = virtual(2).build(nn.BatchNorm1d(2), SGD, CONFIG)
    oracle = virtual(2)
    oracle.step(w, [PerRank(batches)], loss)
    buffers = oracle.buffers(w).values
    for rank in (0, 1):
        expected = 0.1 * batches[rank].mean(0)
        torch.testing.assert_close(buffers[rank]["running_mean"], expected)


def test_rank_0_gives_its_running_statistics_when_that_is_declared() -> None:
    batches = data(2)
    oracle = virtual(2, buffers="rank0")
    w = oracle.build(nn.BatchNorm1d(2), SGD, CONFIG)
    oracle.step(w, [PerRank(batches)], loss)
    oracle.evaluate(w, PerRank(batches), loss)
    buffers = oracle.buffers(w).values
    assert torch.equal(buffers[0]["running_mean"], buffers[1]["running_mean"])
    torch.testing.assert_close(buffers[0]["running_mean"], 0.1 * batches[0].mean(0))


def test_every_rank_draws_its_own_random_numbers_and_leaves_the_global_ones() -> None:
    oracle = virtual(2)
    w = oracle.build(
        nn.Dropout(0.5),
        OptimizerFactory(name="none", optimizer_class=_NoOptimizer, defaults={}),
        CONFIG,
    )
    before = torch.get_rng_state()
    ones = torch.ones(64)
    first = oracle.forward(w, PerRank((ones, ones)), lambda m, x: m(x))
    second = oracle.forward(w, PerRank((ones, ones)), lambda m, x: m(x))
    assert torch.equal(torch.get_rng_state(), before)
    masks = [*first.values, *second.values]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[i + 1 :])
    torch.manual_seed(1)  # rank_seed(0, 1)
    assert torch.equal(first.values[1], nn.functional.dropout(ones, 0.5))


class _NoOptimizer(torch.optim.SGD):
    def __init__(self, parameters: object) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))])

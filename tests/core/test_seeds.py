"""Every seed draws data of its own; the same data reach the wrapper and what it is judged by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.adapter import Conventions
from conformance.execute import STEPS_OF_A_SEED, OracleRequest, drawn_batch, drawn_step, own_batches
from conformance.models import Batch, case


@pytest.fixture(autouse=True)
def nothing_is_drawn_yet() -> None:
    drawn_batch.cache_clear()


def batches_of(seed: int, model: str = "mlp") -> list[torch.Tensor]:
    draw = drawing_of(seed, model)
    return [draw(step, micro)[0] for step in range(2) for micro in range(2)]


def drawing_of(
    seed: int, model: str = "mlp", *, rank: int = 1, scenario: str = "train"
) -> Callable[[int, int], Batch]:
    request = OracleRequest(
        world=2,
        conventions=Conventions(),
        capabilities=(),
        case=f"{model}/{scenario}",
        seed=seed,
        directory="",
    )
    return own_batches(request, rank, torch.device("cpu"), torch.float32)


def test_seed_0_draws_what_the_model_case_draws() -> None:
    own = [case("mlp").batch(1, step, micro)[0] for step in range(2) for micro in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(batches_of(0), own, strict=True))


def test_no_two_seeds_draw_the_same() -> None:
    drawn = [batch for seed in range(4) for batch in batches_of(seed)]
    assert len({batch.numpy().tobytes() for batch in drawn}) == len(drawn)


def test_the_cases_of_a_model_draw_a_batch_once() -> None:
    first, second = drawing_of(0), drawing_of(0, scenario="checkpoint/kind=full,options=default")
    assert first(1, 1) is second(1, 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda: drawing_of(1)(1, 1),
        lambda: drawing_of(0, "uneven")(1, 1),
        lambda: drawing_of(0, rank=0)(1, 1),
        lambda: drawing_of(0)(0, 1),
        lambda: drawing_of(0)(1, 0),
    ],
    ids=["seed", "model", "rank", "step", "micro-batch"],
)
def test_what_tells_batches_apart_draws_another(other: Callable[[], Batch]) -> None:
    assert not torch.equal(drawing_of(0)(1, 1)[0], other()[0])


@pytest.mark.parametrize("seed", [1, 7])
def test_whose_turn_it_is_does_not_depend_on_the_seed(seed: int) -> None:
    turns = [case("varying").batch(0, drawn_step(s, 3), 1)[2] % 2 for s in (0, seed)]
    assert torch.equal(*turns)
    assert STEPS_OF_A_SEED % 2 == 0


def test_a_batch_first_asked_for_in_inference_can_still_be_trained_on() -> None:
    draw = drawing_of(0)
    with torch.inference_mode():
        inputs, _ = draw(0, 0)
    assert draw(0, 0)[0] is inputs
    (inputs @ torch.ones(inputs.shape[1], 1, requires_grad=True)).sum().backward()

"""The checks of stored and of live bytes, on runs told by hand, and the meter that reads them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Event, Thread

import pytest
import torch
from torch import Tensor, nn

from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS, Ledger
from conformance.checks.sharding import PARTS, needed
from conformance.scenarios.live_bytes import (
    BUSY_SECONDS,
    FIRST_SETTLE_SECONDS,
    SETTLE_SECONDS,
    AcceleratorMeter,
    metering,
    others_rest,
)
from conformance.scenarios.memory import STEPS
from conformance.scenarios.run import stored_bytes
from tests.checks.literal import Net, Story, cause, first_mismatch

LARGER = 16  # times as many rows as the literal model, so that alignment is small beside it
PARAMETERS = LARGER * 4 * (12 + 3 + 2 + 2)  # body, bias, kept, spare; the tied head is body
OPTIMIZER = LARGER * 4 * 12
CLAIMS = frozenset({"shard.parameters", "shard.optimizer", "memory.reshard"})


def sizes(told: Story, step: int) -> None:
    values = {
        name: p.detach().repeat(LARGER, *[1] * (p.dim() - 1))
        for name, p in Net().named_parameters(remove_duplicate=False)
    }
    told.see("parameters", values, step=step)
    state = {"body/momentum_buffer": values["body"], "body/step": torch.tensor(1.0)}
    told.see("optimizer_state", {**state, "head/momentum_buffer": values["body"]}, step=step)


def stored(parameters: int, optimizer: int, **more: int) -> Story:
    told = Story(case=Case.of("literal", "train"), capabilities=CLAIMS)
    told.phase("step 0")
    sizes(told, 0)
    value = {"parameters/float32": parameters, "optimizer/float32": optimizer}
    told.see("stored", {**value, **{k.replace("_", "/"): v for k, v in more.items()}}, step=0)
    return told


def test_half_on_each_of_two_ranks_is_sharded() -> None:
    assert cause("sharding.bytes", stored(PARAMETERS // 2, OPTIMIZER // 2)) is None


@pytest.mark.parametrize(
    ("told", "part"),
    [
        (stored(PARAMETERS, OPTIMIZER // 2), "parameters"),
        (stored(PARAMETERS // 2, OPTIMIZER), "optimizer"),
        (stored(PARAMETERS // 2, OPTIMIZER // 2, parameters_float64=2 * PARAMETERS), "float64"),
    ],
)
def test_a_full_copy_on_every_rank_is_not_sharded(told: Story, part: str) -> None:
    found = first_mismatch("sharding.bytes", told)
    assert found is not None
    assert found.cause is Cause.NOT_SHARDED
    assert part in found.sentence


@pytest.mark.parametrize("whole", [None, 0, 1])
def test_bytes_are_counted_after_every_step_in_which_they_are_seen(whole: int | None) -> None:
    told = stored(PARAMETERS // (2 - (whole == 0)), OPTIMIZER // 2)
    told.phase("step 1")
    sizes(told, 1)
    parameters = PARAMETERS // (2 - (whole == 1))
    told.see(
        "stored",
        {"parameters/float32": parameters, "optimizer/float32": OPTIMIZER // 2},
        step=1,
    )
    found = first_mismatch("sharding.bytes", told)
    assert (None if found is None else found.where["step"]) == whole


@pytest.mark.parametrize(
    ("optimizer", "expected"), [(OPTIMIZER // 2, None), (OPTIMIZER, Cause.NOT_SHARDED)]
)
def test_bytes_are_counted_after_a_load_too(optimizer: int, expected: Cause | None) -> None:
    told = Story(case=Case.of("literal", "checkpoint", kind="save"), capabilities=CLAIMS)
    told.phase("load")
    sizes(told, 1)
    value = {"parameters/float32": PARAMETERS // 2, "optimizer/float32": optimizer}
    told.see("stored", value, step=1)
    found = first_mismatch("sharding.loaded", told)
    assert (found and found.cause) is expected
    assert found is None or "together after the load, sharding needs" in found.sentence


@pytest.mark.parametrize(
    ("model", "optimizer", "part"),
    [(1, 1, None), (2, 1, "parameters"), (1, 2, "optimizer"), (2, 2, "parameters")],
)
def test_a_sharded_state_that_holds_everything_is_none(
    model: int, optimizer: int, part: str | None
) -> None:
    """Of how many halves each rank's states have."""
    told = Story(case=Case.of("literal", "checkpoint", kind="sharded"), capabilities=CLAIMS)
    told.phase("save")
    sizes(told, 1)
    half = torch.zeros(2 * LARGER, 3)
    told.see("model_state_pieces", {f"body@{4 * n},0": half for n in range(model)})
    told.see("optim_state_pieces", {f"body/exp_avg@{4 * n},0": half for n in range(optimizer)})
    found = first_mismatch("sharding.saved", told)
    assert (found and found.cause) is (part and Cause.NOT_SHARDED)
    assert found is None or found.sentence.startswith(f"{part} (float32) take")
    assert found is None or "together in a sharded state, sharding needs" in found.sentence


def test_less_than_the_model_has_is_not_believed() -> None:
    found = first_mismatch("sharding.bytes", stored(PARAMETERS // 4, OPTIMIZER // 2))
    assert found is not None
    assert found.cause is Cause.UNEXPLAINED


def test_what_is_not_claimed_is_not_judged_and_said_so() -> None:
    told = stored(PARAMETERS, OPTIMIZER // 2)
    told.capabilities = frozenset({"shard.optimizer"})
    judge, ledger = CHECKS["sharding.bytes"].judge, Ledger()
    assert judge is not None
    judge(told.evidence(), ledger)
    assert ledger.first() is None
    assert ledger.notes == ["shard.parameters is not claimed"]


def test_with_one_replica_a_rank_nothing_can_be_told() -> None:
    told = stored(PARAMETERS, OPTIMIZER)
    told.replicas = 2
    judge, ledger = CHECKS["sharding.bytes"].judge, Ledger()
    assert judge is not None
    judge(told.evidence(), ledger)
    assert ledger.comparisons == 0
    assert ledger.notes == [f"{p}: too small to tell sharded from replicated" for p in PARTS]


@pytest.mark.parametrize(
    ("shape", "shards", "expected"),
    [
        ((8, 4), 2, 8 * 4 * 4 + 2 * 4),  # even rows: what a flat layout may add
        ((5, 16), 4, 4 * 2 * 16 * 4),  # 2 rows on each of 4 ranks
        ((1, 16), 4, 4 * 16 * 4),  # one row: no less than a row on every rank
        ((), 2, 2 * 16),  # a piece on each of 2 ranks, aligned
    ],
)
def test_what_sharding_needs(shape: tuple[int, ...], shards: int, expected: int) -> None:
    assert needed([shape], 4, shards) == expected


def test_rounding_up_is_to_four_elements_where_these_are_more_than_sixteen_bytes() -> None:
    assert needed([(2, 2)], 8, 2) == 2 * 32  # a row of 16 bytes on each of 2 ranks
    assert needed([(2, 2)], 4, 2) == needed([(2, 2)], 2, 2) == 2 * 16


def test_a_view_counts_with_the_storage_that_it_keeps_alive() -> None:
    whole = torch.zeros(64)
    assert stored_bytes([whole[:8], whole[8:16]]) == {"float32": 256}
    assert stored_bytes([whole[:8].clone(), torch.zeros(4).bfloat16()]) == {
        "float32": 32,
        "bfloat16": 8,
    }


BODY = (4 * LARGER, 3)
SHARE = needed([BODY, (3 * LARGER,), (2 * LARGER,), (2 * LARGER,)], 4, 2) // 2
RESIDENT = 2 * SHARE + needed([BODY], 4, 2) // 2


def live(places: dict[str, int] | None = None, growth: int = 0) -> Story:
    told = Story(case=Case.of("literal", "memory"), capabilities=CLAIMS)
    usual = {"forward": 900, "backward": RESIDENT, "step": RESIDENT - 8, "eval": RESIDENT - 8}
    for step in range(STEPS):
        told.phase(f"step {step}")
        for place, value in {**usual, **(places or {})}.items():
            told.see("live_bytes", value + step * growth, step=step, place=place)
    told.phase("end")
    sizes(told, STEPS - 1)
    return told


def test_shards_gradients_and_optimizer_state_may_be_alive() -> None:
    assert cause("memory.live_bytes", live()) is None
    assert cause("memory.growth", live()) is None


@pytest.mark.parametrize("place", ["backward", "step", "eval"])
def test_an_unsharded_copy_that_stays_is_not_freed(place: str) -> None:
    told = live({place: RESIDENT + PARAMETERS // 4})
    found = first_mismatch("memory.live_bytes", told)
    assert found is not None
    assert found.cause is Cause.NOT_FREED
    assert (found.where["step"], found.where["place"]) == (1, place)


def test_an_evaluation_leaves_no_more_than_it_found() -> None:
    told = live({"step": RESIDENT - PARAMETERS // 4, "eval": RESIDENT})
    found = first_mismatch("memory.live_bytes", told)
    assert found is not None
    assert found.where["place"] == "eval"


def test_one_byte_more_a_step_is_growth() -> None:
    found = first_mismatch("memory.growth", live(growth=1))
    assert found is not None
    assert found.cause is Cause.NOT_FREED
    assert (found.where["step"], found.where["place"]) == (3, "forward")


@pytest.mark.parametrize("step", [0, 1], ids=["optimizer state", "buckets laid out anew"])
def test_what_is_made_once_in_the_first_steps_is_no_growth(step: int) -> None:
    told = live()
    for earlier in range(step + 1):
        for place in ("forward", "backward"):
            told.instead("live_bytes", 100, step=earlier, place=place)
    assert cause("memory.growth", told) is None


def test_growth_in_the_last_step_alone_is_growth() -> None:
    told = live()
    told.instead("live_bytes", RESIDENT, step=STEPS - 1, place="eval")
    found = first_mismatch("memory.growth", told)
    assert found is not None
    assert found.where["step"] == STEPS - 1


def test_the_meter_counts_each_storage_once_and_forgets_it_when_it_is_freed() -> None:
    with metering(torch.device("cpu")) as meter:
        assert meter.read() == 0
        kept = torch.zeros(256)
        view = kept[3:7]
        assert meter.read() == 1024
        more = [torch.ones(16) for _ in range(2)]
        assert meter.read() == 1024 + 128
        del more, kept
        assert meter.read() == 1024, "the view keeps the whole storage alive"
        del view
        assert meter.read() == 0


def test_the_meter_counts_memory_once_that_several_storages_lie_in() -> None:
    whole = torch.zeros(256)
    parts = [torch.empty(0).set_(whole.untyped_storage()[at : at + 256]) for at in (256, 512)]
    with metering(torch.device("cpu")) as meter:
        for tensor in (*parts, whole):
            tensor.add_(1)
        assert meter.uncollected() == 1024


def test_the_meter_sees_a_storage_that_is_emptied_and_filled_again() -> None:
    with metering(torch.device("cpu")) as meter:
        buffer = torch.zeros(256)
        buffer.untyped_storage().resize_(0)
        assert meter.read() == 0
        buffer.untyped_storage().resize_(1024)
        assert meter.read() == 1024


def test_the_meter_sees_what_autograd_keeps_and_what_backward_makes() -> None:
    layer = nn.Linear(8, 8, bias=False)
    with metering(torch.device("cpu")) as meter:
        loss = layer(torch.ones(4, 8)).exp().sum()
        assert meter.read() >= 256 + 2 * 128, "weight, input and exp's result are alive"
        loss.backward()
        del loss
        assert meter.read() == 2 * 256, "weight and gradient are left"


def test_a_meter_waits_only_while_more_is_alive_than_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    freed: list[Tensor] = [torch.zeros(4)]
    with metering(torch.device("cpu")) as meter:
        freed.append(torch.zeros(256))

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            freed.clear()

        monkeypatch.setattr("conformance.scenarios.live_bytes.time.sleep", sleep)
        assert meter.read(usual=1024) == 1024
        assert slept == []
        assert meter.read(usual=0) == 0
        assert len(slept) == 1


def test_a_first_reading_takes_no_buffer_in_flight_for_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with metering(torch.device("cpu")) as meter:
        kept, held = torch.zeros(64), [torch.zeros(64)]
        monkeypatch.setattr(
            "conformance.scenarios.live_bytes.time.sleep", lambda seconds: held.clear()
        )
        assert meter.read() == kept.nbytes


def test_the_accelerator_s_meter_waits_until_a_watchdog_has_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_out = [100]
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: given_out[-1])
    monkeypatch.setattr("conformance.scenarios.live_bytes.time.monotonic", lambda: 0.0)
    meter = AcceleratorMeter(torch.device("cpu"))
    given_out += [164, 164 + 1024]

    def let_go(seconds: float) -> None:
        assert given_out.pop() > 164, "no more than usual is left: nothing to wait for"

    monkeypatch.setattr("conformance.scenarios.live_bytes.time.sleep", let_go)
    assert meter.read(usual=2048) == 64 + 1024
    assert meter.read(usual=64) == 64


class Clock:
    """Stands in for the module `time`: goes on while somebody sleeps, and rings."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alarms: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at, ring in self.alarms:
            if at <= self.now:
                ring()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("conformance.scenarios.live_bytes.time", made)
    return made


def test_what_another_thread_lets_go_late_is_waited_for_and_a_leak_only_once(clock: Clock) -> None:
    with metering(torch.device("cpu")) as meter:
        held, seconds = [torch.zeros(64)], [0.0]
        clock.alarms.append((SETTLE_SECONDS + 0.3, held.clear))
        assert meter.read(0) == 0
        kept = torch.zeros(64)
        for _ in range(2):
            began = clock.now
            assert meter.read(0) == kept.nbytes
            seconds.append(clock.now - began)
    assert seconds[1:] == pytest.approx([FIRST_SETTLE_SECONDS, SETTLE_SECONDS], abs=0.02)


@pytest.mark.parametrize("usual", [0, None])
def test_a_thread_that_got_no_processor_is_waited_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, usual: int | None
) -> None:
    resting = False
    monkeypatch.setattr("conformance.scenarios.live_bytes.others_rest", lambda: resting)
    with metering(torch.device("cpu")) as meter:
        held = [torch.zeros(64)]
        clock.alarms.append((FIRST_SETTLE_SECONDS + BUSY_SECONDS / 2, held.clear))
        assert meter.read(usual) == 0
        kept, began, resting = torch.zeros(64), clock.now, True
        assert meter.read(0) == kept.nbytes
        assert clock.now - began == pytest.approx(FIRST_SETTLE_SECONDS, abs=0.02)


def test_what_a_thread_let_go_just_before_it_rests_is_seen(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[torch.Tensor] = []

    def rests() -> bool:
        if clock.now >= FIRST_SETTLE_SECONDS:
            held.clear()
        return not held

    monkeypatch.setattr("conformance.scenarios.live_bytes.others_rest", rests)
    with metering(torch.device("cpu")) as meter:
        held.append(torch.zeros(64))
        assert meter.read(0) == 0


def test_a_thread_that_never_rests_is_waited_for_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.scenarios.live_bytes.others_rest", lambda: False)
    with metering(torch.device("cpu")) as meter:
        kept, seconds = torch.zeros(64), []
        for _ in range(2):
            began = clock.now
            assert meter.read(0) == kept.nbytes
            seconds.append(clock.now - began)
    wanted = [FIRST_SETTLE_SECONDS + BUSY_SECONDS, SETTLE_SECONDS]
    assert seconds == pytest.approx(wanted, abs=0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_rests_when_it_waits_and_not_when_it_works() -> None:
    over = Event()

    def work() -> None:
        while not over.is_set():
            pass

    until(others_rest)
    for target, rests in ((over.wait, True), (work, False)):
        thread = Thread(target=target)
        thread.start()
        until(lambda wanted=rests: others_rest() is wanted)
        over.set()
        thread.join()
        over.clear()
    until(others_rest)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)

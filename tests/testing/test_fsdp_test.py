"""`FSDPTest` under unittest: what passes, what skips, what a failure says."""

from __future__ import annotations

import unittest

import pytest
import torch
import torch.distributed as dist

from conformance import testing
from conformance.testing import FSDPTest, instantiate_parametrized_tests, parametrize
from tests.testing import samples
from tests.testing.running import run_one

NAMES = unittest.TestLoader().getTestCaseNames(samples.TestSamples)


@pytest.mark.parametrize("name", [n for n in NAMES if "fail" not in n and "skip" not in n])
def test_a_sample_passes(name: str) -> None:
    ran = run_one(samples.TestSamples, name)
    assert ran.verdict == "pass", ran.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_skips_on_all_ranks", "nowhere"),
        ("test_skips_on_the_cpu", "needs accelerators, and this test runs on the CPU"),
    ],
)
def test_a_sample_is_skipped(name: str, reason: str) -> None:
    ran = run_one(samples.TestSamples, name)
    assert (ran.verdict, ran.text) == ("skip", reason)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("test_fails", ("Tensor-likes are not close", "traceback of rank 0")),
        ("test_fails_across_ranks", ("all ranks: AssertionError: prepared: ranks 0 and 1",)),
        ("test_fails_because_ranks_are_equal", ("ranks 0 and 1 have the same value",)),
        (
            "test_fails_because_one_rank_raises_nothing",
            ("wanted ValueError with 'reason' on all ranks; rank 1: nothing was raised",),
        ),
        ("test_fails_in_a_subtest", ("in (number=2)", "assert number < 2")),
        ("test_fails_for_another_backend", ("wants backend 'mpi', the default group uses 'gloo'",)),
        ("test_fails_from_37_on", ("number=37", "traceback of rank 1")),
        ("test_fails_in_a_patch", ("all ranks: ValueError: inside",)),
        ("test_fails_an_expectation", ("ERROR: rank 0: AssertionError", "+ rank 0")),
    ],
)
def test_a_sample_fails_and_says_why(name: str, parts: tuple[str, ...]) -> None:
    ran = run_one(samples.TestSamples, name)
    assert ran.verdict in ("failure", "error")
    for part in parts:
        assert part in ran.text, ran.text


def test_parametrized_methods_have_readable_names() -> None:
    assert [name for name in NAMES if "grid" in name or "named" in name] == [
        "test_grid_number_1_flag_True_word_x",
        "test_grid_number_1_named",
        "test_grid_number_2_flag_True_word_x",
        "test_grid_number_2_named",
        "test_named_first",
        "test_named_none",
    ]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (True, "test_it_x_True"),
        (1.5, "test_it_x_1_5"),
        ("a b", "test_it_x_a_b"),
        (torch.bfloat16, "test_it_bfloat16"),
        (torch.device("cpu"), "test_it_cpu"),
        (None, "test_it_x0"),
        (len, "test_it_x0"),
    ],
)
def test_a_parametrized_method_is_named_as_in_pytorch(value: object, name: str) -> None:
    class Named:
        @parametrize("x", [value])
        def test_it(self, x: object) -> None:
            assert x is value

    assert [n for n in vars(instantiate_parametrized_tests(Named)) if "test" in n] == [name]


def test_output_of_ranks_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_one(samples.TestSamples, "test_output_reaches_the_controller").verdict == "pass"
    out = capsys.readouterr().out
    assert "[rank 0] written by rank 0\n" in out
    assert "[rank 1] written by rank 1\n" in out


def test_fresh_ranks_share_nothing() -> None:
    for name in ("test_first", "test_second", "test_first"):
        ran = run_one(samples.TestFreshSamples, name)
        assert ran.verdict == "pass", ran.text


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [(("cpu", 0), ("cpu", "gloo", 1)), (("meta", 4), ("meta", "fake", 4))],
    ids=["without accelerators", "with four"],
)
def test_constants_name_the_devices(
    monkeypatch: pytest.MonkeyPatch, machine: tuple[str, int], wanted: tuple[str, str, int]
) -> None:
    monkeypatch.setattr(testing, "accelerator", lambda: machine)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "meta", "fake")
    found = (testing.DEVICE_TYPE, testing.DISTRIBUTED_BACKEND, testing.DEVICE_COUNT)
    assert found == wanted
    with pytest.raises(AttributeError, match="has no attribute 'DEVICE_NAME'"):
        _ = testing.DEVICE_NAME


def test_a_large_world_runs_on_few_cores() -> None:
    ran = run_one(samples.TestManySamples, "test_every_rank_is_there")
    assert ran.verdict == "pass", ran.text


def test_a_class_that_ranks_cannot_import_is_refused() -> None:
    class TestInside(FSDPTest):
        world_size = 2
        device_type = "cpu"

        def test_it(self) -> None:
            raise AssertionError("ran")

    ran = run_one(TestInside, "test_it")
    assert ran.verdict == "error"
    assert "define test classes at the top of a module" in ran.text


def test_the_controller_has_no_rank() -> None:
    case = samples.TestSamples("test_fails")
    assert case.rank == -1
    with pytest.raises(RuntimeError, match="in the controlling process, where no rank exists"):
        _ = case.device


def test_fewer_accelerators_than_ranks_skip_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.testing.fsdp_test.accelerator", lambda: ("fake", 1))
    monkeypatch.setattr("conformance.testing.decorators.accelerator", lambda: ("fake", 1))
    monkeypatch.setattr(samples.TestSamples, "device_type", "auto")
    ran = run_one(samples.TestSamples, "test_fails")
    assert (ran.verdict, ran.text) == ("skip", "needs 2 devices of type fake, 1 present")

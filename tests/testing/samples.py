"""Test classes in the styles that users write; run by `test_fsdp_test` and by pytest itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from conformance.testing import (
    DummyProcessGroup,
    FSDPTest,
    _assert_module_states,
    _broadcast_state_dict,
    _zero_model,
    check_sharded_parity,
    get_full_params,
    instantiate_parametrized_tests,
    parametrize,
    patch_all_gather,
    patch_all_reduce,
    patch_reduce_scatter,
    patched,
    reduce_scatter_with_assert,
    skip_if_lt_x_gpu,
    subtest,
    subtest_name,
    with_comms,
)

# torch 2.13 has renamed them
NEW = hasattr(dist, "all_gather_single")
GATHER = "all_gather_single" if NEW else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if NEW else "reduce_scatter_tensor"
PHASES = (Phase.generate, Phase.shrink)


@instantiate_parametrized_tests
class TestSamples(FSDPTest):
    """Every test of it passes, except those that say otherwise by their name."""

    world_size = 2
    device_type = "cpu"
    prepared: torch.Tensor
    on_class: ClassVar[int] = 0

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.on_class += 1

    def setUp(self) -> None:
        super().setUp()
        self.prepared = torch.full((3,), float(self.rank + 1), device=self.device)

    def test_every_rank_has_its_place(self) -> None:
        assert (self.world_size, dist.get_world_size()) == (2, 2)
        assert self.rank == dist.get_rank() == self.process_group.rank()
        assert self.device == torch.device("cpu")
        dist.all_reduce(self.prepared)
        self.assertEqual(self.prepared, torch.full((3,), 3.0))

    def test_set_up_class_stays_in_the_controller(self) -> None:
        assert type(self).on_class == 0

    def test_output_reaches_the_controller(self) -> None:
        os.write(1, f"written by rank {self.rank}\n".encode())

    def test_skips_on_all_ranks(self) -> None:
        self.skipTest("nowhere")

    def test_fails(self) -> None:
        self.assertEqual(self.prepared, torch.zeros(3))

    def test_fails_across_ranks(self) -> None:
        self.assertEqualAcrossRanks(self.prepared, "prepared")

    def test_fails_because_ranks_are_equal(self) -> None:
        self.assertDifferentAcrossRanks(torch.ones(2))

    def test_fails_because_one_rank_raises_nothing(self) -> None:
        with self.assertRaisesOnAllRanks(ValueError, "reason"):
            if self.rank == 0:
                raise ValueError("a reason")

    def test_compares_across_ranks(self) -> None:
        self.assertEqualAcrossRanks({"a": torch.ones(2), "b": ["x", 1]})
        self.assertDifferentAcrossRanks(self.prepared)
        assert self.gatherAcrossRanks(self.rank) == [0, 1]
        with self.assertRaisesOnAllRanks(ValueError, "reason"):
            raise ValueError("a reason")

    def test_runs_subtests(self) -> None:
        seen: list[tuple[int, str, str]] = []

        def body(prefix: str, *, number: int, word: str) -> None:
            seen.append((number, word, prefix))

        self.run_subtests({"number": [1, 2], "word": ["x", "y"]}, body, "p")
        assert seen == [(1, "x", "p"), (1, "y", "p"), (2, "x", "p"), (2, "y", "p")]

    def test_fails_in_a_subtest(self) -> None:
        def body(number: int) -> None:
            assert number < 2

        self.run_subtests({"number": [1, 2, 3]}, body)

    @skip_if_lt_x_gpu(2)
    @with_comms
    def test_runs_on_the_cpu_without_accelerators(self) -> None:
        dist.barrier()

    @skip_if_lt_x_gpu(2, allow_cpu=False)
    def test_skips_on_the_cpu(self) -> None:
        raise AssertionError("ran")

    @with_comms(backend="mpi")
    def test_fails_for_another_backend(self) -> None:
        raise AssertionError("ran")

    @parametrize("number", [1, 2])
    @parametrize("flag,word", [(True, "x"), subtest((False, "y"), name="named")])
    def test_grid(self, number: int, flag: bool, word: str) -> None:  # noqa: FBT001
        assert (number in (1, 2), (flag, word) in ((True, "x"), (False, "y"))) == (True, True)

    @parametrize("mode", [None, "a"], name_fn=functools.partial(subtest_name, {"a": "first"}))
    def test_named(self, mode: str | None) -> None:
        assert mode in (None, "a")

    @parameterized.expand([("one", 1), ("two", 2)])
    def test_expanded(self, name: str, number: int) -> None:
        assert (name, number) in (("one", 1), ("two", 2))

    @settings(max_examples=10)
    @given(st.integers(0, 1000), st.lists(st.booleans()))
    def test_property(self, number: int, flags: list[bool]) -> None:
        self.assertEqualAcrossRanks([number, flags])

    @settings(max_examples=20, database=None, derandomize=True, phases=PHASES)
    @given(st.integers(0, 100))
    def test_fails_from_37_on(self, number: int) -> None:
        assert self.rank == 0 or number < 37

    def test_expectation(self) -> None:
        self.assertExpectedInline(f"rank {self.rank}", """rank 0""")

    def test_fails_an_expectation(self) -> None:
        self.assertExpectedInline(f"rank {self.rank}", """rank 1""")

    def test_helpers(self) -> None:
        torch.manual_seed(self.rank)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        with self.assertRaisesOnAllRanks(AssertionError):
            _assert_module_states(model, self.process_group, self.assertEqual)
        model.load_state_dict(_broadcast_state_dict(self.rank, model.state_dict()))
        _assert_module_states(model, self.process_group, self.assertEqual)
        wrapped = DistributedDataParallel(model)
        full = get_full_params(wrapped)
        self.assertEqual(full, list(model.parameters()))
        _zero_model(wrapped, zero_buffers=True)
        assert all(not value.any() for value in model.state_dict().values())
        assert full[0].any()

    def test_patches_see_collectives_and_are_removed(self) -> None:
        names = ("all_reduce", SCATTER, GATHER)
        originals = [getattr(dist, name) for name in names]
        seen: list[str] = []

        def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def new(*args: Any, **kwargs: Any) -> Any:
                seen.append(name)
                return original(*args, **kwargs)

            return new

        part, whole = torch.ones(2), torch.empty(4)
        with patch_all_reduce(noting("all_reduce", dist.all_reduce)) as original:
            dist.all_reduce(part)
            assert original is originals[0]
        with patch_all_gather(noting("all_gather", originals[2])):
            getattr(dist, GATHER)(whole, part)
            dist.all_gather_into_tensor(whole, part)
        check = functools.partial(
            reduce_scatter_with_assert, self, originals[1], lambda output: seen.append("output")
        )
        with patch_reduce_scatter(check):
            getattr(dist, SCATTER)(part, whole)
            getattr(dist, SCATTER)(output=part, input=whole)
        assert seen == ["all_reduce", "all_gather", "all_gather", "output", "output"]
        self.assertEqual(part, torch.full((2,), 4.0))
        assert originals == [getattr(dist, name) for name in names]

    def test_patched_methods_come_back(self) -> None:
        class Base:
            @staticmethod
            def unshard() -> str:
                return "base"

        class Group(Base):
            pass

        with patched(Group, "unshard", lambda: "patched") as original:
            assert (Group.unshard(), original(), Base.unshard()) == ("patched", "base", "base")
        assert "unshard" not in vars(Group)
        with patched(Base, "unshard", staticmethod(lambda: "patched")):
            assert Group().unshard() == "patched"
        assert Group().unshard() == "base"
        with self.assertRaises(AttributeError), patched(Group, "unsahrd", print):
            pass

    def test_fails_in_a_patch(self) -> None:
        with patch_all_reduce(print):
            raise ValueError("inside")

    def test_sharded_parity(self) -> None:
        whole = nn.Linear(4, 3)
        mesh = init_device_mesh("cpu", (2,))
        sharded = nn.Module()
        for name, parameter in whole.named_parameters():
            whole_grad = parameter.grad = torch.ones_like(parameter)
            part = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            part.grad = distribute_tensor(whole_grad, mesh, [Shard(0)])
            sharded.register_parameter(f"x_{name}", part)
        check_sharded_parity(self, whole, sharded, ("x_",))
        with self.assertRaises(AssertionError):
            check_sharded_parity(self, whole, sharded)
        sharded.x_bias.grad = None
        with self.assertRaisesRegex(AssertionError, "gradient of bias"):
            check_sharded_parity(self, whole, sharded, ("x_",))
        sharded.x_bias.grad = distribute_tensor(2 * torch.ones(3), mesh, [Shard(0)])
        with self.assertRaisesRegex(AssertionError, "gradient of bias"):
            check_sharded_parity(self, whole, sharded, ("x_",))
        with self.assertRaisesRegex(AssertionError, "wanted a DTensor"):
            check_sharded_parity(self, whole, whole)

    def test_dummy_group(self) -> None:
        group = DummyProcessGroup(self.rank, 2)
        assert (group.rank(), group.size()) == (self.rank, 2)
        assert group.allreduce(torch.ones(1)).get_future().done()


class TestFreshSamples(FSDPTest):
    """Fresh ranks: nothing of one test is left for the next."""

    world_size = 3
    device_type = "cpu"
    fresh = True
    seen: ClassVar[list[int]] = []

    def test_first(self) -> None:
        self.seen.append(1)
        assert len(self.seen) == 1

    def test_second(self) -> None:
        self.seen.append(1)
        assert (len(self.seen), self.world_size) == (1, dist.get_world_size())


class TestManySamples(FSDPTest):
    """A large world on few cores."""

    world_size = 16
    device_type = "cpu"

    def test_every_rank_is_there(self) -> None:
        values = torch.tensor([2.0**self.rank])
        dist.all_reduce(values)
        self.assertEqual(values.item(), 2.0**16 - 1)

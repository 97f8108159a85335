"""`compiled_fsdp_test`: the second run computes compiled on every rank, and says so if it fails."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import conformance.testing.compiled as compiled
from conformance.testing import FSDPTest, compiled_fsdp_test
from fsdp import fully_shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 2))


class TestCompiled(FSDPTest):
    world_size = 2
    device_type = "cpu"
    fresh = True

    @compiled_fsdp_test(Block, backend="aot_eager")
    def parity(self) -> None:
        alone, sharded = stack(), stack()
        for block in list(sharded)[:2]:
            fully_shard(block)
        fully_shard(sharded)
        # a root is no `Block`
        which = [m._compiled_call_impl is not None for m in (*sharded, sharded)]
        assert which in ([False] * 4, [True, True, False, False])
        self.runs = [*getattr(self, "runs", []), which[0]]
        x = torch.ones(3, 4)
        self.assertEqual(sharded(x), alone(x))

    def test_the_test_runs_eager_then_compiled(self) -> None:
        self.parity()
        assert self.runs == [False, True]
        assert fully_shard.__module__.startswith("fsdp"), "the name is what it was"

    def test_compiled_units_are_really_compiled(self) -> None:
        counter = CompileCounterWithBackend("eager")
        shard = compiled._compiling(fully_shard, Block, counter)
        model = stack()
        shard(model[0])
        fully_shard(model)(torch.ones(3, 4))
        self.assertEqual(counter.frame_count, 1)

    def test_an_error_of_the_second_run_says_so(self) -> None:
        seen: list[int] = []

        def body() -> None:
            seen.append(1)
            if len(seen) == 2:
                raise AssertionError("differs")

        with self.assertRaises(AssertionError) as caught:
            compiled_fsdp_test(backend="aot_eager")(body)()
        assert caught.exception.__notes__ == [
            "with computation compiled by 'aot_eager'; eager, it passed"
        ]


def test_a_file_without_the_function_is_refused_before_anything_runs() -> None:
    ran: list[int] = []
    with pytest.raises(NameError, match="without 'shard'; say with name="):
        compiled_fsdp_test(name="shard")(lambda: ran.append(1))()
    assert ran == []

"""A sharded model trains like the unsharded one."""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from wrapping import (
    DIM,
    WORLD,
    batch,
    full_parameters,
    here,
    loss_of,
    optimizer,
    shard,
    step_alone,
    step_sharded,
)

from conformance.models.fixtures import MLP, DoubleLinear
from conformance.testing import (
    FSDPTest,
    get_full_params,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    skip_if_lt_x_gpu,
)


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(MLP(DIM), MLP(DIM, bias=False), nn.Linear(DIM, DIM)).to(here())


class TestCore(FSDPTest):
    @property
    def world_size(self):
        return WORLD

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("optim", ["sgd", "adamw"])
    @parametrize("accumulation", [1, 2])
    @parametrize("reshard", [True, False])
    @parametrize("kind", ["wrapper", "composable"])
    def test_training(self, kind, reshard, accumulation, optim):
        alone = stack()
        sharded = shard(kind, copy.deepcopy(alone), MLP, reshard=reshard)
        optim_alone, optim_sharded = optimizer(optim, alone), optimizer(optim, sharded)
        for step in range(4):
            losses = step_alone(alone, optim_alone, step, accumulation)
            loss = step_sharded(sharded, optim_sharded, self.rank, step, accumulation)
            self.assertEqual(loss, losses[self.rank])
        self.assertEqual(full_parameters(sharded), dict(alone.named_parameters()))

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("kind", ["wrapper", "composable"])
    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_computes_low_and_keeps_high(self, kind, dtype):
        policies = {
            "wrapper": {"mixed_precision": MixedPrecision(param_dtype=dtype)},
            "composable": {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)},
        }
        sharded = shard(kind, stack(), MLP, **policies[kind])
        output = sharded(batch(self.rank, 0))
        self.assertEqual(output.dtype, dtype)
        output.float().square().mean().backward()
        for parameter in sharded.parameters():
            self.assertEqual(parameter.dtype, torch.float32)
            if parameter.grad is not None:
                self.assertEqual(parameter.grad.dtype, torch.float32)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("kind", ["wrapper", "composable"])
    @parametrize("max_norm", [0.05, 100.0])
    def test_clipping(self, kind, max_norm):
        alone = stack()
        sharded = shard(kind, copy.deepcopy(alone), MLP)
        sum(loss_of(alone, batch(rank, 0)) for rank in range(WORLD)).div(WORLD).backward()
        loss_of(sharded, batch(self.rank, 0)).backward()
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        if kind == "wrapper":
            got = sharded.clip_grad_norm_(max_norm)
        else:
            got = nn.utils.clip_grad_norm_(sharded.parameters(), max_norm).full_tensor()
        self.assertEqual(got, wanted)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("kind", ["wrapper", "composable"])
    @parametrize("both", [True, False])
    def test_an_unused_output_or_layer(self, kind, both):
        torch.manual_seed(0)
        alone = nn.Sequential(DoubleLinear(DIM, use_second_linear=both)).to(here())
        sharded = shard(kind, copy.deepcopy(alone), DoubleLinear)

        def run(model, rank):
            output = model(batch(rank, 0))
            return (output[0] if both else output).sum()

        sum(run(alone, rank) for rank in range(WORLD)).div(WORLD).backward()
        run(sharded, self.rank).backward()
        optimizer("sgd", alone).step()
        optimizer("sgd", sharded).step()
        first = "0.lin1.weight"
        self.assertEqual(full_parameters(sharded)[first], dict(alone.named_parameters())[first])

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("use_orig_params", [True, False])
    def test_full_parameters(self, use_orig_params):
        alone = stack()
        sharded = shard("wrapper", copy.deepcopy(alone), MLP, use_orig_params=use_orig_params)
        self.assertIsInstance(sharded, FSDP)
        full = get_full_params(sharded)
        self.assertEqual([p.detach() for p in full], [p.detach() for p in alone.parameters()])


instantiate_parametrized_tests(TestCore)

if __name__ == "__main__":
    run_tests()

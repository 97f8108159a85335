"""Optimizer states of sharded models say what the unsharded one's says, and can be loaded again."""

import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from wrapping import (
    DIM,
    WORLD,
    full_parameters,
    here,
    optimizer,
    shard,
    step_alone,
    step_sharded,
)

from conformance.models.fixtures import MLP
from conformance.testing import (
    FSDPTest,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    skip_if_lt_x_gpu,
)

FULL = (
    StateDictType.FULL_STATE_DICT,
    FullStateDictConfig(),
    FullOptimStateDictConfig(rank0_only=False),
)
SHARDED = (
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(),
    ShardedOptimStateDictConfig(),
)
STEPS = 2


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), MLP(DIM), MLP(DIM, bias=False)).to(here())


class TestOptimState(FSDPTest):
    @property
    def world_size(self):
        return WORLD

    def trained(self, kind, optim, **options):
        sharded = shard(kind, stack(), MLP, **options)
        stepping = optimizer(optim, sharded)
        for step in range(STEPS):
            step_sharded(sharded, stepping, self.rank, step)
        return sharded, stepping

    def state_alone(self, optim):
        """By name: what every tensor of the unsharded optimizer's state is."""
        alone = stack()
        stepping = optimizer(optim, alone)
        for step in range(STEPS):
            step_alone(alone, stepping, step)
        return {
            name: {k: v for k, v in stepping.state[p].items() if v.dim() > 0}
            for name, p in alone.named_parameters()
        }

    def compare(self, state, optim):
        wanted = self.state_alone(optim)
        self.assertEqual(sorted(state), sorted(wanted))
        for name, values in wanted.items():
            for key, value in values.items():
                self.assertEqual(state[name][key].to(here()), value)

    def go_on(self, sharded, stepping, wanted):
        """Two more steps lead where they led before."""
        for step in range(STEPS, 2 * STEPS):
            step_sharded(sharded, stepping, self.rank, step)
        self.assertEqual(full_parameters(sharded), wanted)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("optim", ["sgd", "adagrad"])
    @parametrize("use_orig_params", [True, False])
    @parametrize("reshard", [True, False])
    def test_full_of_the_wrapper(self, optim, use_orig_params, reshard):
        options = {"use_orig_params": use_orig_params, "reshard": reshard}
        sharded, stepping = self.trained("wrapper", optim, **options)
        with FSDP.state_dict_type(sharded, *FULL):
            state = FSDP.optim_state_dict(sharded, stepping)
        self.compare(state["state"], optim)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("optim", ["sgd", "adagrad"])
    @parametrize("use_orig_params", [True, False])
    @parametrize("kind", ["full", "sharded"])
    def test_a_wrapper_resumes(self, optim, use_orig_params, kind):
        sharded, stepping = self.trained("wrapper", optim, use_orig_params=use_orig_params)
        with FSDP.state_dict_type(sharded, *(FULL if kind == "full" else SHARDED)):
            model_state = copy.deepcopy(sharded.state_dict())
            optim_state = copy.deepcopy(FSDP.optim_state_dict(sharded, stepping))
            for step in range(STEPS, 2 * STEPS):
                step_sharded(sharded, stepping, self.rank, step)
            wanted = full_parameters(sharded)
            fresh = shard("wrapper", stack(), MLP, use_orig_params=use_orig_params)
            again = optimizer(optim, fresh)
            with FSDP.state_dict_type(fresh, *(FULL if kind == "full" else SHARDED)):
                fresh.load_state_dict(model_state)
                again.load_state_dict(FSDP.optim_state_dict_to_load(fresh, again, optim_state))
        self.go_on(fresh, again, wanted)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("optim", ["sgd", "adamw"])
    @parametrize("kind", ["wrapper", "composable"])
    def test_full_through_the_checkpoint_package(self, optim, kind):
        sharded, stepping = self.trained(kind, optim)
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(sharded, stepping, options=options)
        self.compare(state["state"], optim)

    @skip_if_lt_x_gpu(WORLD)
    @parametrize("optim", ["sgd", "adamw"])
    @parametrize("full", [True, False])
    def test_a_composable_resumes(self, optim, full):
        sharded, stepping = self.trained("composable", optim)
        options = StateDictOptions(full_state_dict=full)
        model_state = copy.deepcopy(sharded.state_dict())
        optim_state = copy.deepcopy(get_optimizer_state_dict(sharded, stepping, options=options))
        for step in range(STEPS, 2 * STEPS):
            step_sharded(sharded, stepping, self.rank, step)
        wanted = full_parameters(sharded)
        fresh = shard("composable", stack(), MLP)
        again = optimizer(optim, fresh)
        fresh.load_state_dict(model_state)
        set_optimizer_state_dict(fresh, again, optim_state, options=options)
        self.go_on(fresh, again, wanted)


instantiate_parametrized_tests(TestOptimState)

if __name__ == "__main__":
    run_tests()

"""FullyShardedDataParallel: loading optimizer state permutes that of parameters with other strides.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

WORLD = 2


class Transposed(nn.Module):
    """Its weight, shape (2, 3), lies in memory as (3, 2)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 2).t())

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def wrapped():
    module = FSDP(Transposed(), device_id=torch.device("cpu"))
    FSDP.set_state_dict_type(module, StateDictType.FULL_STATE_DICT)
    return module, torch.optim.AdamW(module.parameters())


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    module, optimizer = wrapped()
    torch.manual_seed(1)
    module(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    state = FSDP.optim_state_dict(module, optimizer)
    fresh, fresh_optimizer = wrapped()
    fresh_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(fresh, fresh_optimizer, state))
    (expected,) = (held["exp_avg"] for held in optimizer.state.values())
    (actual,) = (held["exp_avg"] for held in fresh_optimizer.state.values())
    print(f"rank {rank}, exp_avg of its shard: expected {expected.tolist()}")
    print(f"rank {rank}, exp_avg of its shard: actual   {actual.tolist()}")
    sys.exit(int(not torch.equal(actual, expected)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the loaded optimizer state is not the saved one")

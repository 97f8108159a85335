"""FullyShardedDataParallel with NO_SHARD: a full state dict ignores rank0_only.

Stand-alone: needs torch only. Prints expected and actual keys of the state on rank 1; exit status 1
if the deviation shows.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)

WORLD = 2


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        wrapped = FullyShardedDataParallel(
            nn.Linear(4, 4), sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        config = FullStateDictConfig(rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(
            wrapped, StateDictType.FULL_STATE_DICT, config
        ):
            found[strategy.name] = list(wrapped.state_dict())
        if rank == 1:
            print(
                f"{strategy.name}, rank 1: expected [], actual {found[strategy.name]}", flush=True
            )
    dist.destroy_process_group()
    sys.exit(int(rank == 1 and any(found.values())))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: a state that was asked for on rank 0 comes on every rank")

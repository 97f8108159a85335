"""FullyShardedDataParallel: a sharded state stays on the accelerator if its group serves the host.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Runs on two accelerators if there are as many, else on CPU over gloo, where it passes.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
)

WORLD = 2


def device_of(rank):
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= WORLD:
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")


def places(group, device):
    """Where the shards of an offloaded state are, and where their metadata places them."""
    torch.manual_seed(0)
    module = FullyShardedDataParallel(nn.Linear(4, 4), process_group=group, device_id=device)
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, config):
        state = module.state_dict()
    held = {shard.tensor.device.type for value in state.values() for shard in value.local_shards()}
    shards = [shard for value in state.values() for shard in value.metadata().shards_metadata]
    placed = {shard.placement.device().type for shard in shards}
    return sorted(held), sorted(placed)


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = device_of(rank)
    own = dist.get_default_backend_for_device(device)
    host = dist.get_default_backend_for_device("cpu")
    both = own if device.type == "cpu" else f"cpu:{host},{device.type}:{own}"
    dist.init_process_group(both, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    right = True
    for backend, group in ((own, dist.new_group(backend=own)), (both, dist.group.WORLD)):
        held, placed = places(group, device)
        right &= held == ["cpu"]
        print(
            f"torch {torch.__version__}, {backend}, rank {rank}: expected shards on ['cpu'],"
            f" actual on {held}, by their metadata on {placed}"
        )
    dist.destroy_process_group()
    sys.exit(int(not right))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: an offloaded state is where it was")

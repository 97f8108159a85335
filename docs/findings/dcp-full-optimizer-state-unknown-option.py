"""torch.distributed.checkpoint: a full optimizer state with an option that the optimizer lacks.

Stand-alone: needs torch only. Prints expected and actual options; exit status 1 if the deviation
shows.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2


def pair():
    torch.manual_seed(0)
    module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (WORLD,)))
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def first_rate(module, optimizer, options):
    """A scheduler's first rate after a load, or what the load raised."""
    state = get_optimizer_state_dict(module, optimizer, options=options)
    other, fresh = pair()
    try:
        set_optimizer_state_dict(other, fresh, state, options=options)
    except KeyError as error:
        return f"KeyError: {error}"
    return fresh.param_groups[0].get("initial_lr")


def main(rank, directory):
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    module, optimizer = pair()
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    wrong = False
    for name, given in {
        "sharded": {},
        "full": {"full_state_dict": True},
        "full, from rank 0": {
            "full_state_dict": True,
            "cpu_offload": True,
            "broadcast_from_rank0": True,
        },
    }.items():
        actual = first_rate(module, optimizer, StateDictOptions(**given))
        print(f"rank {rank}, {name}: initial_lr expected 0.1, actual {actual}", flush=True)
        wrong |= actual != 0.1
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(main, (folder,), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: an option of a full optimizer state is not loaded")

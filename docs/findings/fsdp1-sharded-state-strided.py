"""FullyShardedDataParallel: no sharded state of a parameter in channels_last format.

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


def trained():
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    module = FSDP(convolution, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(2, 3, 5, 5)).square().mean().backward()
    optimizer.step()
    return module, optimizer


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    wrong = False
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        for name in ("model", "optimizer"):
            module, optimizer = trained()  # a failed call leaves the module unusable
            FSDP.set_state_dict_type(module, kind)
            try:
                module.state_dict() if name == "model" else FSDP.optim_state_dict(module, optimizer)
                actual = "a state dict"
            except ValueError as error:
                actual, wrong = f"ValueError: {error}", True
            if rank == 0:
                print(f"{kind.name}, {name}: expected a state dict, actual {actual}", flush=True)
    dist.barrier()
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: a state cannot be saved")

"""FullyShardedDataParallel: a checkpoint directory is not loaded on a rank that owns only padding.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WORLD = 2


class Gain(nn.Module):
    """A unit of one element: rank 1 owns none of it."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.gain


def pair():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Gain())
    module = FSDP(model, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({Gain}))
    return module, torch.optim.AdamW(module.parameters())


def main(rank, directory):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    module, optimizer = pair()
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(module, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(content, checkpoint_id=f"{directory}/checkpoint")
    fresh, fresh_optimizer = pair()
    try:
        model_state, optimizer_state = get_state_dict(fresh, fresh_optimizer)
        groups = len(optimizer_state["param_groups"])
        print(f"rank {rank}: optimizer groups expected 1, actual {groups}", flush=True)
        content = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(content, checkpoint_id=f"{directory}/checkpoint")
        set_state_dict(
            fresh,
            fresh_optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
    except BaseException as error:  # CheckpointException is no Exception
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        print(f"rank {rank}: expected a loaded pair, actual {said}", flush=True)
        sys.exit(1)
    print(f"rank {rank}: loaded")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(main, (folder,), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: the directory is not loaded")

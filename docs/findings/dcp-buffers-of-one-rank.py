"""torch.distributed.checkpoint: buffers that differ between ranks come back as one rank's.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2


def model():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return fully_shard(module, mesh=init_device_mesh("cpu", (WORLD,)))


def main(rank, directory):
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    module = model()
    module[1].running_mean.fill_(float(rank + 1))
    dcp.save({"model": get_model_state_dict(module)}, checkpoint_id=f"{directory}/checkpoint")
    fresh = model()
    content = {"model": get_model_state_dict(fresh)}
    dcp.load(content, checkpoint_id=f"{directory}/checkpoint")
    set_model_state_dict(fresh, content["model"])
    expected, actual = module[1].running_mean.tolist(), fresh[1].running_mean.tolist()
    print(f"rank {rank}, running_mean: expected {expected}, actual {actual}")
    sys.exit(int(actual != expected))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(main, (folder,), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: a rank has another rank's buffer")

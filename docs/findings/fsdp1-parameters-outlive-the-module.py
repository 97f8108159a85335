"""FullyShardedDataParallel: flat parameters stay alive after the module and the optimizer.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Runs on two accelerators if there are as many, else on CPU over gloo.
"""

import gc
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WORLD = 2
DIM = 512
ROUNDS = 3


class Unit(nn.Linear):
    """One flat parameter: a mebibyte and 2 KiB, of which a rank holds half."""

    def __init__(self):
        super().__init__(DIM, DIM)


def device_of(rank):
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= WORLD:
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")


def alive():
    """Bytes of all tensors that Python's garbage collector knows, after a collection."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def round_of(device, *, original, stage):
    """Build, perhaps train or evaluate, and forget everything."""
    module = FullyShardedDataParallel(
        nn.Sequential(Unit(), Unit()),
        device_id=device,
        auto_wrap_policy=ModuleWrapPolicy({Unit}),
        use_orig_params=original,
    )
    optimizer = torch.optim.AdamW(module.parameters())
    batch = torch.ones(2, DIM, device=device)
    if stage == "one step":
        module(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    elif stage == "an evaluation":
        with torch.no_grad():
            module(batch)


def main(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = device_of(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    wrong = False
    for original in (False, True):
        for stage in ("nothing", "one step", "an evaluation"):
            before, left = alive(), []
            for _ in range(ROUNDS):
                round_of(device, original=original, stage=stage)
                left.append(alive() - before)
            wrong |= any(left)
            if rank == 0:
                print(
                    f"torch {torch.__version__}, {backend}, use_orig_params={original},"
                    f" dropped after {stage}: expected {[0] * ROUNDS} bytes alive after each"
                    f" round, actual {left}"
                )
    dist.destroy_process_group()
    sys.exit(int(wrong))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: what was dropped is still there")

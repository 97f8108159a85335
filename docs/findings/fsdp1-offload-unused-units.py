"""FullyShardedDataParallel(CPUOffload): a unit that takes no part is stepped by old gradients.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Needs an accelerator per rank; says so and passes without.
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WORLD = 2


class Model(nn.Module):
    """Two units, of which the second is left out if told so."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, *, both):
        x = self.always(x)
        return self.sometimes(x) if both else x


def gradients(device, *, original, offload):
    """Whether the second unit has gradients, after each of three steps; it takes part in one."""
    model = FullyShardedDataParallel(
        Model(),
        device_id=device,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=original,
        cpu_offload=CPUOffload(offload_params=offload),
    )
    found = []
    for both in (False, True, False):
        model(torch.ones(1, 4, device=device), both=both).sum().backward()
        grads = [p.grad for p in model.sometimes.parameters() if p.numel()]
        norms = [None if g is None else g.abs().sum().item() for g in grads]
        found.append(
            "none" if all(n is None for n in norms) else "not zero" if any(norms) else "zero"
        )
        model.zero_grad()
    return found


def main(rank, store):
    warnings.simplefilter("ignore")
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < WORLD:
        print(f"rank {rank}: fewer than {WORLD} accelerators: there is nothing to offload from")
        return
    torch.accelerator.set_device_index(rank)
    device = torch.device(torch.accelerator.current_accelerator().type, rank)
    backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    wrong = 0
    expected = ["none", "not zero", "none"]
    for original, offload in ((False, False), (False, True), (True, False), (True, True)):
        found = gradients(device, original=original, offload=offload)
        wrong += found != expected
        print(
            f"torch {torch.__version__}, rank {rank}, use_orig_params={original},"
            f" offload_params={offload}: expected {expected}, actual {found}",
            flush=True,
        )
    dist.destroy_process_group()
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: a unit has gradients of a step in which it took part")

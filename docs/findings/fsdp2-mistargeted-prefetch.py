"""fully_shard: an all-gather that nobody needed overwrites the parameters of the next forward.

Stand-alone: needs torch only. Prints expected and actual values; exit status 1 if the deviation
shows. Needs two accelerators; on CPU there are no streams and nothing to see.
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2
MICRO_BATCHES = 100
LATE = 0.02  # seconds


class Finetuned(nn.Module):
    """A frozen encoder and a frozen layer, then what is trained: an adapter and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(8, 32).requires_grad_(False)
        self.layer = nn.Linear(32, 64).requires_grad_(False)
        self.adapter = nn.Linear(32, 64)
        self.head = nn.Linear(64, 1)
        self.late = 0.0

    def forward(self, x):
        x = torch.tanh(self.encoder(x))
        x = torch.tanh(self.layer(x) + self.adapter(x))
        if self.late:
            # between the all-gather of the adapter and that of the layer, which backward prefetches
            # although nothing of the layer is needed
            x.register_hook(lambda _: time.sleep(self.late))
        return self.head(x)


def losses(device, x, *, late, reduce=False, synchronise=False):
    """Losses of micro-batches that are all the same and never stepped."""
    module, mesh = Finetuned().to(device), init_device_mesh(device.type, (WORLD,))
    for unit in (module.encoder, module.layer, module.adapter, module):
        fully_shard(unit, mesh=mesh)
    module.late = late
    module.set_requires_gradient_sync(reduce)
    found = []
    for _ in range(MICRO_BATCHES):
        loss = module(x).square().mean()
        loss.backward()
        found.append(loss.detach())
        if synchronise:
            torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    dist.barrier()
    return torch.stack(found)


def awaited(device, stream):
    """Whether `stream`, the current one, waits for an event of another one of the same device."""
    handle = torch.get_device_module(device)
    value, other = torch.zeros(1, device=device), handle.Stream()
    torch.accelerator.synchronize()
    with handle.stream(other):
        handle._sleep(500_000_000)  # cycles
        value.add_(1)
        event = other.record_event()
    stream.wait_event(event)
    seen = value.clone()
    torch.accelerator.synchronize()
    return seen.item() == 1


def main(rank, store):
    torch.set_num_threads(1)
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < WORLD:
        print(f"rank {rank}: needs {WORLD} accelerators, nothing done")
        return
    torch.accelerator.set_device_index(rank)
    device = torch.device(torch.accelerator.current_accelerator().type, rank)
    handle = torch.get_device_module(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        device_id=device,
    )
    for name, stream in (
        (f"torch.{device.type}.current_stream()", handle.current_stream()),
        ("torch.accelerator.current_stream()", torch.accelerator.current_stream()),
    ):
        if rank == 0:
            print(f"torch {torch.__version__}: {name}, a {type(stream)},")
            print(f"  waits for an event of another stream: {awaited(device, stream)}")
    torch.manual_seed(rank)
    x = torch.randn(4, 8, device=device)
    expected = Finetuned().to(device)(x).square().mean().detach()
    late = LATE if rank == 0 else 0.0

    def report(what, found):
        bad = found[~torch.isclose(found, expected, rtol=1e-4)]
        value = f", the first is {bad[0].item():.6f}" if len(bad) else ""
        print(
            f"rank {rank}, {what}: expected loss {expected.item():.6f} {MICRO_BATCHES} times,"
            f" actual {len(bad)} others{value}"
        )
        return len(bad)

    wrong = report("as it comes", losses(device, x, late=0.0))
    wrong += report("rank 0 late", losses(device, x, late=late))
    wrong += report("rank 0 late, reducing", losses(device, x, late=late, reduce=True))
    report("rank 0 late, synchronised", losses(device, x, late=late, synchronise=True))
    torch.accelerator.current_stream = handle.current_stream
    report("rank 0 late, the wait repaired", losses(device, x, late=late))
    dist.destroy_process_group()
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(main, (f"{directory}/store",), nprocs=WORLD, start_method="fork")
        except mp.ProcessExitedException:
            sys.exit("deviation: a forward computed with wrong parameters")

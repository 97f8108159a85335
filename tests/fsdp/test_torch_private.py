"""The private names of torch that the engine uses exist, and do what it needs."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp.engine import torch_private

SOURCE = Path(torch_private.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (dist.ProcessGroup, "_allgather_base"),
        (dist.ProcessGroup, "_reduce_scatter_base"),
        (dist, "_make_nccl_premul_sum"),
        (torch, "_chunk_cat"),
        (DeviceMesh, "_concatenate"),
        (DeviceMesh, "_flatten"),
        (torch._C, "_current_graph_task_id"),
        (torch.autograd.Variable._execution_engine, "queue_callback"),
        (torch_private.ShardedTensor, "_init_from_local_shards_and_global_metadata"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_private_name_exists(owner: object, name: str) -> None:
    assert hasattr(owner, name)


def test_a_dtensor_has_a_local_tensor_and_a_spec() -> None:
    assert {"_local_tensor", "_spec"} <= set(DTensor.__slots__)


def test_post_accumulate_hooks_are_found() -> None:
    param = nn.Parameter(torch.ones(1))
    assert torch_private.post_accumulate_hooks(param) == []
    calls = []
    param.register_post_accumulate_grad_hook(calls.append)
    (hook,) = torch_private.post_accumulate_hooks(param)
    hook(param)
    assert calls == [param]


def test_chunk_cat_pads_and_casts() -> None:
    out = torch.full((2, 5), 9.0)
    rows = [torch.arange(3, dtype=torch.float64).view(3, 1), torch.ones(2, 3, dtype=torch.float64)]
    torch_private.chunk_cat(rows, 2, out)
    assert out.tolist() == [[0, 1, 1, 1, 1], [2, 0, 1, 1, 1]]


def test_every_public_name_is_listed_and_every_function_says_why() -> None:
    functions = [
        node
        for node in ast.parse(SOURCE).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert {node.name for node in functions} <= set(torch_private.__all__)
    assert all(ast.get_docstring(node) for node in functions)


def test_nothing_replicated_is_told_from_replicated() -> None:
    assert torch_private.has_replicate(nn.Linear(1, 1)) is False


class _Backend:
    """A backend that allocates, or does not."""

    def __init__(self, *, allocates: bool) -> None:
        self.allocates = allocates
        self.asked: list[tuple[int, torch.dtype]] = []

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self.allocates

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.asked.append((numel, dtype))
        return torch.zeros(numel, dtype=dtype, device=device)


@pytest.mark.parametrize("allocates", [False, True])
def test_the_backend_is_asked_for_memory_if_it_has_any(*, allocates: bool) -> None:
    backend = _Backend(allocates=allocates)
    group = SimpleNamespace(_get_backend=lambda device: backend)
    got = torch_private.group_allocate(group, 3, torch.bfloat16, torch.device("cpu"))
    assert (got.shape, got.dtype) == ((3,), torch.bfloat16)
    assert backend.asked == ([(3, torch.bfloat16)] if allocates else [])

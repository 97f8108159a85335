"""The private names of torch that the engine uses exist, and do what it needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp as our_fsdp
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
        (torch._C, "_accelerator_getStream"),
        (torch._C, "_current_graph_task_id"),
        (torch._C, "_set_grad_enabled"),
        (torch._C._dynamo.eval_frame, "_FrameAction"),
        (torch._C._dynamo.eval_frame, "_FrameExecStrategy"),
        (torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
        (torch._dynamo.compiled_autograd, "in_compiled_autograd_region"),
        (torch.Tensor, "_backward_hooks"),
        (torch.ones(1, requires_grad=True).sum().grad_fn, "_register_hook_dict"),
        (torch.autograd.Variable._execution_engine, "queue_callback"),
        (torch_private.ShardedTensor, "_init_from_local_shards_and_global_metadata"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_private_name_exists(owner: object, name: str) -> None:
    assert hasattr(owner, name)


# Private names outside that module: where torch has them, and why they stand where they do.
ELSEWHERE: dict[str, tuple[object, str]] = {
    "_BatchNorm": (nn.modules.batchnorm, "the default of a public option"),
    "_C": (torch, "on the way to a function below"),
    "_buffers": (nn.Module(), "as good as public: modules are made of them"),
    "_disabled_torch_function_impl": (torch._C, "for the subclass of tensors in that module"),
    "_flatten": (DeviceMesh, "meshes alone"),
    "_foreach_add_": (torch, "operators like any other, with an underscore"),
    "_foreach_copy_": (torch, "operators like any other, with an underscore"),
    "_foreach_mul_": (torch, "operators like any other, with an underscore"),
    "_is_profiler_enabled": (torch.autograd.profiler, "a plain flag"),
    "_local_tensor": (DTensor, "read of each parameter for each gather: a call would double it"),
    "_is_view": (torch.Tensor, "a plain question"),
    "_make_subclass": (torch.Tensor, "for the subclass of tensors in that module"),
    "_parameters": (nn.Module(), "as good as public: modules are made of them"),
    "_post_accumulate_grad_hooks": (torch.ones(1), "put where autograd looks for them"),
    "_python_dispatch": (torch.utils, "a module with public functions"),
    "_pytree": (torch.utils, "a module with public functions"),
}
# No names of torch: marks that this package sets on objects of others, and one of named tuples.
MARKS = {
    *("_fsdp_uid", "_fsdp_use_orig_params", "_is_flat_param", "_is_fsdp_managed_module"),
    "_replace",
}


def _own_names(trees: list[ast.Module]) -> Iterator[str]:
    """Names that the package itself defines somewhere."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _used_names(trees: list[ast.Module]) -> Iterator[str]:
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from [*(node.module or "").split("."), *(each.name for each in node.names)]


def test_no_private_name_stands_elsewhere_but_for_those_that_are_listed() -> None:
    package = Path(our_fsdp.__file__).parent
    files = [file for file in package.rglob("*.py") if file.name != "torch_private.py"]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    private = {n for n in _used_names(trees) if n.startswith("_") and not n.startswith("__")}
    assert private - set(_own_names(trees)) == ELSEWHERE.keys() | MARKS


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_private_name_elsewhere_exists(name: str) -> None:
    assert hasattr(ELSEWHERE[name][0], name)


def test_what_stands_around_states_is_seen() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert [torch_private.is_persistent(module, n) for n in ("scratch", "running_mean")] == [
        False,
        True,
    ]
    assert torch_private.save_hooks(module) == torch_private.load_hooks(module) == []
    hooks = [lambda *_: None for _ in range(3)]
    module.register_state_dict_post_hook(hooks[0])
    module.register_state_dict_pre_hook(hooks[1])
    module.register_load_state_dict_pre_hook(hooks[2])
    assert torch_private.save_hooks(module) == hooks[:2]
    assert torch_private.load_hooks(module) == hooks[2:]


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


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_hook_without_a_handle_stands_among_those_of_users(*, ours_first: bool) -> None:
    ran: list[str] = []
    hooks = {"ours": 2.0, "theirs": 3.0}

    def hooked(name: str, gradient: torch.Tensor) -> torch.Tensor:
        ran.append(name)
        return gradient * hooks[name]

    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 5
    order = ["ours", "theirs"] if ours_first else ["theirs", "ours"]
    for name in order:
        register = torch_private.hook_gradient if name == "ours" else torch.Tensor.register_hook
        register(result, partial(hooked, name))
    result.register_hook(partial(hooked, "gone")).remove()
    result.sum().backward()
    assert ran == order
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [30.0, 30.0]


def test_a_leaf_can_have_a_hook_without_a_handle() -> None:
    leaf = torch.ones(2, requires_grad=True)
    torch_private.hook_gradient(leaf, lambda gradient: gradient * 7)
    leaf.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [7.0, 7.0]


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

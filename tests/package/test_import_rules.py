"""What may import what, read from the syntax tree of every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Set
from functools import cache
from typing import NamedTuple

import pytest

from tests.package.tree import PACKAGES, module_name, python_files

FACES = {
    "wrapper": (
        "fsdp.wrapper",
        "fsdp.wrapper_checks",
        "fsdp.wrapper_environment",
        "fsdp.wrapper_gradients",
        "fsdp.wrapper_making",
        "fsdp.wrapper_mesh",
        "fsdp.wrapper_options",
        "fsdp.wrapper_order",
        "fsdp.wrapper_owned",
        "fsdp.wrapper_params",
        "fsdp.wrapper_setup",
        "fsdp.wrapper_start",
        "fsdp.wrapper_unit",
        "fsdp.state_dict",
        "fsdp.wrap",
        "fsdp.optim_state",
        "fsdp.clip",
        "fsdp.comm_hooks",
        "fsdp.flat_exposure",
        "fsdp.flat_handle",
        "fsdp.flat_parameter",
        "fsdp.full_gradients",
        "fsdp.full_params",
        "fsdp.original_exposure",
    ),
    "composable": (
        "fsdp.composable",
        "fsdp.composable_checks",
        "fsdp.module",
        "fsdp.pass_settings",
        "fsdp.comm_settings",
        "fsdp.dtensor",
        "fsdp.dtensor_optimizers",
        "fsdp.placement",
    ),
}
TORCH_FSDP = "torch.distributed.fsdp"

# (module, name it uses) to the reason. A line that no module needs any more fails.
ALLOWED: dict[tuple[str, str], str] = {}


class Module(NamedTuple):
    """One module, by its import name, and its source."""

    name: str
    is_package: bool
    source: str


@cache
def imports(module: Module) -> Set[str]:
    """Every dotted name that the module imports anywhere, relative imports resolved.

    `from a import b` gives `a.b`: `b` may be a module, and `a` is imported with it in any case.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            found |= {base if alias.name == "*" else f"{base}.{alias.name}" for alias in node.names}
    return found


@cache
def dotted_names(module: Module) -> Set[str]:
    """The dotted names that the module spells out as an expression, or as a whole string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^\w+(?:\.\w+)+(?::\w+)?$", node.value.strip()))
    return found


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    keep = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def below(name: str, *tops: str) -> bool:
    return any(re.match(rf"{re.escape(top)}(?:[.:]|$)", name) for top in tops)


def in_engine(name: str) -> bool:
    return below(name, "fsdp.engine")


def engine_may_use(name: str) -> bool:
    # Policies and configs are values below both faces; a strategy's name is not for the engine.
    values = below(name, "fsdp.api") and not below(name, "fsdp.api.ShardingStrategy")
    return in_engine(name) or values


def in_models(name: str) -> bool:
    return below(name, "conformance.models")


def in_oracle(name: str) -> bool:
    return bool(re.match(r"conformance\.oracle(?:_\w+)?(?:\.|$)", name))


def may_name_torch_fsdp(name: str) -> bool:
    return bool(re.match(r"conformance\.adapters\.torch_\w+$", name)) or below(
        name, "tests.interop"
    )


def faults(module: Module) -> Iterator[tuple[str, str]]:
    """(name used, rule broken) for every import rule that the module breaks by itself."""
    for rule, applies, forbidden in RULES:
        if applies(module.name):
            yield from ((name, rule) for name in sorted(imports(module)) if forbidden(name))
    if below(module.name, *PACKAGES.values()) and not may_name_torch_fsdp(module.name):
        for name in sorted(dotted_names(module)):
            if below(name, TORCH_FSDP):
                yield name, "only the torch adapters name torch.distributed.fsdp, in any form"
    for face, own in FACES.items():
        if below(module.name, *own):
            others = [name for other, names in FACES.items() if other != face for name in names]
            for name in sorted(imports(module)):
                if below(name, *others):
                    yield name, "the two faces do not import each other"


RULES: tuple[tuple[str, Callable[[str], bool], Callable[[str], bool]], ...] = (
    (
        "fsdp.engine names no face: of fsdp, only itself and the policies of fsdp.api",
        in_engine,
        lambda name: below(name, "fsdp") and not engine_may_use(name),
    ),
    (
        "fsdp imports nothing of conformance",
        lambda name: below(name, "fsdp"),
        lambda name: below(name, "conformance"),
    ),
    (
        "models import neither fsdp nor conformance",
        in_models,
        lambda name: below(name, "fsdp", "conformance") and not in_models(name),
    ),
    (
        "only the torch adapters and the interop tests import torch.distributed.fsdp",
        lambda name: not may_name_torch_fsdp(name),
        lambda name: below(name, TORCH_FSDP),
    ),
)


def project_modules() -> list[Module]:
    return [
        Module(module_name(path), path.name == "__init__.py", path.read_text(encoding="utf-8"))
        for path in python_files(*PACKAGES, "tests")
    ]


MODULES = project_modules()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_module_keeps_the_import_rules(module: Module) -> None:
    broken = [
        f"{module.name} names {name}: {rule}"
        for name, rule in faults(module)
        if (module.name, name) not in ALLOWED
    ]
    assert not broken


def test_the_oracle_reaches_no_fsdp() -> None:
    graph = {module.name: imports(module) for module in MODULES}
    reached = [name for name in graph if in_oracle(name)]
    assert reached, "no module of the oracle was found; the rule would hold of nothing"
    for name in reached:
        for used in graph[name]:
            assert not below(used, "fsdp"), f"{name} imports {used}; the oracle reaches it"
            target = used if used in graph else used.rpartition(".")[0]
            if target in graph and target not in reached:
                reached.append(target)


def test_no_allowed_import_is_stale() -> None:
    needed = {(module.name, name) for module in MODULES for name, _ in faults(module)}
    assert not ALLOWED.keys() - needed
    assert all(reason.strip() for reason in ALLOWED.values())


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("fsdp.engine.layout", "from fsdp import wrapper", "fsdp.wrapper"),
        ("fsdp.engine.layout", "from .. import composable", "fsdp.composable"),
        ("fsdp.engine.layout", "def f():\n    import fsdp.wrap", "fsdp.wrap"),
        ("fsdp.engine.mesh", "from fsdp.api import ShardingStrategy", "fsdp.api.ShardingStrategy"),
        ("fsdp.wrapper", "from .composable import fully_shard", "fsdp.composable.fully_shard"),
        ("fsdp.dtensor", "import fsdp.flat_parameter", "fsdp.flat_parameter"),
        ("fsdp.clip", "from conformance.models import mlp", "conformance.models.mlp"),
        ("conformance.models.mlp", "import fsdp", "fsdp"),
        ("conformance.models.mlp", "from .. import verdicts", "conformance.verdicts"),
        ("conformance.run", "import torch.distributed.fsdp", TORCH_FSDP),
        ("conformance.run", "torch.distributed.fsdp.fully_shard(m)", f"{TORCH_FSDP}.fully_shard"),
        ("conformance.run", "load('torch.distributed.fsdp')", TORCH_FSDP),
        ("conformance.mutants.a", "from torch.distributed import fsdp", TORCH_FSDP),
        ("conformance.adapters.lightning", "from torch.distributed import fsdp", TORCH_FSDP),
        ("tests.ranks.test_a", "from torch.distributed import fsdp", TORCH_FSDP),
    ],
)
def test_a_planted_violation_is_found(name: str, source: str, found: str) -> None:
    module = Module(name, is_package=False, source=source)
    assert found in {used for used, _ in faults(module)}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fsdp.engine.layout", "from .mesh import Mesh\nfrom fsdp.engine import errors"),
        ("fsdp.engine.mesh", "from fsdp.api import MixedPrecisionPolicy\nimport fsdp.api"),
        ("fsdp.wrapper", "from fsdp.engine import layout\nfrom .flat_parameter import Flat"),
        ("conformance.models.mlp", "from .case import Case\nimport conformance.models.case"),
        ("conformance.adapters.torch_fsdp", "from torch.distributed import fsdp"),
        ("conformance.run", "'''Beside torch.distributed.fsdp.'''\nimport fsdp"),
        ("tests.interop.test_a", "from torch.distributed.fsdp import fully_shard"),
        ("fsdp.engine.mesh", "DIM = 'fsdp'\nfsdp = mesh['fsdp']\nfsdp.size()"),
        ("tests.ranks.test_a", "NAME = 'torch.distributed.fsdp'"),
    ],
)
def test_a_legal_import_is_not_reported(name: str, source: str) -> None:
    assert not list(faults(Module(name, is_package=False, source=source)))


def test_a_package_resolves_relative_imports_from_itself() -> None:
    module = Module("fsdp.engine", is_package=True, source="from . import layout\nfrom .. import x")
    assert imports(module) == {"fsdp.engine.layout", "fsdp.x"}

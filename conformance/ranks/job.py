"""A job: code by name, so that a rank imports it for itself instead of unpickling a function.

Knows files, modules and names. Must not know processes or torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Job", "load_function"]

JobFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Code by name: what every rank imports and calls as `function(context, **kwargs)`.

    Attributes:
        file: path of the source file, for code that is not importable by its module name, and as a
            guard against another module of the same name; None imports `module`.
        module: module name.
        qualname: attribute path inside the module.
        sys_path: entries put in front of the rank's own `sys.path`.
        cwd: working directory of the rank, None for a scratch directory of the job.
        kwargs: plain picklable data, sent from the controller to every rank.
    """

    file: str | None = None
    module: str
    qualname: str
    sys_path: tuple[str, ...] = ()
    cwd: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: JobFunction, /, **kwargs: Any) -> Job:
        """The job that calls a module-level function or a static method of a module-level class.

        Works for functions of test files and of `__main__`.

        Args:
            function: called on every rank with a `RankContext` and `kwargs`.
            **kwargs: plain picklable data.

        Raises:
            ValueError: ranks cannot find the function by name (a lambda, a closure, a method).
        """
        module, qualname = _names_of(function)
        file = _source_file(function)
        if module == "__main__":
            module, file = _main_module(file)
        path = tuple(entry or os.getcwd() for entry in sys.path)
        return cls(
            file=file,
            module=module,
            qualname=qualname,
            sys_path=path,
            cwd=os.getcwd(),
            kwargs=kwargs,
        )


def load_function(job: Job) -> JobFunction:
    """Import a job's function in this process.

    Raises:
        ImportError: its module cannot be imported, or has no such attribute.
    """
    module = _load_module(job.module, job.file)
    target: Any = module
    for name in job.qualname.split("."):
        if not hasattr(target, name):
            raise ImportError(
                f"{job.module} ({getattr(module, '__file__', None)}) has no {job.qualname!r}"
            )
        target = getattr(target, name)
    if not callable(target):
        raise ImportError(f"{job.module}.{job.qualname} is {target!r}, which cannot be called")
    return target  # type: ignore[no-any-return]


def _names_of(function: JobFunction) -> tuple[str, str]:
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not module or not qualname:
        raise ValueError(f"{function!r} has no module and name; pass a module-level function")
    target: Any = sys.modules.get(module)
    for name in qualname.split("."):
        target = getattr(target, name, None)
    if target is not function:
        raise ValueError(
            f"{module}.{qualname} is not found by that name, so a rank cannot import it; "
            "pass a module-level function or a static method of a module-level class"
        )
    return module, qualname


def _source_file(function: JobFunction) -> str | None:
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    try:
        file = file or inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        file = None
    return str(Path(file).resolve()) if file and Path(file).is_file() else None


def _main_module(file: str | None) -> tuple[str, str | None]:
    """Name for `__main__` under which its guarded part does not run."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and not spec.name.endswith("__main__"):
        return spec.name, file
    if file is None:
        raise ValueError("the function lives in an interactive __main__, which ranks cannot import")
    return f"__ranks_main_{Path(file).stem}__", file


def _load_module(name: str, file: str | None) -> ModuleType:
    if file is None:
        return importlib.import_module(name)
    loaded = sys.modules.get(name)
    if loaded is not None and _is_from(loaded, file):
        return loaded
    if loaded is None:
        importlib.invalidate_caches()  # the file may be younger than the directory listing
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise  # the module was found; something that it imports was not
        else:
            if _is_from(module, file):
                return module
    return _load_file(name, file)


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {file} (module {name})")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_from(module: ModuleType, file: str) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and os.path.realpath(found) == os.path.realpath(file)

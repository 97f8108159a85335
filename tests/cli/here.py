"""The command inside this process: without an interpreter of its own, and on a forkserver that is
there already. `tests/cli/test_run.py` shows once that the command does the same as a process."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from conformance.cli import main


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a process would have left."""

    returncode: int
    stdout: str
    stderr: str


def command(folder: Path, *arguments: str) -> Done:
    """Run ``fsdp-conformance arguments`` in ``folder``."""
    out, err = io.StringIO(), io.StringIO()
    with (
        _modules_of(folder),
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["fsdp-conformance", *arguments]),
        mock.patch.object(sys, "path", [*sys.path]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main()
    assert isinstance(left.value.code, int)
    return Done(returncode=left.value.code, stdout=out.getvalue(), stderr=err.getvalue())


@contextlib.contextmanager
def _modules_of(folder: Path) -> Iterator[None]:
    """What is imported from the folder goes again: another folder may have a module of its name."""
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]

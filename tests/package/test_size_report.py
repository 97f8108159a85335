"""The size report finds what is large and orders it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.package.tree import ROOT


def report(*folders: Path) -> list[str]:
    script = [str(ROOT / ".ci" / "size-report"), *map(str, folders)]
    return subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()


def test_large_things_are_listed_longest_first(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    body = "\n".join(f"    x{i} = {i}" for i in range(60))
    (folder / "a.py").write_text(f"def long(self, a, b, c, d, e, f, g):\n{body}\n")
    (folder / "b.py").write_text(f"def longer(cls, a, b, *, c, d, e, f):\n{body}\n    y = 1\n")
    (folder / "c.py").write_text("\n" * 451)
    (folder / "d.py").write_text("\n" * 450)
    assert report(folder) == [
        "lines in a file over 450: 1",
        "    451  code/c.py",
        "lines in a function over 50: 2",
        "     62  code/b.py:1 longer",
        "     61  code/a.py:1 long",
        "parameters over 6: 1",
        "      7  code/a.py:1 long",
    ]


def test_the_project_is_reported_without_arguments() -> None:
    headings = [line for line in report() if not line.startswith(" ")]
    assert len(headings) == 3

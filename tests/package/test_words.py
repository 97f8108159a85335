"""No file of the project mentions a machine on which it was made, nor how it was made."""

from __future__ import annotations

import re

import pytest

from tests.package.tree import project_files, shown

# In pieces, so that this file does not hold what it looks for.
PARTS = (
    ("/wo", "rk/"),
    ("/tmp/", "venv"),
    ("/ro", "ot/"),
    ("/opt/", "pypi"),
    (r"\.lib", "rary"),
    ("sub", "agent"),
    ("farm-", "(?:bench|studio)"),
    (r"\bBRIEF", r"\.md\b"),
    (r"\biss", r"ue #?\d+\b"),
)
FORBIDDEN = re.compile("|".join("".join(part) for part in PARTS))


def test_no_file_mentions_a_machine() -> None:
    found = []
    for path in project_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if match := FORBIDDEN.search(line):
                found.append(f"{shown(path)}:{number}: {match[0]}")
    assert not found


@pytest.mark.parametrize("part", PARTS, ids=lambda part: "".join(part))
def test_every_pattern_finds_what_it_stands_for(part: tuple[str, str]) -> None:
    plain = "".join(part).replace(r"\b", "").replace("\\", "").replace("(?:bench|studio)", "bench")
    assert FORBIDDEN.search(plain.replace("#?d+", "12"))

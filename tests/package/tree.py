"""The repository's own files, as the tests of this folder read them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Where code of ours lies on disk, and the name under which it is imported.
PACKAGES = {"fsdp": "fsdp", "conformance": "conformance", "models": "conformance.models"}

_GENERATED = {"__pycache__", "build", "dist"}


def project_files() -> list[Path]:
    """Every file that git tracks or would track; without git, every file but generated ones."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        paths = [ROOT / name for name in sorted(set(listed)) if name]
    else:
        paths = [path for path in sorted(ROOT.rglob("*")) if not _is_generated(path)]
    return [path for path in paths if path.is_file()]


def python_files(*folders: str) -> list[Path]:
    """The Python files below the given folders of the repository, in order."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def shown(path: Path) -> str:
    """The path as it stands in messages and allow-lists: from the top of the repository."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """The name under which a file of the repository is imported."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [PACKAGES.get(folder, folder), *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_generated(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    hidden = any(part.startswith(".") and part not in {".ci", ".gitignore"} for part in parts)
    return hidden or any(part in _GENERATED or part.endswith(".egg-info") for part in parts)

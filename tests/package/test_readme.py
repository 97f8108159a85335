"""README.md's commands are those that .ci/run runs, and the links of all documents hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from conformance import verdicts
from conformance.report.lines import Role
from conformance.verdicts import Verdict
from tests.package.tree import ROOT, project_files, shown

DOCUMENTS = [path for path in project_files() if path.suffix == ".md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
LAST = {
    "run": "fsdp-conformance run torch.fully_shard --variant default"
    " --expect docs/findings/expected.txt",
    "tests": "pytest -n auto",
}


def command(name: str, *part: str) -> str:
    script = [str(ROOT / ".ci" / "readme-command"), name, *part]
    return subprocess.run(script, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(("name", "last"), LAST.items())
def test_a_command_sets_up_everything_from_a_bare_python(name: str, last: str) -> None:
    first, install, main = command(name).split(" &&\n")
    assert first == "python3 -m venv .venv"
    assert re.fullmatch(
        r"\.venv/bin/pip install -c constraints\.txt -e (\.|'\.\[\w+\]')", install
    ), "installs this checkout with the tested versions"
    assert main == f".venv/bin/{last}"


@pytest.mark.parametrize("name", LAST)
def test_the_parts_of_a_command_make_the_whole(name: str) -> None:
    assert command(name) == " &&\n".join((command(name, "setup"), command(name, "main")))


@pytest.mark.parametrize("name", LAST)
def test_a_command_is_sound_shell(name: str) -> None:
    subprocess.run(["bash", "-n", "-c", command(name)], check=True)


def test_the_continuous_check_runs_the_test_command_and_the_kill_diagonal() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^stage .* readme tests main$", script, re.M)
    assert re.search(r"^stage coverage .ci/coverage report .*$", script, re.M)
    assert re.search(r"^stage .*/fsdp-conformance\" selftest$", script, re.M)


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        command("nonsense")


README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_is_explained(verdict: Verdict) -> None:
    assert re.search(rf"^\| {verdict} \| \w.*\|$", README, re.M)


@pytest.mark.parametrize("name", [name for name in vars(verdicts) if name.startswith("EXIT_")])
def test_every_exit_status_is_explained(name: str) -> None:
    assert re.search(rf"^\| {getattr(verdicts, name)} \| \w.*\|$", README, re.M)


@pytest.mark.parametrize("role", [Role.CONTROL, Role.PROBE])
def test_what_is_judged_unasked_is_explained(role: Role) -> None:
    assert re.search(rf"^\| {role} \| .*\w.*\|$", README, re.M)


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_links_lead_to_files_of_the_project(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if ":" not in link]
    dead = [link for link in links if not (document.parent / link).exists()]
    assert not dead

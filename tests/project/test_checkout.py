"""What a stranger finds in a fresh checkout."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("not_measured")

PLACE_OF_A_MACHINE = re.compile(rb"(?<![\w.~-])/(?:work|root|farm|home/\w+|Users/\w+)/")
REGISTRY = re.compile(rb"index[-]url|registry[.]npmjs|pypi[.]org/simple|files[.]pythonhosted")


@pytest.fixture(scope="module")
def tracked(project):
    """Every file under version control."""
    if shutil.which("git") is None or not (project / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=project, capture_output=True, text=True, check=True
    )
    paths = [project / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize("forbidden", [PLACE_OF_A_MACHINE, REGISTRY], ids=["machine", "registry"])
def test_no_file_knows_where_it_was_written(tracked, forbidden):
    assert [path.name for path in tracked if forbidden.search(path.read_bytes())] == []


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_readme_tells_the_two_commands_and_they_exist(project, command):
    assert command in (project / "README.md").read_text(encoding="utf-8")
    planned = subprocess.run(
        [*command.split(), "--dry-run"], cwd=project, capture_output=True, text=True, check=False
    )
    assert planned.returncode == 0, planned.stderr


def test_the_demo_works(project):
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.demo"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr


def test_the_diagram_shows_the_table_of_states(project):
    picture = (project / "docs" / "assets" / "states.svg").read_text(encoding="utf-8")
    diagram = runpy.run_path(str(project / "scripts" / "diagram.py"))
    assert picture == diagram["diagram"](), "run `make diagram`"

"""What is shipped."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

NAME_AND_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+-]+")


@pytest.fixture(scope="module")
def shipped(project, tmp_path_factory):
    """Every file in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-qq", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-w", folder, project], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_file_of_the_package(project, shipped):
    sources = project / "src"
    package = {
        path.relative_to(sources).as_posix()
        for path in sources.rglob("*")
        if path.suffix in {".py", ".lua", ".sql"} or path.name == "py.typed"
    }
    assert "semel/py.typed" in package
    assert package - shipped == set()


def test_the_wheel_holds_the_licence(shipped):
    assert [name for name in shipped if name.endswith(".dist-info/licenses/LICENSE")]


def test_constraints_are_names_and_versions_only(project):
    lines = (project / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [
        line for line in lines if not line.startswith("#") and not NAME_AND_VERSION.fullmatch(line)
    ] == []


def test_every_requirement_is_pinned(project):
    settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [
        *settings["project"]["dependencies"],
        *(
            name
            for extra in settings["project"]["optional-dependencies"].values()
            for name in extra
        ),
        *(name for group in settings["dependency-groups"].values() for name in group),
    ]
    names = {_canonical(re.split(r"[\[<>=~! ;]", requirement)[0]) for requirement in wanted}
    lines = (project / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_canonical(line.partition("==")[0]) for line in lines}
    assert names - pinned == {"semel"}


def _canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

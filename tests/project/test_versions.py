"""The lowest versions that are promised are the lowest versions that are tested."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def pinned(path) -> dict[str, Version]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "==" in line]
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.fixture(scope="module")
def promised(project) -> dict[str, set[Version]]:
    """The lower bounds of everything that a user of semel installs."""
    about = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = list(about["dependencies"])
    for extra in about["optional-dependencies"].values():
        told += extra
    bounds: dict[str, set[Version]] = {}
    for requirement in map(Requirement, told):
        if requirement.name != "semel":
            [bound] = requirement.specifier
            assert bound.operator == ">=", f"{requirement}: newer versions are not shut out"
            bounds.setdefault(canonicalize_name(requirement.name), set()).add(
                Version(bound.version)
            )
    return bounds


def test_every_lower_bound_is_the_version_that_is_tested_and_has_one_value(project, promised):
    lowest = pinned(project / "constraints-lowest.txt")
    tested = {name: {lowest[name]} for name in promised if name in lowest}
    assert tested == promised


def test_the_lowest_versions_are_none_above_the_newest(project):
    lowest, newest = (
        pinned(project / name) for name in ("constraints-lowest.txt", "constraints.txt")
    )
    assert set(lowest) <= set(newest)
    assert [name for name in lowest if lowest[name] > newest[name]] == []


def test_the_page_of_versions_tells_the_lowest_and_the_newest(project):
    page = (project / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    lowest, newest = (
        pinned(project / name) for name in ("constraints-lowest.txt", "constraints.txt")
    )
    told = {canonicalize_name(name): (Version(low), Version(high)) for name, low, high in rows}
    assert told == {name: (lowest[name], newest[name]) for name in told}


def test_the_page_of_versions_names_every_package_of_an_extra(project, promised):
    page = (project / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    assert [name for name in promised if f"| `{name}` |" not in page.lower()] == []


def test_the_lowest_versions_have_a_target_of_their_own(project):
    planned = subprocess.run(
        ["make", "test-lowest", "--dry-run"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert planned.returncode == 0, planned.stderr
    assert "LOWEST=constraints-lowest.txt" in planned.stdout


def needed_by(names: list[str]) -> set[str]:
    """What pip installs for these, without their extras."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name not in found:
            found.add(name)
            told = map(Requirement, metadata.requires(name) or ())
            names += [one.name for one in told if one.marker is None or one.marker.evaluate()]
    return found


def test_celery_on_redis_imports_nothing_that_the_extras_do_not_install(project):
    about = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = about["optional-dependencies"]
    told = [Requirement(one).name for extra in ("celery", "redis") for one in extras[extra]]
    installed = needed_by(told)
    tree = ast.parse(Path(find_spec("kombu.transport.redis").origin).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level]
    packages = {node.module.split(".")[0] for node in imports} - sys.stdlib_module_names
    distributions = metadata.packages_distributions()
    for package in packages:
        assert {canonicalize_name(name) for name in distributions[package]} & installed, package

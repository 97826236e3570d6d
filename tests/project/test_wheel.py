"""What is shipped."""

from __future__ import annotations

import email
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import pytest

NAME_AND_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+-]+")


TARGET = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def targets(page):
    """Where the links and pictures of a page lead."""
    return [first or second for first, second in TARGET.findall(page)]


@pytest.fixture(scope="module")
def wheel(project, tmp_path_factory):
    """The wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-qq", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-w", folder, project], check=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def shipped(wheel):
    """Every file in the wheel."""
    return set(wheel.namelist())


@pytest.fixture(scope="module")
def metadata(wheel, shipped):
    """What a package index shows."""
    (name,) = [name for name in shipped if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_every_file_of_the_package(project, shipped):
    sources = project / "src"
    package = {
        path.relative_to(sources).as_posix()
        for path in sources.rglob("*")
        if path.suffix in {".py", ".lua", ".sql", ".yml", ".json"} or path.name == "py.typed"
    }
    assert package > {"semel/py.typed", "semel/observe/alerts.yml", "semel/observe/dashboard.json"}
    assert package - shipped == set()


def test_the_wheel_holds_the_license(shipped):
    assert [name for name in shipped if name.endswith(".dist-info/licenses/LICENSE")]


def test_the_source_distribution_holds_what_is_under_version_control(project, tmp_path):
    if shutil.which("git") is None or not (project / ".git").exists():
        pytest.skip("not a git checkout")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory"]
    subprocess.run([*build, tmp_path], cwd=project, check=True, capture_output=True)
    (path,) = tmp_path.iterdir()
    with tarfile.open(path) as archive:
        names = {str(PurePosixPath(*PurePosixPath(n).parts[1:])) for n in archive.getnames()}
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=project, capture_output=True, text=True, check=True).stdout
    known = {name for name in listed.split("\0") if name and (project / name).is_file()}
    assert names - known == {"PKG-INFO"}
    assert known - names == set()


# --- what a package index shows ------------------------------------------------------------------


def test_an_index_can_show_the_readme_the_license_and_who_may_use_it(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in metadata.get_all("Classifier")


URLS = {"Documentation": "https://d.example/", "Source": "https://s.example"}


@pytest.fixture(scope="module")
def hook(project):
    """What makes the README ready for an index."""
    return runpy.run_path(str(project / "scripts" / "package_readme.py"))


def test_the_package_names_no_invented_address(metadata, project):
    package = runpy.run_path(str(project / "scripts" / "package.py"))
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert set(package["missing"](urls)) <= {*package["NEEDED"]} - urls.keys()
    for url in urls.values():
        assert urlsplit(url).scheme == "https"
    assert urls.get("Documentation", "/").endswith("/")  # links are made by adding to it
    assert not urls.get("Source", "").endswith("/")


def test_no_link_or_picture_of_the_readme_is_broken_on_an_index(metadata):
    shown = metadata.get_payload()
    assert "semel" in shown
    for target in targets(shown):
        assert target.startswith(("https://", "#")), target


def test_with_addresses_every_link_and_picture_of_the_readme_works_on_an_index(hook, project):
    readme = (project / "README.md").read_text(encoding="utf-8")
    shown = hook["with_absolute_links"](readme, URLS, "1.2")
    assert len(targets(shown)) == len(targets(readme)) > 50
    for target in targets(shown):
        assert target.startswith(("https://", "#")), target
    assert "[Tutorial](https://d.example/start/tutorial/)" in shown
    assert "(https://d.example/concepts/keys/#one-request-many-operations)" in shown
    assert "[changelog](https://s.example/blob/v1.2/CHANGELOG.md)" in shown
    assert '<img src="https://s.example/raw/v1.2/docs/assets/crash-modes.svg"' in shown


def test_without_addresses_the_readme_keeps_its_text(hook, project):
    readme = (project / "README.md").read_text(encoding="utf-8")
    shown = hook["with_absolute_links"](readme, {}, "1.2")
    assert shown.startswith("<h1>semel</h1>\n")
    assert "<img" not in shown
    assert "<p" not in shown
    assert "| learn the basics | Tutorial, How semel works |" in shown
    assert HEADING.findall(shown) == HEADING.findall(readme)


def test_what_looks_like_a_link_in_code_stays_as_it_is(hook):
    page = """[a](docs/index.md) [b](docs/project/decisions/README.md#x) [c](LICENSE) [d](#e) [f](https://g)

```python
calls[0](docs)
```

![h](docs/picture.svg) <a href="docs/i.md#j">k</a> <a href="https://l">m</a>
"""
    assert (
        hook["with_absolute_links"](page, URLS, "1.2")
        == """\
[a](https://d.example/) [b](https://d.example/project/decisions/#x) [c](https://s.example/blob/v1.2/LICENSE) \
[d](#e) [f](https://g)

```python
calls[0](docs)
```

![h](https://s.example/raw/v1.2/docs/picture.svg) <a href="https://d.example/i/#j">k</a> <a href="https://l">m</a>
"""
    )
    assert (
        hook["with_absolute_links"](page, {}, "1.2")
        == """\
a b c [d](#e) [f](https://g)

```python
calls[0](docs)
```

 k <a href="https://l">m</a>
"""
    )


def test_a_release_needs_real_addresses(project):
    missing = runpy.run_path(str(project / "scripts" / "package.py"))["missing"]
    assert missing({}) == ["Documentation", "Source"]
    assert missing({**URLS, "Issues": "https://semel.example.org/issues"}) == [*URLS, "Issues"]
    real = {"Documentation": "https://docs.semel.org/", "Source": "https://example.semel.org/semel"}
    assert missing(real) == []


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

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


LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


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


def test_an_index_can_link_to_the_project(metadata):
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    for url in urls.values():
        assert urlsplit(url).scheme == "https"
    assert urls["Documentation"].endswith("/")  # the README's links are made by adding to it
    assert not urls["Source"].endswith("/")


def test_every_link_of_the_readme_works_on_an_index(metadata, project):
    readme = (project / "README.md").read_text(encoding="utf-8")
    shown = metadata.get_payload()
    assert len(LINK.findall(shown)) == len(LINK.findall(readme)) > 30
    for link in LINK.findall(shown):
        assert link.startswith(("https://", "#")), link


def test_a_link_of_the_readme_leads_to_its_page_of_the_documentation(metadata):
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    shown = metadata.get_payload()
    assert f"[Tutorial]({urls['Documentation']}start/tutorial/)" in shown
    assert f"({urls['Documentation']}concepts/keys/#one-request-many-operations)" in shown
    assert f"[changes]({urls['Source']}/blob/v{metadata['Version']}/CHANGELOG.md)" in shown


def test_what_looks_like_a_link_in_code_stays_as_it_is(project):
    hook = runpy.run_path(str(project / "scripts" / "package_readme.py"))
    urls = {"Documentation": "https://d.example/", "Source": "https://s.example"}
    page = """[a](docs/index.md) [b](docs/project/decisions/README.md#x) [c](LICENSE) [d](#e) [f](https://g)

```python
calls[0](docs)
```

[h](docs/picture.svg)
"""
    assert (
        hook["with_absolute_links"](page, urls, "1.2")
        == """\
[a](https://d.example/) [b](https://d.example/project/decisions/#x) [c](https://s.example/blob/v1.2/LICENSE) \
[d](#e) [f](https://g)

```python
calls[0](docs)
```

[h](https://s.example/blob/v1.2/docs/picture.svg)
"""
    )


def test_every_link_of_the_readme_leads_to_a_file_and_a_heading(project):
    readme = (project / "README.md").read_text(encoding="utf-8")
    for link in LINK.findall(readme):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        page = project / (path or "README.md")
        assert page.is_file(), link
        headings = HEADING.findall(page.read_text(encoding="utf-8"))
        assert not anchor or anchor in {_anchor(heading) for heading in headings}, link


def _anchor(heading):
    return re.sub(r"[^\w]+", "-", heading.lower()).strip("-")


def test_a_release_needs_a_real_address(project):
    package = runpy.run_path(str(project / "scripts" / "package.py"))
    urls = {"Homepage": "https://semel.example/", "Source": "https://example.semel.org/semel"}
    assert package["placeholders"](urls) == ["Homepage"]


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

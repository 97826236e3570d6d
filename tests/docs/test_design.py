"""The page about the design names files, packages, URLs and fields that exist, and all of them."""

import ast
import re
from pathlib import Path

from semel.core.records import Record
from semel.stores.urls import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/project/design.md").read_text()
PACKAGE = ROOT / "src/semel"
PICTURE = PAGE.partition("<!-- packages")[2].partition("<!-- end")[0]


def section(title):
    """The text below a heading, up to the next one."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_place_that_the_page_names_exists():
    places = re.findall(r"`([a-z_/]+(?:\.py|/))`", section("The packages"))
    assert len(places) > 40
    named_in_words = {"tasks.py", "threads.py", "store.py", "aio.py"}  # of several folders
    missing = {place for place in places if not (PACKAGE / place).exists()} - named_in_words
    assert missing == set()


def test_every_script_that_the_page_names_exists():
    scripts = re.findall(r"`(\w+\.lua)`", PAGE)
    assert scripts
    assert [name for name in scripts if not (PACKAGE / "stores/redis/lua" / name).exists()] == []


def test_every_scheme_of_a_url_is_named():
    named = set(re.findall(r"`([a-z+]+)://", section("Where records live")))
    assert set(BACKENDS) == named


def test_every_field_of_a_record_is_named():
    rows = re.findall(r"^\| ([a-z, ]+) \|", section("The record"), re.MULTILINE)
    named = {name for row in rows for name in row.split(", ")}
    fields = {name.removesuffix("_at").replace("_", " ") for name in Record.__struct_fields__}
    assert named - {"field"} == fields - {"identity", "now"}  # above the table; of the reading


def test_the_picture_shows_every_package():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {name for name in packages if not re.search(rf"\b{name}\b", PICTURE)} == set()


def test_the_picture_names_the_integrations_and_the_stores():
    for folder in ("adapters", "stores"):
        named = re.search(rf'{folder}\["{folder}: ([^"]*)"\]', PICTURE)[1]
        listed = set(re.findall(r"\w+", named.partition(";")[0]))
        assert [name for name in listed if not list((PACKAGE / folder).glob(f"{name}*"))] == []
        found = {path.parent.name for path in (PACKAGE / folder).glob("[a-z]*/__init__.py")}
        assert found <= listed


def imports():
    """Which package imports which, by their names; `sync` and `aio` are the engine's own."""
    for path in PACKAGE.rglob("*.py"):
        source = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("semel"):
                package = [*node.module.split("."), node.names[0].name][1]
                target = {"sync": "engine", "aio": "engine"}.get(package, package)
                if not source.startswith("__") and not target.startswith("__"):
                    yield source, target


def test_the_picture_has_an_arrow_for_every_import_and_no_other():
    arrows = set(re.findall(r'^ *(\w+)(?:\[".*?"\])? --> (\w+)', PICTURE, re.MULTILINE))
    found = {
        (source, target) for source, target in imports() if source not in {target, "sync", "aio"}
    }
    assert arrows <= found
    reached = set(arrows)
    for _ in arrows:
        reached |= {(a, d) for a, b in reached for c, d in arrows if b == c}
    assert found <= reached

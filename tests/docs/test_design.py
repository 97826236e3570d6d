"""The page about the design names files, packages, URLs, and fields that exist, and all of them."""

import ast
import re
from pathlib import Path

from semel.core.records import Record
from semel.stores.urls import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/project/design.md").read_text()
PACKAGE = ROOT / "src/semel"
PICTURE = (ROOT / "docs/assets/packages.svg").read_text()
ROWS = {
    name: int(y) for y, name in re.findall(r'class="name" x="\d+" y="(\d+)">(\w+)</text>', PICTURE)
}
"""How far down each package stands."""


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


def test_the_picture_shows_every_package_and_no_other():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGE.glob("[a-z]*.py")} - {"sync", "aio"}  # the engine's
    assert packages <= ROWS.keys() <= packages | modules


def test_the_picture_names_the_integrations_and_the_stores():
    for folder in ("adapters", "stores"):
        below = PICTURE.partition(f">{folder}</text>")[2].partition('class="name"')[0]
        told = " ".join(re.findall(r'class="soft"[^>]*>([^<]*)<', below))
        listed = set(re.findall(r"\w+", told.partition(";")[0]))
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


def test_every_import_goes_to_a_lower_row_of_the_picture():
    found = {(a, b) for a, b in imports() if a not in {b, "sync", "aio"}}
    assert found
    assert [(a, b) for a, b in found if ROWS[a] >= ROWS[b]] == []


def test_the_page_shows_the_pictures_and_tells_what_is_in_them():
    shown = dict(re.findall(r"!\[([^\]]+)\]\(\.\./assets/(\w+)\.svg\)", PAGE))
    assert set(shown.values()) == {"architecture", "states", "packages"}
    told = next(text for text, name in shown.items() if name == "packages")
    assert [name for name in ROWS if name not in told] == []

"""The page about the design names files and packages that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/design.md").read_text()
PACKAGE = ROOT / "src/semel"


def test_every_place_that_the_page_names_exists():
    table = PAGE.partition("| you look for | it is in |")[2]
    places = re.findall(r"`([a-z_/]+(?:\.py|/))`", table)
    assert len(places) > 15
    assert [place for place in places if not (PACKAGE / place).exists()] == []


def test_the_picture_shows_every_package():
    picture = PAGE.partition("<!-- packages")[2].partition("<!-- end")[0]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {name for name in packages if not re.search(rf"\b{name}\b", picture)} == set()


def test_the_picture_names_the_integrations_and_the_stores():
    picture = PAGE.partition("<!-- packages")[2].partition("<!-- end")[0]
    for folder in ("adapters", "stores"):
        named = re.search(rf'{folder}\["{folder}: ([^"]*)"\]', picture)[1]
        listed = set(re.findall(r"\w+", named.partition(";")[0]))
        assert [name for name in listed if not list((PACKAGE / folder).glob(f"{name}*"))] == []
        found = {path.parent.name for path in (PACKAGE / folder).glob("[a-z]*/__init__.py")}
        assert found <= listed

"""The README in two languages: its figures, its pictures, its links, and that both say the same."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import readme

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
IMAGE = re.compile(r"<img ([^>]*)>|!\[([^\]]*)\]\(([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)*")
CODE = re.compile(r"`[^`]+`")
# "Two" is left out: where English says "two callers", Chinese also says it of a pair.
WORDS = {"four": "4", "five": "5", "ten": "10", "thirteen": "13"}
CHINESE_WORDS = {"十三": "13", "十": "10", "五": "5", "四": "4"}


def prose(page):
    """The page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def sections(text):
    """The parts between the headings, the first one before them."""
    return re.split(r"^## .+\n", text, flags=re.MULTILINE)


def tables(text):
    """For each table, how many columns each of its lines has."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    return [[row.count("|") for row in table.splitlines()] for table in found]


def code(text):
    """What stands in code font."""
    return sorted(CODE.findall(text))


def shown(image):
    """The file and the alternative text of a picture."""
    if image[1]:
        attributes = dict(re.findall(r'(\w+)="([^"]*)"', image[1]))
        return attributes["src"], attributes.get("alt")
    return image[3], image[2]


# --- figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_figures_are_those_of_the_report(language):
    text = readme.READMES[language].read_text(encoding="utf-8")
    results = readme.RESULTS.read_text(encoding="utf-8")
    assert len(readme.MARKED.findall(text)) == 1
    assert text == readme.updated(text, results, language), "run `python -m benchmarks.readme`"


def test_a_figure_that_is_not_in_the_report_is_found():
    text = ENGLISH.read_text(encoding="utf-8")
    results = readme.RESULTS.read_text(encoding="utf-8")
    ahead = re.search(r"semel is ahead in \d+ of \d+", results)[0]
    other = results.replace(ahead, "semel is ahead in 1 of 3").replace("44,344", "99,999")
    changed = readme.updated(text, other, "en")
    assert "ahead in 1 of the 3 scenarios" in changed
    assert "| Redis, 128 asyncio tasks | **100,000** |" in changed


def test_the_chart_shows_the_figures_of_the_report():
    results = readme.RESULTS.read_text(encoding="utf-8")
    chart = ET.parse(ROOT / "benchmarks" / "chart.svg").getroot()  # noqa: S314 - our own file
    texts = [one.text for one in chart.iter() if one.tag.endswith("}text")]
    bars = [pair for pair in pairwise(texts) if NUMBER.fullmatch(pair[1] or "")]
    assert len(bars) > 10
    for name, number in bars:
        rows = [row for row in results.splitlines() if row.startswith((f"| {name}", f"| **{name}"))]
        assert any(re.search(rf"\b{number}\b", row) for row in rows), (name, number)


def test_the_comparison_is_that_of_its_page():
    page = (ROOT / "docs" / "project" / "alternatives.md").read_text(encoding="utf-8")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    section = ENGLISH.read_text(encoding="utf-8").partition("## Compare the alternatives\n")[2]
    rows = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)[0].splitlines()
    assert len(rows) == 9
    for row in rows:
        assert row in plain


# --- both languages --------------------------------------------------------------------------


def test_the_chinese_page_has_the_same_sections():
    english, chinese = (prose(page) for page in (ENGLISH, CHINESE))
    marks = [[mark for mark, _ in HEADING.findall(text)] for text in (english, chinese)]
    assert marks[0] == marks[1]
    assert len(marks[0]) > 8


def test_the_chinese_page_has_the_same_blocks_of_code():
    blocks = [FENCE.findall(page.read_text(encoding="utf-8")) for page in (ENGLISH, CHINESE)]
    assert blocks[0] == blocks[1]
    assert {language for language, _ in blocks[0]} == {"python", "console"}


def test_the_chinese_page_has_the_same_numbers_in_each_section():
    def numbers(text, words):
        text = re.sub(r"\]\([^)]*\)|<img [^>]*>", "", CODE.sub("", text))
        for word, digits in words.items():
            text = re.sub(rf"(?<![a-z]){word}(?![a-z])", f" {digits} ", text, flags=re.IGNORECASE)
        return sorted(NUMBER.findall(text))

    pairs = zip(sections(prose(ENGLISH)), sections(prose(CHINESE)), strict=True)
    for english, chinese in pairs:
        there = numbers(english, WORDS)
        here = numbers(chinese, CHINESE_WORDS)
        assert here == there, english[:60]


def test_the_chinese_page_has_the_same_names_in_code_font_in_each_section():
    for english, chinese in zip(sections(prose(ENGLISH)), sections(prose(CHINESE)), strict=True):
        assert code(chinese) == code(english)


def test_the_chinese_page_has_tables_of_the_same_shape():
    assert tables(prose(ENGLISH)) == tables(prose(CHINESE))
    assert len(tables(prose(ENGLISH))) == 7


def test_the_chinese_page_links_to_the_same_pages():
    def pages(text):
        return sorted(link for link in LINK.findall(text) if not link.startswith(("#", "README")))

    for english, chinese in zip(sections(prose(ENGLISH)), sections(prose(CHINESE)), strict=True):
        assert pages(chinese) == pages(english)


# --- pictures and links ----------------------------------------------------------------------


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_every_picture_exists_and_has_an_alternative_text(page):
    found = [shown(image) for image in IMAGE.finditer(prose(page))]
    assert len(found) == 5
    for file, text in found:
        assert (ROOT / file).is_file(), file
        # The logo stands beside the name, which says the same.
        assert text or file.endswith("logo.svg"), file


@pytest.mark.parametrize("picture", ["replay-sequence", "crash-modes"])
def test_the_chinese_pictures_are_the_same_drawings(picture):
    def drawing(name):
        root = ET.parse(ROOT / "docs" / "assets" / name).getroot()  # noqa: S314 - our own file
        return [
            (
                one.tag,
                {key: value for key, value in one.items() if key not in {"font-family", "lang"}},
            )
            for one in root.iter()
        ]

    assert drawing(f"{picture}.zh.svg") == drawing(f"{picture}.svg")


def tracked_pictures():
    listed = subprocess.run(
        ["git", "ls-files", "docs/*.svg", "benchmarks/*.svg"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return listed or ["docs/assets/demo.svg", "benchmarks/chart.svg"]


@pytest.mark.parametrize("picture", tracked_pictures())
def test_a_picture_says_what_it_shows_and_needs_nothing_from_elsewhere(picture):
    text = (ROOT / picture).read_text(encoding="utf-8")
    root = ET.fromstring(text)  # noqa: S314 - our own file
    assert root.get("viewBox")
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(
        r"https?://|@import|@font-face|url\(\s*[^#)]|<script|<image", without_names
    )
    if not picture.endswith("logo.svg"):
        assert root.find("{*}title") is not None
        assert root.find("{*}desc") is not None


def test_the_recording_of_the_demo_ends_well_and_respects_reduced_motion():
    text = (ROOT / "docs" / "assets" / "demo.svg").read_text(encoding="utf-8")
    assert "OK: each of 300 payments was charged exactly once." in text
    still, _, moving = text.partition("@media (prefers-reduced-motion: no-preference)")
    assert "animation" not in still
    assert "animation" in moving


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_every_link_leads_to_a_file_and_a_heading(page):
    links = [link for link in LINK.findall(prose(page)) if not link.startswith("https://")]
    assert len(links) > 50
    for link in links:
        path, _, anchor = link.partition("#")
        target = ROOT / path if path else page
        assert target.is_file(), link
        assert not anchor or anchor in {
            _anchor(title) for _, title in HEADING.findall(prose(target))
        }


def _anchor(heading):
    return re.sub(r"[^\w]+", "-", heading.lower()).strip("-")

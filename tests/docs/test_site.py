"""The site as a reader sees it: built once, served from loopback, looked at in Chromium."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from mkdocs.utils.yaml import yaml_load

from servers.chromium import chromium

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HOOKS = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))
ELSEWHERE = re.compile(
    r"""src=["']?(?:https?:)?//|<link[^>]*rel="?stylesheet[^>]*href="?(?:https?:)?//"""
    r"""|@import|url\(["']?(?:https?:)?//|fonts\.googleapis|class="mermaid"|<pre class=mermaid"""
)
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
FOUND = {
    "double charge": "start/faq/",
    "celery": "protect/celery/",
    "kafka": "protect/other-queues/",
    "stripe": "start/faq/",
    "comparison": "project/alternatives/",
}
"""What readers search for, and the page that has to come first."""

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("not_measured")]


class Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # the browser keeps its connections

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def pages(site: Path) -> list[str]:
    """The pages that the menu, or another page, leads to; decisions look alike."""
    found = (page.parent.relative_to(site).as_posix() for page in site.rglob("index.html"))
    return sorted("" if page == "." else f"{page}/" for page in found if "/decisions/" not in page)


def test_nothing_is_fetched_from_another_host(site):
    texts = [path for kind in ("html", "css") for path in site.rglob(f"*.{kind}")]
    assert len(texts) > 70
    found = {
        f"{path.relative_to(site)}: {match[0]}"
        for path in texts
        for match in ELSEWHERE.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()


LOOK = """() => {
    const wide = element => element.scrollWidth > element.clientWidth + 1;
    const text = element => element.textContent.trim().slice(0, 60);
    // What a program prints is as wide as it is; what you type has to fit.
    document.querySelectorAll('.highlight .go').forEach(output => output.remove());
    return {
        body: document.documentElement.scrollWidth - window.innerWidth,
        code: [...document.querySelectorAll('.highlight pre > code, .highlight pre')]
            .filter(wide).map(text),
        dark: document.body.getAttribute('data-md-color-scheme') === 'slate',
    };
}"""


def test_pages_look_right_wide_and_narrow_light_and_dark(site, address, browser):
    wrong: list[str] = []
    page = browser.new_page()
    # Reading the search's index takes a page longer than all the rest.
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    page.route("**/search_index.json", lambda route: route.fulfill(json={**index, "docs": []}))
    page.on(
        "console", lambda said: said.type == "error" and wrong.append(f"{page.url}: {said.text}")
    )
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on(
        "request",
        lambda request: (
            urlsplit(request.url).scheme in {"http", "https"}
            and not request.url.startswith(address)
            and wrong.append(f"{page.url} asks {request.url}")
        ),
    )
    for number, path in enumerate(pages(site)):
        # Colors move nothing: a page is loaded in one scheme, and the next one in the other.
        scheme = "dark" if number % 2 else "light"
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(DESKTOP)
        page.goto(address + path, wait_until="load")
        for size in (DESKTOP, PHONE):
            page.set_viewport_size(size)
            looks = page.evaluate(LOOK)
            if looks["body"] > 0:
                wrong.append(f"{path} at {size['width']}: {looks['body']} pixels too wide")
            if size is DESKTOP:
                wrong += [f"{path} has code that is too wide: {code}" for code in looks["code"]]
        if looks["dark"] != (scheme == "dark"):
            wrong.append(f"{path} isn't {scheme}")
    page.close()
    assert wrong == []


SHOWN = """words => {
    const input = document.querySelector("input.md-search__input")
    const found = [...document.querySelectorAll(".md-search-result__item > a")]
    return input.value === words && found.length ? found.slice(0, 4).map(a => a.href) : null
}"""
"""The addresses of the first pages that a search has found."""


@pytest.mark.parametrize(("words", "first"), FOUND.items(), ids=FOUND)
def test_the_search_finds_the_right_page_first(address, browser, words, first):
    from playwright.sync_api import TimeoutError as NotYet

    page = browser.new_page(viewport=DESKTOP)
    page.goto(address)
    found: list[str] = []
    for _ in range(8):  # what is typed before the page listens is lost
        page.fill("input.md-search__input", "")
        page.fill("input.md-search__input", words)
        with contextlib.suppress(NotYet):
            shown = page.wait_for_function(SHOWN, arg=words, timeout=20_000)
            found = shown.json_value()
            break
    page.close()
    assert urlsplit(found[0]).path.removeprefix("/") == first, found


def test_each_link_of_the_page_for_assistants_exists(site):
    text = (site / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not (site / link).is_file()] == []
    assert [link for link in links if not (DOCS / link).is_file()] == []
    assert len(re.findall(r"^\d+\. \*\*", text, re.MULTILINE)) == 10


def places(menu: Any) -> list[str]:
    if isinstance(menu, str):
        return [menu]
    inner = menu.values() if isinstance(menu, dict) else menu
    return [place for part in inner for place in places(part)]


def test_the_page_for_assistants_has_every_page_of_the_menu():
    config = yaml_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    left = {place for place in places(config["nav"]) if f"]({place})" not in text}
    assert left == {"index.md", "reference/index.md"}


def test_included_files_have_links_that_work_on_the_site():
    included, moved = HOOKS["included"], HOOKS["moved"]
    text = (
        "A [page](docs/stores/redis.md#urls), [another](CHANGELOG.md), [code](src/x.py),\n"
        "the [mission](docs/mission.md), [web](https://a.example/), [here](#top),\n"
        "![chart](benchmarks/chart.svg)\n"
        "```text\n[kept](docs/x.md)\n```\n"
    )
    assert moved(text, "CONTRIBUTING.md", "project/contributing.md") == (
        "A [page](../stores/redis.md#urls), [another](changes.md), code,\n"
        "the mission, [web](https://a.example/), [here](#top),\n"
        "![chart](../assets/benchmarks.svg)\n"
        "```text\n[kept](docs/x.md)\n```\n"
    )
    assert moved("[up](../CHANGELOG.md)", "benchmarks/results.md", "project/benchmarks.md") == (
        "[up](changes.md)"
    )
    changes = included('--8<-- "CHANGELOG.md"\n', "project/changes.md")
    assert changes.startswith("# Changes")
    assert "--8<--" not in changes


def test_the_page_of_the_decisions_lists_them():
    folder = DOCS / "project" / "decisions"
    listed = re.findall(
        r"^- \[(\d{3})\. .+\]\((.+\.md)\)$", HOOKS["decisions"](folder), re.MULTILINE
    )
    assert len(listed) == len(list(folder.glob("[0-9]*.md"))) > 30
    assert all(name.startswith(number) for number, name in listed)


def test_every_decision_that_replaces_another_is_named_by_it():
    folder = DOCS / "project" / "decisions"
    for page in folder.glob("[0-9]*.md"):
        second = page.read_text(encoding="utf-8").split("\n\n")[1]
        if second.startswith(("Replaces", "Extends [")):
            (older,) = re.findall(r"\]\((\d{3}-[^)]+)\)", second)
            assert page.name in (folder / older).read_text(encoding="utf-8"), page.name

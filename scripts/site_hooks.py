"""Hooks of the site: files from outside `docs/` become part of a page, with links that work there.

`project/changes.md` includes `CHANGELOG.md`, whose links are written for the place where it stands
in the repository. A line `--8<-- "CHANGELOG.md"` becomes the text of the file, and its links are
turned around: pages of the site are linked from the page, and a link to any other file of the
repository becomes plain text, because the site doesn't have it.

Beside each page stands its Markdown, for the links of `llms.txt`.

The page of the decisions lists them. The search leaves them out: they are for contributors.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^--8<-- "(?P<file>[\w./-]+)"$', re.MULTILINE)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
IMAGE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PLACES = {
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "benchmarks/results.md": "project/benchmarks.md",
    "benchmarks/chart.svg": "assets/benchmarks.svg",
}
"""What the site has of the repository outside `docs/`, and where."""
UNPUBLISHED = {"mission.md", "project/decisions/template.md"}
"""What `exclude_docs` in mkdocs.yml leaves out."""
DECISION = re.compile(r"project/decisions/\d{3}-")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the picture of the benchmarks, which the report draws beside itself."""
    chart = ROOT / "benchmarks" / "chart.svg"
    files.append(File.generated(config, PLACES["benchmarks/chart.svg"], abs_src_path=str(chart)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Put the included files into the page, and the decisions into their list."""
    place = page.file.src_uri
    if DECISION.match(place):
        page.meta["search"] = {"exclude": True}
    if place == "project/decisions/README.md":
        return f"{markdown}\n{decisions(Path(config.docs_dir) / 'project' / 'decisions')}"
    return included(markdown, place)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Put the Markdown of each page beside it, with what it includes."""
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    for page in docs.rglob("*.md"):
        place = page.relative_to(docs)
        if (site / place).parent.is_dir() and str(place) not in UNPUBLISHED:
            text = included(page.read_text(encoding="utf-8"), place.as_posix())
            (site / place).write_text(text, encoding="utf-8")


def decisions(folder: Path) -> str:
    """Return a list of the decisions, each with its title and a link."""
    pages = sorted(folder.glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages]
    rows = zip(titles, pages, strict=True)
    return "\n".join(f"- [{title.replace('`', '')}]({page.name})" for title, page in rows)


def included(markdown: str, page: str) -> str:
    """Return the text of the page (a path in `docs/`) with its files from outside `docs/`."""

    def replaced(found: re.Match[str]) -> str:
        file = found["file"]
        return moved((ROOT / file).read_text(encoding="utf-8"), file, page)

    return INCLUDE.sub(replaced, markdown)


def moved(text: str, file: str, page: str) -> str:
    """Return a file's text with links that work on a page of the site."""

    def link(found: re.Match[str]) -> str:
        target = _on_the_site(found["target"], file, page)
        return found["text"] if target is None else f"[{found['text']}]({target})"

    def image(found: re.Match[str]) -> str:
        target = _on_the_site(found["target"], file, page)
        return "" if target is None else f"![{found['text']}]({target})"

    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(text):
        parts += [IMAGE.sub(image, LINK.sub(link, text[end : fence.start()])), fence[0]]
        end = fence.end()
    return "".join([*parts, IMAGE.sub(image, LINK.sub(link, text[end:]))])


def _on_the_site(target: str, file: str, page: str) -> str | None:
    """Return the link as the page needs it; None = the site does not have it."""
    if target.startswith(("#", "https://", "http://", "mailto:")):
        return target
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
    path = PLACES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
    if not path or path in UNPUBLISHED:
        return None
    relative = posixpath.relpath(path, posixpath.dirname(page))
    return f"{relative}#{anchor}" if anchor else relative

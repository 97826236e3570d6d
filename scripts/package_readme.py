"""The README as a package index shows it: no link or picture leads into the repository.

An index shows the README alone, where `docs/start/tutorial.md` leads nowhere. When hatchling builds
the package, it calls this hook, which reads two addresses from `[project.urls]`: "Documentation"
(with a slash at its end) and "Source" (without one). Links to pages of `docs/` become links to the
documentation. Links to other files, and pictures, become links to the source of this version. While
the project has no such address, a link keeps only its text, and pictures are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

_CODE: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
"""A block of code; what looks like a link in it is none."""

_TARGET: Final = r"(?!https?:|mailto:|data:|#)(?P<path>[^)\"#\s]+)(?P<anchor>#[^)\"\s]*)?"
"""A file of the repository, and a place in it."""
_PICTURES: Final = (
    re.compile(rf"!\[(?P<text>[^\]]*)\]\({_TARGET}\)(?P<after>(?:\{{[^}}]*\}})?)"),
    re.compile(rf"(?P<before><img [^>]*?\bsrc=\"){_TARGET}(?P<after>\"[^>]*>)"),
)
_LINKS: Final = (
    re.compile(rf"(?<!!)\[(?P<text>(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\({_TARGET}\)"),
    re.compile(rf"(?P<before><a [^>]*?\bhref=\"){_TARGET}(?P<after>\"[^>]*>)(?P<text>.*?)</a>"),
)
_EMPTY: Final = re.compile(r"<p[^>]*>\s*</p>\n*|(?<=<h1>)\s+")
"""What is left around a picture that is left out."""


class ReadmeHook(MetadataHookInterface):
    """Adds the README to the metadata of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README with absolute links, and its type."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(readme, metadata.get("urls", {}), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, urls: Mapping[str, str], version: str) -> str:
    """Return a page whose links and pictures work anywhere; its blocks of code stay as they are."""

    def picture(found: re.Match[str]) -> str:
        there = raw(found["path"], urls, version)
        return "" if there is None else _with(found, there)

    def link(found: re.Match[str]) -> str:
        there = address(found["path"], urls, version)
        return found["text"] if there is None else _with(found, there + (found["anchor"] or ""))

    def shown(part: str) -> str:
        for patterns, rule in ((_PICTURES, picture), (_LINKS, link)):
            for pattern in patterns:
                part = pattern.sub(rule, part)
        return _EMPTY.sub("", part)

    return "".join(part if part.startswith("```") else shown(part) for part in _CODE.split(text))


def address(path: str, urls: Mapping[str, str], version: str) -> str | None:
    """Return where a file of the repository is on the web, if it is there."""
    folder, _, page = path.partition("docs/")
    if "Documentation" in urls and not folder and page.endswith(".md"):
        # As MkDocs names its pages: protect/http.md is protect/http/, and index.md its folder.
        name = re.sub(r"(^|/)(index|README)$", r"\1", page.removesuffix(".md"))
        return urls["Documentation"] + (f"{name.removesuffix('/')}/" if name else "")
    return f"{urls['Source']}/blob/v{version}/{path}" if "Source" in urls else None


def raw(path: str, urls: Mapping[str, str], version: str) -> str | None:
    """Return where the content of a file is on the web, without a page around it."""
    return f"{urls['Source']}/raw/v{version}/{path}" if "Source" in urls else None


def _with(found: re.Match[str], there: str) -> str:
    """Return what was found, leading there."""
    begin, end = (found.start("path"), found.end("anchor" if found["anchor"] else "path"))
    text, start = found.string, found.start()
    return text[start:begin] + there + text[end : found.end()]

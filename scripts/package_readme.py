"""The README as a package index shows it: every link is absolute.

An index shows the README alone, where `docs/start/tutorial.md` leads nowhere. When hatchling builds the
package, it calls this hook: links to pages of `docs/` become links to the documentation, and links
to other files become links to the source of this version. Both addresses are read from
`[project.urls]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

_CODE: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
"""A block of code; what looks like a link in it is none."""
RELATIVE: Final = re.compile(r"\]\((?!https?:|#)(?P<path>[^)#]+)(?P<anchor>#[^)]*)?\)")
"""The target of a link to a file of the repository."""


class ReadmeHook(MetadataHookInterface):
    """Adds the README to the metadata of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Give the README with absolute links, and its type."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(readme, metadata["urls"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, urls: Mapping[str, str], version: str) -> str:
    """Make the links of a page absolute, outside its blocks of code."""

    def absolute(link: re.Match[str]) -> str:
        return f"]({address(link['path'], urls, version)}{link['anchor'] or ''})"

    parts = _CODE.split(text)
    return "".join(
        part if part.startswith("```") else RELATIVE.sub(absolute, part) for part in parts
    )


def address(path: str, urls: Mapping[str, str], version: str) -> str:
    """Return where a file of the repository is on the web."""
    folder, _, page = path.partition("docs/")
    if folder or not page.endswith(".md"):
        return f"{urls['Source']}/blob/v{version}/{path}"
    # As MkDocs names its pages: protect/http.md is protect/http/, and index.md its folder.
    name = re.sub(r"(^|/)(index|README)$", r"\1", page.removesuffix(".md"))
    return urls["Documentation"] + (f"{name.removesuffix('/')}/" if name else "")

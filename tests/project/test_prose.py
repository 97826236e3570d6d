"""What `make prose` finds, and what it leaves alone: planted in a small tree of its own."""

from __future__ import annotations

import importlib.util

import pytest

PAGE = """\
# Page

Nobody runs it, and the store is away. A wrong name is a `ConfigError`. It colours the page.

`nobody` and "somebody" are code and a quotation, [as is](https://nobody.example/is-away).

```python
nobody = "colour"
```
"""
MODULE = '''\
"""Gives the module."""


def pay(cancelled):
    """Tell what was paid."""
    raise ValueError("somebody paid")  # nobody reads a comment


def _private():
    """Give what only we see: a colour."""
    return "colour"
'''


@pytest.fixture(scope="module")
def prose(project):
    spec = importlib.util.spec_from_file_location("prose", project / "scripts" / "prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    for name, text in {
        "README.md": "# semel\n",
        "docs/page.md": PAGE,
        "docs/mission.md": "Nobody.\n",
        "docs/project/decisions/001.md": "Nobody.\n",
        "src/pay.py": MODULE,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_phrases_and_spelling_are_found_at_their_lines(prose, tree):
    found = [line.split(": ")[:2] for line in prose.findings(tree)]
    assert sorted(found) == sorted(
        [
            ["docs/page.md:3", "'Nobody'"],
            ["docs/page.md:3", "'is away'"],
            ["docs/page.md:3", "'is a `ConfigError'"],
            ["docs/page.md:3", "colours ==> colors"],
            ["src/pay.py:1", "'Gives'"],
            ["src/pay.py:5", "'Tell'"],
            ["src/pay.py:6", "'somebody'"],
        ]
    )

"""Which tests are left to `make test-more`: those that repeat on one more kind what others prove.

`@pytest.mark.more` leaves a test to it, `@pytest.mark.more(one_of=4)` three fourths of the tests of
a class, or of the cases of a function. Whoever names a test (`file::test`), or chooses with `-k`,
gets all that he asks for.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterable

import pytest

ALL = "ALL_TESTS"
"""The environment variable by which nothing is left out."""


def left_for_more(config: pytest.Config, items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Choose the tests to leave out.

    Which ones stay depends on their order and on nothing else, and differs from class to class:
    what one kind of store leaves out, another one runs.
    """
    named = config.option.keyword or any("::" in argument for argument in config.args)
    if named or os.environ.get(ALL):
        return set()
    seen: Counter[str] = Counter()
    left = set()
    for item in items:
        mark = item.get_closest_marker("more")
        if mark is None:
            continue
        one_of = mark.kwargs.get("one_of")
        group = item.nodeid.partition("[")[0] if item.cls is None else item.cls.__qualname__
        seen[group] += 1
        if one_of is None or (seen[group] + zlib.crc32(group.encode())) % one_of:
            left.add(item)
    return left

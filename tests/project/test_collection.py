"""Every worker finds the same tests: a name that holds an address would keep them from sharing."""

from __future__ import annotations

import re


def test_no_name_of_a_test_holds_an_address(request):
    names = [item.nodeid for item in request.session.items]
    assert not [name for name in names if re.search(r" at 0x[0-9a-f]{3}", name)]

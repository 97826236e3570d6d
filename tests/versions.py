"""Tests of what only later versions of a package can do are skipped, and say so."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, lowest: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test with versions of a package before this one: `reason` tells what they do."""
    installed = version(package)
    return pytest.mark.skipif(
        Version(installed) < Version(lowest),
        reason=f"needs {package} {lowest}, {installed} is installed: {reason}",
    )

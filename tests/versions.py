"""What only later versions of a package can do: its tests are skipped, and say so."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def has(package: str, lowest: str) -> bool:
    """Tell whether this version of a package is installed, or a later one."""
    return Version(version(package)) >= Version(lowest)


def needs(package: str, lowest: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test with versions of a package before this one: `reason` tells what they do."""
    return pytest.mark.skipif(
        not has(package, lowest),
        reason=f"needs {package} {lowest}, {version(package)} is installed: {reason}",
    )

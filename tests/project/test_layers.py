"""What may be imported from where."""

from __future__ import annotations

import json
import os
import subprocess
import sys

LINT_IMPORTS = "from importlinter.cli import lint_imports_command as run; run()"

NEW_MODULES = """
import json, sys
before = set(sys.modules)
import semel
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_imports_go_downward_only(project):
    """Keeps the contracts of pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS, "--no-cache"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_semel_loads_no_driver_and_no_framework():
    # Without the coverage of child processes, which needs sqlite3 itself.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", NEW_MODULES], env=plain, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert "sqlite3" not in loaded
    # What importlib.metadata brings along: it would double the time of the import.
    assert loaded.isdisjoint({"email", "zipfile"})
    # typing_extensions is what msgspec tries first on older Pythons.
    assert loaded - sys.stdlib_module_names <= {"semel", "msgspec", "typing_extensions"}

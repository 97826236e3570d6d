"""Checks the Python blocks of the READMEs and the docs with mypy and pyright: `make types`.

The blocks of a page are one module, each line at its place, as in tests/docs/test_examples.py: what
is found on line 37 stands on line 37 of the page. A file that a page shows is a module beside it.
The folder is made anew for each run; only mypy's cache is kept.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.test_examples import PAGES, ROOT, blocks, script

MYPY = """\
[mypy]
strict = true
# An example shows an idea; its reader adds the annotations that their project wants.
disallow_any_generics = false
disallow_incomplete_defs = false
disallow_untyped_calls = false
disallow_untyped_decorators = false
disallow_untyped_defs = false
warn_return_any = false
# A page tells a story: a later block may define a name again.
allow_redefinition = true
disable_error_code = no-redef, var-annotated
explicit_package_bases = true
[mypy-{untyped}]
ignore_missing_imports = true
"""
UNTYPED = ("django", "rest_framework", "asyncpg", "celery", "pika", "apscheduler", "boto3")
"""Packages that ship no types, or types that need a plugin of mypy."""
PYRIGHT = {
    "typeCheckingMode": "standard",
    "pythonVersion": "3.11",
    "useLibraryCodeForTypes": False,  # what a package without types seems to be misleads
    "reportFunctionMemberAccess": "none",  # `task.delay`: an untyped decorator is taken for none
    "reportRedeclaration": "none",
    "reportMissingModuleSource": "none",
}


def write(folder: Path) -> dict[str, Path]:
    """Write a module for each page, and return the page of each module."""
    written = {}
    for page in PAGES:
        found = blocks(page.read_text(encoding="utf-8"))
        if not found:
            continue
        slug = re.sub(r"\W", "_", page.relative_to(ROOT).with_suffix("").as_posix())
        modules = {f"{slug}.py": script(found)}
        for block in found:
            if block.file:
                lines = "\n" * (block.line - 1)
                modules[f"{slug}_files/{block.file}"] = lines + block.code
        for name, code in modules.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(code, encoding="utf-8")
            written[name] = page
    return written


def main() -> int:
    """Check every page, and show what was found at its line of the page."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        written = write(folder)
        untyped = ",".join(f"{name},{name}.*" for name in UNTYPED)
        (folder / "mypy.ini").write_text(MYPY.format(untyped=untyped), encoding="utf-8")
        (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT), encoding="utf-8")
        mypy = ["mypy", "--config-file=mypy.ini", f"--cache-dir={ROOT / '.mypy_cache' / 'docs'}"]
        shown = sorted({str(Path(name).parent) for name in written} - {"."})
        commands = [
            [*mypy, *(name for name in written if "/" not in name)],
            # The files of a page import each other, by names that another page may use as well.
            *([*mypy, f"--cache-dir={ROOT / '.mypy_cache' / name}", name] for name in shown),
            ["pyright", "--pythonpath", sys.executable],
        ]
        failed = 0
        for command in commands:
            done = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=folder,
                env={**os.environ, "MYPYPATH": command[-1]},
                capture_output=True,
                text=True,
                check=False,
            )
            failed |= done.returncode
            for line in (done.stdout + done.stderr).splitlines():
                print(_on_its_page(line.replace(f"{folder.resolve()}/", ""), written))
    return failed


def _on_its_page(line: str, written: dict[str, Path]) -> str:
    found = re.match(r"\s*([\w/]+\.py)\b", line)
    if found is None or found[1] not in written:
        return line
    page = written[found[1]].relative_to(ROOT).as_posix()
    return page + line[found.end() :]


if __name__ == "__main__":
    sys.exit(main())

"""The how-to can be followed again in the same folder, as a reader does who comes back to it."""

from __future__ import annotations

import os
import subprocess
import sys

from docs.test_examples import LOCAL_POSTGRES, blocks, script


def test_the_examples_of_the_howto_work_twice_in_one_folder(project, tmp_path, postgres_url):
    page = (project / "docs" / "protect" / "transactions.md").read_text(encoding="utf-8")
    example = tmp_path / "page_transactions.py"
    source = script(blocks(page)).replace(LOCAL_POSTGRES, postgres_url)
    example.write_text(source, encoding="utf-8")
    settings = {key: value for key, value in os.environ.items() if not key.startswith("SEMEL_")}
    for _ in range(2):
        subprocess.run([sys.executable, example.name], cwd=tmp_path, env=settings, check=True)

"""`make test-galera` collects these tests, and nothing else does: a cluster takes half a minute."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("GALERA_TESTS") else ["test_*.py"]

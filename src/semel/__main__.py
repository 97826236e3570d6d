"""`python -m semel`: the command line."""

from __future__ import annotations

import sys

from semel.cli import main

sys.exit(main())

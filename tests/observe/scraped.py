"""A shop that shows its metrics, for servers with several processes; `test_prometheus.py` starts it.

SHOP_STORE=sqlite:///... PROMETHEUS_MULTIPROC_DIR=... gunicorn --workers 2 "observe.scraped:app"
"""

from __future__ import annotations

import json
import os
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from semel import Idempotency
from semel.observe.prometheus import StuckCollector, prometheus_hook

idem = Idempotency(os.environ["SHOP_STORE"], hooks=[prometheus_hook()])
stuck = StuckCollector(idem)


def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    if environ["PATH_INFO"] == "/metrics":
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        registry.register(stuck)
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
        return [generate_latest(registry)]
    outcome = idem.run(environ["PATH_INFO"], lambda: "paid", scope="shop")
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({"pid": os.getpid(), "replayed": outcome.replayed}).encode()]

"""The proxy of `semel proxy`, around a Node server that knows nothing of semel."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from functools import cache
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from semel import AsyncIdempotency
from semel.adapters.asgi import App
from semel.server.proxy import Upstream, create_proxy
from server.node import Node
from web.handlers import CORS_ORIGIN, Business, Folder
from web.stacks.asgi import Authorized


@cache
def _upstream(folder: Folder) -> str:
    node = Node(folder.root)
    atexit.register(node.close)
    return node.url


def application(business: Business, engine: AsyncIdempotency, options: Mapping[str, Any]) -> App:
    proxy = create_proxy(engine, Upstream(_upstream(business.folder)), **options)
    compressing = GZipMiddleware(Authorized(proxy, business), minimum_size=100)
    return CORSMiddleware(compressing, allow_origins=[CORS_ORIGIN])

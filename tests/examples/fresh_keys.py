"""A hook of Schemathesis: each request has a key that no other has."""

from __future__ import annotations

import uuid

import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    del context, kwargs
    if case.method in {"POST", "PATCH"} and "Idempotency-Key" in (case.headers or {}):
        case.headers["Idempotency-Key"] = str(uuid.uuid4())

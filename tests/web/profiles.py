"""Named sets of options; a worker serves all of them, each under a host name of its own.

A request for profile `strict` on the store `sqlite` says `Host: strict.sqlite`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from semel import Policy
from semel.core.encryption import EncryptedCodec
from semel.http import Request, Route

LEASE = 0.5
SMALL = 4096
MESSAGE = "this coupon was redeemed before"
SECRET = b"a secret of the application"
KEY_FIELD = "payment.reference"


def user(request: Request) -> str | None:
    """Whose key it is."""
    return request.headers.get("x-user")


def order_number(request: Request, body: bytes) -> str | None:
    """A key from whatever the application likes."""
    return request.headers.get("x-order")


def deterministic(status: int) -> bool:
    """Store refusals too, and even what may never be stored."""
    return status < 500


def doubtful(status: int) -> bool | str:
    """After an error of the server nobody knows what happened."""
    return "unknown" if status >= 500 else status < 300


def amount(request: Request, body: bytes) -> object:
    """Compare the length of the body only."""
    return len(body)


PROFILES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "required": {"required": True},
    "strict": {"strict": True},
    "own-header": {"header": "X-Idempotency-Key", "replayed_header": "X-Replay"},
    "more-methods": {"methods": ("POST", "PUT", "DELETE")},
    "query": {"query": "idempotency_key"},
    "field": {"header": None, "field": KEY_FIELD},
    "form": {"header": None, "field": "reference", "format": "form"},
    "function": {"key": order_number},
    "order": {
        "query": "idempotency_key",
        "key": order_number,
        "order": ("function", "query", "header", "field"),
    },
    "wait": {"wait": 20},
    "impatient": {"wait": 0.2, "retry_after": 7.2},
    "fail-open": {"policy": Policy(store_error="open")},
    "guard": {"policy": Policy(duplicate="reject", message=MESSAGE)},
    "hold": {"policy": Policy(abandoned="hold", lease=LEASE)},
    "payment": {"policy": Policy.payment()},
    "final": {"policy": Policy(failure="final")},
    "tenant": {"tenant": user},
    "separate-routes": {"separate_routes": True},
    "fields": {"payload": ("amount", "to.iban")},
    "payload-function": {"payload": amount},
    "secret": {"secret": SECRET},
    "deterministic": {"stored": deterministic},
    "doubtful": {"stored": doubtful, "policy": Policy(abandoned="hold")},
    "never-stored": {"never_stored": ("X-First",)},
    "small": {"max_body": SMALL, "max_response": SMALL},
    "short-lease": {"policy": Policy(lease=LEASE)},
    "encrypted": {
        "policy": Policy(codec=EncryptedCodec(keys={"1": b"0123456789abcdef"}, primary="1"))
    },
    "worded": {
        "required": True,
        "problems": {
            "key_missing": {
                "status": 428,
                "title": "No key",
                "detail": "Send a key, please.",
                "type": "https://shop.example/problems/no-key",
            }
        },
    },
}
"""What every integration takes."""

PATHS: Mapping[str, Mapping[str, Any]] = {
    "exclude": {"required": True, "exclude": ("/login", "/status/*")},
    "include": {"required": True, "include": ("/pay", re.compile(r"/re.+"))},
    "routes": {
        "routes": (
            Route("/pay", required=True),
            Route("/refund", policy=Policy(duplicate="reject", message=MESSAGE)),
        )
    },
}
"""What only a middleware around the whole application takes."""

ALL: Mapping[str, Mapping[str, Any]] = {**PROFILES, **PATHS}

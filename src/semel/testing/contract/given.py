"""What the contract's tests start from: owners, payloads, requests, and the store under test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from semel.core.records import (
    FINGERPRINT_BYTES,
    OWNER_BYTES,
    ClaimRequest,
    Encoded,
    Identity,
    Record,
)
from semel.stores.base import AsyncStore, Store
from semel.testing.driver import StoreDriver

LONG = 600.0
"""A lease or retention that cannot end while a test runs."""

SHORT = 0.05
"""A lease or retention that a test waits for."""

KEY = Identity("orders.create", "order:42")
OTHER = Identity("orders.create", "order:43")

# Owners and fingerprints are raw bytes: a zero, a high byte and a trailing zero must survive.
ANNA = b"\x00anna\xff".ljust(OWNER_BYTES, b"\x00")
BERT = b"\x00bert\xff".ljust(OWNER_BYTES, b"\x00")
CARL = b"\x00carl\xff".ljust(OWNER_BYTES, b"\x00")

RED = b"\x00red\xff".ljust(FINGERPRINT_BYTES, b"\x00")
BLUE = b"\x00blue\xff".ljust(FINGERPRINT_BYTES, b"\x00")

RESULT = Encoded("json", b'{"charge":"ch_1"}')
OTHER_RESULT = Encoded("json", b'{"charge":"ch_2"}')
ERROR = Encoded("failure", b'["ValueError","no such order"]')
OTHER_ERROR = Encoded("failure", b'["KeyError","something else"]')

RUN_INFO = b'{"by":"web-1:4711","ttl":600,"codec":"json/1"}'
OTHER_RUN_INFO = b'{"by":"web-2:81","ttl":259200,"codec":"json/1","why":"TimeoutError"}'

Sleep = Callable[[float], None]

T = TypeVar("T")


def ask(
    owner: bytes,
    fingerprint: bytes | None = None,
    *,
    identity: Identity = KEY,
    lease: float = LONG,
    ttl: float = LONG,
    hold: bool = False,
    replace: bool = False,
    max_attempts: int | None = None,
    run_info: bytes = RUN_INFO,
) -> ClaimRequest:
    """Make a claim request; what a test does not mention does not matter to it."""
    return ClaimRequest(
        identity, owner, fingerprint, lease, ttl, hold, replace, max_attempts, run_info
    )


def record_of(driven: StoreDriver, identity: Identity = KEY) -> Record:
    """Read a record that must be there."""
    record = driven.get(identity)
    assert record is not None
    return record


def succeed(
    driven: StoreDriver,
    owner: bytes = ANNA,
    fingerprint: bytes | None = None,
    *,
    identity: Identity = KEY,
    ttl: float = LONG,
) -> None:
    """Run an operation to its success."""
    driven.claim(ask(owner, fingerprint, identity=identity))
    assert driven.complete(identity, owner, RESULT, ttl)


def fail(
    driven: StoreDriver,
    owner: bytes = ANNA,
    *,
    identity: Identity = KEY,
    retryable: bool = True,
    keep_fingerprint: bool = True,
    ttl: float = LONG,
    ran: bool = True,
) -> bool:
    """Record a failure; retryable by the same payload unless said otherwise."""
    return driven.fail(
        identity,
        owner,
        ERROR,
        retryable=retryable,
        keep_fingerprint=keep_fingerprint,
        ttl=ttl,
        ran=ran,
    )


def park(driven: StoreDriver, owner: bytes = ANNA, *, identity: Identity = KEY) -> None:
    """Abandon an attempt at once, without waiting for its lease."""
    assert driven.renew(identity, owner, 0)


def abandon(
    driven: StoreDriver,
    owner: bytes,
    fingerprint: bytes | None = None,
    *,
    identity: Identity = KEY,
    hold: bool = False,
) -> None:
    """Claim, and abandon the attempt at once."""
    driven.claim(ask(owner, fingerprint, identity=identity, hold=hold))
    park(driven, owner, identity=identity)


def expect(kind: type[T], answer: object) -> T:
    """Return an answer that must be of this kind."""
    assert isinstance(answer, kind)
    return answer


class StoreUnderTest:
    """The fixtures of the contract; `store` is the subclass's to give."""

    @pytest.fixture
    def store(self) -> Store | AsyncStore:
        """Return an empty store."""
        raise NotImplementedError("a subclass of StoreContract gives the fixture `store`")

    @pytest.fixture
    def sleep(self) -> Sleep:
        """Let time pass on the store's clock."""
        return time.sleep

    @pytest.fixture
    def set_clock_back(self) -> Callable[[], None]:
        """Bring the store's clock behind the fences of its records.

        A store whose clock can be moved sets it back (`FakeClock.set_back`); another one adds to
        the stored fences, past its own verbs. It comes to the same.
        """
        pytest.skip("the store gives no fixture `set_clock_back`")

    @pytest.fixture
    def make_unreadable(self) -> Callable[[Identity], None]:
        """Damage the stored record of an identity, as a newer release or a faulty disk would.

        Only what is stored is changed, past the store's own verbs.
        """
        pytest.skip("the store gives no fixture `make_unreadable`")

    @pytest.fixture
    def rejects_texts(self) -> bool:
        """Whether the store raises `InvalidKey` for scopes and keys that engines never send.

        Only a store that strangers can send requests to needs to, as the one behind the service.
        """
        return False

    @pytest.fixture
    def driven(self, store: Store | AsyncStore) -> Iterator[StoreDriver]:
        """Drive the store by plain calls, whichever kind it is, and close it."""
        driver = StoreDriver(store)
        yield driver
        driver.close()

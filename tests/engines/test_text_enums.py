"""Keys and scopes that are members of an enum of texts: the text counts, not the member's name."""

from __future__ import annotations

import enum

from semel import Idempotency


class Shop(str, enum.Enum):  # noqa: UP042 - it formats as its name, which a StrEnum does not
    ORDER = "order-1"
    PLACE = "orders"


def test_a_member_of_an_enum_means_its_text():
    with Idempotency("memory://") as idem:
        assert idem.execute(Shop.ORDER, lambda: "ran", scope=Shop.PLACE) == "ran"
        assert idem.execute("order-1", lambda: "again", scope="orders") == "ran"
        (record,) = idem.records()
        assert f"{record.identity.scope}/{record.identity.key}" == "orders/order-1"

"""Sends the running operation's key along with a message."""

from __future__ import annotations

from semel.attempts import current_attempt


def message_headers(part: str, header: str = "idempotency-key") -> dict[str, str]:
    """Give the headers for a message that the running attempt sends; none while no attempt runs.

    `header` is the name of the header with the key. `part` names the message within the operation,
    as in `Attempt.derive`: every attempt gives the same part the same key, so the consumer tells a
    message sent twice from a second message.
    """
    attempt = current_attempt()
    return {} if attempt is None else {header: attempt.derive(part)}

"""The policy of one route or method, laid over the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from semel.core.codec import Codec, JsonCodec, MsgpackCodec
from semel.core.policy import Policy, Rules, changed

_WRAPPING: Final = (JsonCodec, MsgpackCodec)
"""Codecs that would only wrap bytes; any other is the application's own, and may encrypt."""


class Chosen(Protocol):
    """What the options of HTTP's doors and of gRPC's have in common."""

    scope: str
    policy: Policy | None
    wait: float
    max_response: int


def rules_of(
    chosen: Chosen, resolved: Callable[..., Rules], *, envelope: int, codec: Codec
) -> Rules:
    """Lay a policy over the engine's, in the engine's own way (`resolved`).

    `envelope` is the room that a stored answer needs beside its body, `codec` stores packed bytes.
    """
    patience = (
        Policy(concurrent="wait", wait_timeout=chosen.wait)
        if chosen.wait
        else Policy(concurrent="reject")
    )
    room = Policy(max_result_bytes=2 * chosen.max_response + envelope)
    rules = resolved(chosen.scope, room, chosen.policy, patience)
    # By type, not by kind: a subclass of ours may encrypt as well.
    if type(rules.codec) in _WRAPPING:
        return changed(rules, codec=codec)
    return rules

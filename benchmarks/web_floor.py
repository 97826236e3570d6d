"""The floor of a middleware on Redis: the two commands of a request, and nothing else.

No rules, no body, no fingerprint, no task of its own, no answer that is kept: what is left of the
bare rate behind it is what the two round trips leave.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from benchmarks.contenders.commands import Command, redis_commands
from benchmarks.contenders.redis_floors import Line, _address, _load

ANSWER: Final = b"x" * 103
"""As long as that of the applications."""
HEADERS: Final = (
    (b"content-type", b"application/json"),
    (b"content-length", b"%d" % len(ANSWER)),
    (b"idempotent-replayed", b"true"),
)
KEY: Final = "k"


class TwoCommands:
    """A claim before the application, a complete before its answer."""

    def __init__(self, app: Any, redis: str) -> None:
        self._app = app
        self._redis = redis
        self._line: Line | None = None
        ((self._claim, self._complete),) = redis_commands([KEY], ANSWER.decode(), "floor:")
        self._place = next(
            place
            for place, part in enumerate(self._claim)
            if isinstance(part, bytes) and part.endswith(f":{KEY}".encode())
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._open()
            await self._app(scope, receive, send)
            return
        assert self._line is not None
        line = self._line
        key = next(value for name, value in scope["headers"] if name == b"idempotency-key")
        (word, *_) = await line.send(self._about(key, self._claim))
        if word == b"finished":
            await send({"type": "http.response.start", "status": 201, "headers": [*HEADERS]})
            await send({"type": "http.response.body", "body": ANSWER})
            return
        held: list[Any] = []

        async def saving(message: Any) -> None:
            held.append(message)
            if message["type"] == "http.response.body":
                assert await line.send(self._about(key, self._complete)) == 1
                for each in held:
                    await send(each)

        await self._app(scope, receive, saving)

    async def _open(self) -> None:
        _load(self._redis)
        loop = asyncio.get_running_loop()
        _, self._line = await loop.create_connection(Line, *_address(self._redis))

    def _about(self, key: bytes, command: Command) -> Command:
        place = self._place
        record = command[place]
        assert isinstance(record, bytes)
        return (*command[:place], record + key, *command[place + 1 :])

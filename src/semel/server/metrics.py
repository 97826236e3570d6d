"""What the service counts, as Prometheus reads it.

| name | type | labels |
|---|---|---|
| `semel_service_requests_total` | counter | `verb`, `code` |
| `semel_service_seconds` | histogram | `verb` |
| `semel_service_waiting` | gauge | |
| `semel_service_max_waiting` | gauge | |

No label has anything that a client sent.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from itertools import accumulate
from time import monotonic
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from semel.server.problems import Problem
from semel.server.service import Gone, Service

Endpoint = Callable[[Request], Awaitable[Response]]

BUCKETS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
)
"""Seconds."""

OK: Final = "ok"
LEFT: Final = "client_left"
INTERNAL: Final = "idempotency_error"


class Metrics:
    """Counts the requests of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._requests: Counter[tuple[str, str]] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def counted(self, verb: str, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint, with its requests counted."""

        async def answer(request: Request) -> Response:
            began = monotonic()
            code = INTERNAL
            try:
                response = await endpoint(request)
                code = OK
            except Problem as problem:
                code = problem.code
                raise
            except (ClientDisconnect, Gone):
                code = LEFT
                raise
            except asyncio.CancelledError:
                # The end of `--grace`. What the store was sent may be done: the client asks again.
                ended = Problem("store_error", "The service has stopped.", close=True)
                code = ended.code
                raise ended from None
            finally:
                spent = monotonic() - began
                self._requests[verb, code] += 1
                self._buckets[verb][bisect_left(BUCKETS, spent)] += 1
                self._seconds[verb] += spent
            return response

        return answer

    def text(self) -> str:
        """Write them in the text format of Prometheus."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield "# HELP semel_service_requests_total Requests, by what became of them."
        yield "# TYPE semel_service_requests_total counter"
        for (verb, code), count in sorted(self._requests.items()):
            yield f'semel_service_requests_total{{verb="{verb}",code="{code}"}} {count}'
        yield "# HELP semel_service_seconds How long requests took, waiting included."
        yield "# TYPE semel_service_seconds histogram"
        for verb, buckets in sorted(self._buckets.items()):
            for most, count in zip((*BUCKETS, "+Inf"), accumulate(buckets), strict=True):
                yield f'semel_service_seconds_bucket{{verb="{verb}",le="{most}"}} {count}'
            yield f'semel_service_seconds_sum{{verb="{verb}"}} {self._seconds[verb]}'
            yield f'semel_service_seconds_count{{verb="{verb}"}} {sum(buckets)}'
        yield "# HELP semel_service_waiting Starts that wait for another attempt now."
        yield "# TYPE semel_service_waiting gauge"
        yield f"semel_service_waiting {self._service.waiting.count}"
        yield "# HELP semel_service_max_waiting How many starts may wait at a time."
        yield "# TYPE semel_service_max_waiting gauge"
        yield f"semel_service_max_waiting {self._service.waiting.most}"

"""requests: an adapter that gives every call a key, and repeats it under that key.

    session.mount("https://", IdempotentAdapter())

What is repeated, and how often, is said in `semel.http.client`. A body is sent again only if it
can be: bytes, text, or a file that can be rewound. Any other stream is sent once, with its key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Unpack

from semel.core.attempts import current_attempt
from semel.core.optional import Needed
from semel.http.client import ClientOptions, ClientRules, Sending, Target, chosen

with Needed("semel[requests]", by=__name__):
    import requests
    from requests.adapters import DEFAULT_POOLBLOCK, DEFAULT_POOLSIZE, DEFAULT_RETRIES, HTTPAdapter
    from requests.exceptions import ChunkedEncodingError, UnrewindableBodyError
    from requests.utils import rewind_body
    from urllib3.util import Retry

_RETRIED: Final = (requests.ConnectionError, requests.Timeout, ChunkedEncodingError)

_CALL: Final = "semel.call"
"""Under this name, which is no event, the hooks of a request tie it to others.

A redirect or an authentication makes a copy of a request, and the hooks are all that the two share.
"""


class IdempotentAdapter(HTTPAdapter):
    """Sends requests with a key, and repeats them until a response.

    `pool_connections`, `pool_maxsize`, `pool_block`, and `max_retries` are those of `HTTPAdapter`.
    `sleep` waits between two tries.

    Examples:
        >>> session = requests.Session()
        >>> session.mount("https://", IdempotentAdapter(retries=5))
    """

    __attrs__ = [*HTTPAdapter.__attrs__, "_rules", "_sleep"]  # noqa: RUF012 - what is pickled, as there

    def __init__(
        self,
        *,
        pool_connections: int = DEFAULT_POOLSIZE,
        pool_maxsize: int = DEFAULT_POOLSIZE,
        max_retries: Retry | int = DEFAULT_RETRIES,
        pool_block: bool = DEFAULT_POOLBLOCK,
        sleep: Callable[[float], None] = time.sleep,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._rules = chosen(options)
        self._sleep = sleep
        super().__init__(pool_connections, pool_maxsize, max_retries, pool_block)

    def send(  # noqa: PLR0917 - the signature of HTTPAdapter.send
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """Send a request, and repeat it as the options allow."""
        sending = _begun(self._rules, request)
        send = partial(super().send, request, stream, timeout, verify, cert, proxies)
        if sending is None:
            return send()
        while True:
            try:
                response = send()
                if not stream:
                    # Read here: a connection cut within the answer is an error that is retried.
                    _ = response.content
            except _RETRIED as error:
                pause = sending.after_error(error, time.monotonic())
                if pause is None:
                    error.request = request  # requests leaves it out of some errors
                    raise
            else:
                if response.is_redirect or response.status_code == requests.codes.unauthorized:
                    # After 401 an authentication sends a copy, but redirects are made of this one.
                    sending.redirected(request.headers)
                asked = response.headers.get("retry-after")
                pause = sending.after_answer(
                    response.status_code, asked, time.monotonic(), time.time()
                )
                if pause is None:
                    return response
                response.close()
            self._sleep(pause)
            _rewind(request)


def _begun(rules: ClientRules, request: requests.PreparedRequest) -> Sending | None:
    """Put the key of its call on the request, if it goes out with one, and say how it is sent."""
    hooks: dict[str, Any] = request.hooks
    sending = rules.sending(
        Target.of(str(request.method), str(request.url)),
        known=hooks.get(_CALL),
        headers=request.headers,
        attempt=current_attempt(),
        repeatable=_is_rewindable(request),
        now=time.monotonic(),
    )
    if sending is not None:
        hooks[_CALL] = sending.call
    return sending


def _is_rewindable(request: requests.PreparedRequest) -> bool:
    try:
        _rewind(request)
    except UnrewindableBodyError:
        return False
    return True


def _rewind(request: requests.PreparedRequest) -> None:
    """Make a body ready to be sent; one that is all there always is."""
    if request.body is not None and not isinstance(request.body, str | bytes):
        rewind_body(request)

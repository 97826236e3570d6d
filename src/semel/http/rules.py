"""The rules of a route: what to ask of a request, how to answer it, and which route has which.

This module decides. It never waits, reads no socket and touches no store: an integration does that,
and asks here what it means. `RouteRules.identify` is a generator: each integration drives it in its
own way. `Routing` finds the rules of a request by its method and its path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from re import Pattern
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from semel.core.codec import Codec, JsonCodec, MsgpackCodec
from semel.core.fingerprint import fingerprint as payload_fingerprint
from semel.core.policy import Policy, Rules, changed
from semel.core.records import Identity
from semel.core.stored_answers import AnswerCodec, StoredAnswer, pack_answer, unpack_answer
from semel.errors import (
    ConfigError,
    IdempotencyError,
    InvalidKey,
    ResultUnavailable,
    SerializationError,
    about,
)
from semel.events import logger
from semel.http.options import (
    CHANGING,
    Choices,
    IntegrationOptions,
    PathPattern,
    Route,
    chosen,
    known_options,
    path_matcher,
)
from semel.http.problems import log_failure, problem, problem_of
from semel.http.requests import (
    CONTENT_TYPES,
    MISSING,
    BodyFormat,
    HeaderLine,
    Request,
    check_form,
    digest,
    document_of,
    field_of,
    fingerprint,
    is_of_format,
    key_by_function,
    key_in_field,
    key_in_header,
    key_in_query,
    method_and_path,
    stored_key,
)
from semel.http.storing import (
    REDIRECTS,
    SEE_OTHER,
    Answer,
    Decision,
    kept_lines,
    location_of,
    replay,
)

_WRAPPING: Final = (JsonCodec, MsgpackCodec)
"""Codecs that would only wrap bytes; any other is the application's own, and may encrypt."""

_ENVELOPE: Final = 1024 * 1024
"""Bytes for the header lines of a stored answer; the body has a limit of its own."""

_SHOWN: Final = 200
"""Characters of a path that are logged; a client may send one of any length."""
_LOGGED_ROUTES: Final = 50
"""Routes whose redirects are logged; where only paths are known, there may be endlessly many."""

_ANSWER_CODEC: Final = AnswerCodec()
_encode = msgspec.json.Encoder(order="sorted").encode

Matcher: TypeAlias = Callable[[str], object]

WATCHED: Final = 100
"""After this many requests, each pattern of `include` that has matched none of them is logged."""
_REMEMBERED: Final = 1024
"""How many paths have their rules remembered; an application may have endlessly many."""
_LONGEST: Final = 256
"""The longest path that is remembered, in characters; a client may send one of any length."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")

_LAYERS: Final = 16
"""How many leading parts of a root may be layers; a proxy may let a client write the root."""


BODY: Final = object()
"""What `identify` yields when it needs the whole body."""

Waiting: TypeAlias = Generator[Any, Any, "Operation | None"]
"""Yields `BODY`, or what a function of the application gave, which may have to be awaited."""


class Operation(msgspec.Struct, frozen=True, gc=False):
    """A request that is protected: which operation it is, and the digest of what it says."""

    identity: Identity
    fingerprint: bytes


class Rejected(Exception):
    """The request is answered by the rules alone; `code` says which problem it is."""

    def __init__(self, code: str, detail: str | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail
        """What the client is told in place of the problem's own detail."""


class RouteRules:
    """The rules of one route."""

    def __init__(
        self,
        choices: Choices,
        resolved: Callable[..., Rules],
        key_pattern: Pattern[str] | None = None,
    ) -> None:
        self.choices = choices
        self.policy = rules_of(choices, resolved, envelope=_ENVELOPE, codec=_ANSWER_CODEC)
        self.max_body, self.max_response = choices.max_body, choices.max_response
        self._pattern = key_pattern
        self._sources = sources_of(choices)
        self._unprotected = CHANGING - choices.methods
        self._logged_unprotected: set[tuple[str, str]] = set()
        self._redirecting: dict[str, object] = {}
        # In lower case, as ASGI has names: layers around us would not find it otherwise.
        self._marker = choices.replayed_header.lower().encode()
        self._forbidden = choices.never_stored | {self._marker}

    # --- before the handler ----------------------------------------------------------------

    def concerns(self, method: str, endpoint: str) -> bool:
        """Return, for a decorator, whether requests of a method are protected.

        Changes that are made by another method are logged as unprotected, once for each endpoint.
        """
        method = method.upper()
        if method in self.choices.methods:
            return True
        if method in self._unprotected and (endpoint, method) not in self._logged_unprotected:
            self._logged_unprotected.add((endpoint, method))
            logger.warning(
                "%s handles %s without protection: methods= does not list it; "
                "@idempotent(methods=%s) protects it",
                endpoint,
                method,
                sorted({*self.choices.methods, method}),
            )
        return False

    def may_have_key(self, request: Request) -> bool:
        """Return, without the body, whether a request may have a key; one that is wrong counts."""
        for needs_body, find in self._sources:
            try:
                if needs_body or find(request, None) is not None:
                    return True
            except InvalidKey:
                return True
        return False

    def identify(self, request: Request) -> Waiting:
        """Find the key, whose it is and the fingerprint; None = the request is not protected."""
        body, key = None, None
        for needs_body, find in self._sources:
            if needs_body and body is None:
                body = yield BODY
            key = find(request, body)
            if key is not None:
                break
        if key is None:
            if self.choices.required:
                raise Rejected("key_missing")
            return None
        chosen, tenant = self.choices, None
        if self._pattern is not None:
            check_form(key, self._pattern)
        if chosen.tenant is not None:
            tenant = known_tenant((yield chosen.tenant(request)))
        if body is None:
            body = yield BODY
        route = f"{request.method} {request.path}" if chosen.separate_routes else None
        identity = Identity(chosen.scope, stored_key(key, tenant, route))
        return Operation(identity, self.fingerprint(request, body))

    def fingerprint(self, request: Request, body: bytes) -> bytes:
        """Digest what the application compares: the whole request, or method, path and its choice.

        A body without fields, though its content type says otherwise, is compared as a whole: else
        all such bodies would be the same.
        """
        payload, secret = self.choices.payload, self.choices.secret
        if callable(payload):
            said = [payload_fingerprint(payload(request, body))]
        elif (
            payload is None
            or (document := _document(self.choices.format, request, body)) is MISSING
        ):
            return fingerprint(request, body, secret)
        else:
            values = (field_of(document, path) for path in payload)
            said = [b"" if value is MISSING else _encode(value) for value in values]
        return digest((*method_and_path(request), *said), secret)

    # --- answers -----------------------------------------------------------------------------

    def rejection(self, error: IdempotencyError | Rejected) -> Answer:
        """Answer with a problem; one that is our own or the application's mistake is logged."""
        if isinstance(error, Rejected):
            code, detail, key_digest = error.code, error.detail, None
        else:
            (code, detail), key_digest = problem_of(error), error.key_digest
        chosen = self.choices
        answer = problem(
            code,
            chosen.problems,
            detail=detail,
            retry_after=chosen.retry_after,
            key_digest=key_digest,
        )
        if answer.status >= 500:  # noqa: PLR2004 - the server's errors
            log_failure("a request with a key was not processed", error)
        return answer

    def replay(self, value: object, identity: Identity) -> Answer:
        """Make the answer that a duplicate gets, from what is stored for its operation."""
        try:
            stored = unpack_answer(value)
        except SerializationError as error:
            raise about(ResultUnavailable(str(error)), identity) from error
        # Once more, as other programs can write to a store: no cookie and no line end is sent.
        lines = kept_lines(stored.headers, self._forbidden)
        if stored.body is None:
            return problem(
                "result_omitted",
                self.choices.problems,
                status=stored.status,
                # Also without its body, an answer says where the result is: a redirect has to.
                lines=(*location_of(lines), (self._marker, b"true")),
                key_digest=identity.key_digest,
            )
        return replay(Answer(stored.status, lines, stored.body), self._marker)

    # --- after the handler -------------------------------------------------------------------

    def decide(self, status: int, lines: Iterable[HeaderLine] = ()) -> Decision:
        """Say what becomes of the key after an answer with this status and these header lines."""
        kept = self.choices.stored.decide(status, lines)
        if kept == "unknown" and not self.policy.hold:
            logger.warning(
                'an outcome is "unknown" only under Policy(abandoned="hold"): '
                "the next request with this key runs again"
            )
        return kept

    def log_redirect(self, status: int, raw: object, *, rolled_back: bool = False) -> None:
        """Log, once for each route, that a request with a key was answered by an unstored redirect.

        `raw` is the framework's own request. `rolled_back`: what the view wrote is gone, too. A
        function that takes the headers has seen where the redirect leads, and has decided.
        """
        if status not in REDIRECTS or self.choices.stored.sees_headers:
            return
        if len(self._redirecting) >= _LOGGED_ROUTES:
            return
        route, mine = _route_of(raw)[:_SHOWN], object()
        if self._redirecting.setdefault(route, mine) is not mine:
            return  # logged before, perhaps by another thread at this moment
        logger.warning(
            "%r redirected a request that has a key (%d). Redirects are not stored: "
            "%s a retry with the same key runs again. If this redirect means that the operation is "
            "done, %s, or pass a function that looks where the redirect leads: "
            "stored=lambda status, headers: ...",
            route,
            status,
            "what it wrote was rolled back, and" if rolled_back else "the key is free, and",
            "name it: stored=[303]" if status == SEE_OTHER else "answer with 303 and stored=[303]",
        )

    def stored(self, status: int, lines: Iterable[HeaderLine], body: bytes | None) -> bytes:
        """Return what is stored of an answer; a body of None was too large."""
        return pack_answer(StoredAnswer(status, kept_lines(lines, self._forbidden), body))

    def first(self, lines: Iterable[HeaderLine]) -> list[HeaderLine]:
        """Return the header lines of a first answer: all of them, but no false mark of a replay."""
        marker = self._marker
        return [line for line in lines if line[0].lower() != marker]


def sources_of(choices: Choices) -> tuple[tuple[bool, Callable[[Request, Any], str | None]], ...]:
    """Return the sources of a key: whether each reads the body, and how it finds the key."""
    header, query, field, function = choices.header, choices.query, choices.field, choices.key
    sources: dict[str, tuple[bool, Callable[[Request, Any], str | None]]] = {}
    if header is not None:
        sources["header"] = False, partial(key_in_header, header.lower().encode(), choices.strict)
    if query is not None:
        sources["query"] = False, partial(key_in_query, query)
    if field is not None:
        sources["field"] = True, partial(_key_in_field, choices.format, field)
    if function is not None:
        sources["function"] = True, partial(key_by_function, function)
    return tuple(sources[name] for name in choices.order if name in sources)


def _key_in_field(body_format: BodyFormat, path: str, request: Request, body: bytes) -> str:
    return key_in_field(path, _document(body_format, request, body))


def _document(body_format: BodyFormat, request: Request, body: bytes) -> object:
    """Read what fields are looked for in: one format alone, whatever the client says that it sends.

    Else the client would choose in which of two readings of its body the application's field is.
    """
    if not is_of_format(request, body_format):
        needed = CONTENT_TYPES[body_format]
        raise Rejected("unsupported_media_type", f"The body must have the content type {needed}.")
    return document_of(body, body_format)


def known_tenant(tenant: object) -> str:
    """Return what a `tenant` function says; a caller that it does not know is rejected."""
    if tenant is None or tenant == "":
        raise Rejected("identity_missing")
    if not isinstance(tenant, str):
        raise ConfigError(f"tenant must return a string or None, not {type(tenant).__name__}")
    return tenant


def _route_of(raw: Any) -> str:
    """Name the route of a request: as it was declared, where the framework tells, or its path."""
    if isinstance(raw, Mapping):  # an ASGI scope, a request of Starlette's, a WSGI environ
        declared = (
            getattr(raw.get("route"), "path", None)
            or raw.get("path_template")  # of Litestar
            or getattr(raw.get("endpoint"), "__qualname__", None)  # of a Starlette without "route"
        )
        path = raw.get("path", raw.get("PATH_INFO", "/"))
    else:  # a request of Flask's, of Django's or of REST framework's
        declared = getattr(getattr(raw, "url_rule", None), "rule", None) or getattr(
            getattr(raw, "resolver_match", None), "route", None
        )
        path = getattr(raw, "path", "/")
    return str(declared or path)


class TenantCheck:
    """Warns, once for each integration, where all clients share their keys."""

    def __init__(self) -> None:
        self._warned = False

    def check(self, chosen: Chosen) -> None:
        """Look at the options of a request that has a key."""
        if chosen.tenant_is_unset and not self._warned:
            self._warned = True
            logger.warning(
                "tenant= is not set, so all clients share their keys: a client that sends the key "
                "of another gets its response. Set tenant= to a function that says whose request "
                "it is, or to None if keys are meant to be shared"
            )


class Chosen(Protocol):
    """What the options of HTTP's integrations and of gRPC's have in common."""

    scope: str
    tenant_is_unset: bool
    policy: Policy | None
    wait: float
    max_response: int


def rules_of(
    chosen: Chosen, resolved: Callable[..., Rules], *, envelope: int, codec: Codec
) -> Rules:
    """Combine a policy with the engine's, in the engine's own way (`resolved`).

    `envelope` is the bytes that a stored answer needs beside its body, `codec` stores packed bytes.
    """
    waiting = (
        Policy(concurrent="wait", wait_timeout=chosen.wait)
        if chosen.wait
        else Policy(concurrent="reject")
    )
    limit = Policy(max_result_bytes=2 * chosen.max_response + envelope)
    rules = resolved(chosen.scope, limit, chosen.policy, waiting)
    # By type, not by kind: a subclass of ours may encrypt as well.
    if type(rules.codec) in _WRAPPING:
        return changed(rules, codec=codec)
    return rules


# --- which rules hold for a request ------------------------------------------------------------


class Routing:
    """Finds the rules of a request."""

    def __init__(
        self,
        *,
        include: Sequence[PathPattern] | None = None,
        exclude: Sequence[PathPattern] = (),
        routes: Sequence[Route] = (),
        resolved: Callable[..., Rules],
        key_pattern: Pattern[str] | None = None,
        **options: Any,
    ) -> None:
        known_options(
            options, (*IntegrationOptions.__annotations__, "include", "exclude", "routes")
        )
        self._unmatched: dict[str, Matcher] = {}
        """Patterns of `include` that matched nothing so far, while the first requests are watched.

        Only those: what they name is unprotected if they are wrong. A path that is excluded, or has
        options of its own, may just be rare.
        """
        self._watched = count(1)
        self._include = None if include is None else _matchers("include", include)
        if self._include is not None:
            self._unmatched = dict(zip(map(_written, include or ()), self._include, strict=True))
        self._exclude = _matchers("exclude", exclude)
        for route in routes:
            if not isinstance(route, Route):
                raise ConfigError(f"routes must be Route objects, not {type(route).__name__}")
        self._of_routes: list[tuple[Matcher, RouteRules]] = [
            (matcher, RouteRules(chosen({**options, **route.options}), resolved, key_pattern))
            for route, matcher in zip(
                routes, _matchers("routes", [route.pattern for route in routes]), strict=True
            )
        ]
        self._default = RouteRules(chosen(options), resolved, key_pattern)
        self._invalid: RouteRules | None = None
        """The rules of paths that are rejected; None = all paths are treated alike."""
        if self._include is not None or self._exclude or self._of_routes:
            self._invalid = _InvalidPath(chosen(options), resolved, key_pattern)
        all_rules = [self._default, *(rules for _, rules in self._of_routes)]
        self._methods = frozenset(method for rules in all_rules for method in rules.choices.methods)
        self._known: dict[tuple[str, str, str], RouteRules | None] = {}

    def find(self, method: str, path: str, root: str = "") -> RouteRules | None:
        """Return the rules for a request; None = it is not protected.

        A method counts in any case: `post` is a POST to Flask and to Django. `root` is where the
        application is mounted (`root_path`, `SCRIPT_NAME`); `path` may have it or not.
        """
        try:
            return self._known[method, path, root]
        except KeyError:
            paths = _views(root.rstrip("/"), path)
            rules = self._find(method.upper(), paths, root)
        if self._unmatched and method.upper() in self._methods:
            self._watch(paths)  # each of the first requests: none is remembered yet
        elif len(self._known) < _REMEMBERED and len(method) + len(path) + len(root) <= _LONGEST:
            self._known[method, path, root] = rules
        return rules

    def _find(self, method: str, paths: tuple[str, ...], root: str) -> RouteRules | None:
        if self._invalid is not None and _CONTROL.search(paths[0]) is not None:
            return self._invalid if method in self._methods else None
        spelled = _spellings(root, paths)
        if self._include is not None and not _any(self._include, spelled):
            return None
        if _any(self._exclude, paths):  # as it is: another spelling of it is protected
            return None
        rules = next(
            (
                rules
                for spellings in (paths, spelled)
                for matcher, rules in self._of_routes
                if _any([matcher], spellings)
            ),
            self._default,
        )
        return rules if method in rules.choices.methods else None

    def _watch(self, paths: tuple[str, ...]) -> None:
        """Warn, once, of patterns that match nothing: what they name may be unprotected."""
        for name, matcher in [*self._unmatched.items()]:
            if _any([matcher], paths):
                self._unmatched.pop(name, None)
        if next(self._watched) == WATCHED:
            unmatched, self._unmatched = self._unmatched, {}
            for name in unmatched:
                logger.warning(
                    "include: the pattern %r matched none of the first %d requests with a method "
                    "that is protected; a pattern is compared with the whole path, and with the "
                    "path below each mount (root_path, SCRIPT_NAME)",
                    name,
                    WATCHED,
                )


class _InvalidPath(RouteRules):
    """Rejects a path with control characters, as patterns and routers read it differently.

    `/pay` and a new line is `/pay` to a router whose own patterns end with `$`.
    """

    def may_have_key(self, request: Request) -> bool:  # noqa: ARG002
        """Return True: every such request is rejected."""
        return True

    def identify(self, request: Request) -> Waiting:  # noqa: ARG002
        """Reject the request."""
        raise Rejected("invalid_path")


def _matchers(option: str, patterns: Sequence[PathPattern]) -> list[Matcher]:
    if isinstance(patterns, str):
        raise ConfigError(f"{option} must be a sequence of patterns, not the text {patterns!r}")
    return [path_matcher(pattern) for pattern in patterns]


def _written(pattern: PathPattern) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _views(root: str, path: str) -> tuple[str, ...]:
    """Return the path as each layer sees it, from the client to the mounted application.

    A server and the mounts inside it add up to one root; which of them added what is not known. So
    each part of it may be the outer one: behind `/v1/m` those are `/v1/m/pay`, `/m/pay` and `/pay`.
    Servers and frameworks disagree, too, whether `path` has the root (ASGI wants it there), or only
    the part that a mount added.
    """
    names = [name for name in root.split("/") if name]
    if not names:
        return (path,)
    roots = ["".join(f"/{name}" for name in names[first:]) for first in range(len(names))[:_LAYERS]]
    found = next((each for each in (root, *roots) if f"{path}/".startswith(f"{each}/")), "")
    rest = path[len(found) :]
    rests = (rest,) if found in {root, roots[0]} else (path, rest)
    views = (f"{each}{below}" or "/" for below in rests for each in (*roots, ""))
    return tuple(dict.fromkeys((path, *views)))


def _spellings(root: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Add what routers make of a path, so that another spelling of it is protected as well.

    Flask and Litestar merge slashes at its beginning, Litestar everywhere and at its end, Flask
    there on request. For Litestar and for gunicorn the path begins wherever the root ends.
    """
    below = paths[0].split(root, 1)[-1:] if root else []
    plain = ["/" + "/".join(filter(None, path.split("/"))) for path in (*paths, *below)]
    return (*paths, *plain, *(f"{path}/" for path in plain))


def _any(matchers: Sequence[Matcher], paths: tuple[str, ...]) -> bool:
    return any(matches(path) for matches in matchers for path in paths)

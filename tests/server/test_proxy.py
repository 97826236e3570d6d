"""`semel proxy` in front of a Node server: what it forwards, what it refuses, and what it says of failures.

The rules of the web themselves are proved in tests/web, where the proxy is one of the stacks.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import resource
import socket
import uuid
from collections.abc import Callable, Iterator

import pytest

from semel import Idempotency
from semel.cli import main
from server.node import Node
from server.proxies import OK, Proxy, Scripted, free_port, until
from web.client import HOST, PATIENCE, Answer, chunked, head
from web.handlers import Folder
from web.workers import eventually

BODY = b'{"amount": 42}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Folder:
    return Folder(tmp_path_factory.mktemp("proxy"))


@pytest.fixture(scope="module")
def node(folder: Folder) -> Iterator[Node]:
    with contextlib.closing(Node(folder.root)) as running:
        yield running


@pytest.fixture(scope="module")
def shared(node: Node, folder: Folder) -> Iterator[Callable[..., Proxy]]:
    """Proxies in front of Node by their options, each started once, on a store that all share."""
    started: dict[tuple[str, ...], Proxy] = {}

    def proxy(*options: str) -> Proxy:
        if options not in started:
            started[options] = Proxy(folder.root, node.url, *options)
        return started[options]

    yield proxy
    for each in started.values():
        each.stop()


@pytest.fixture
def proxy(shared) -> Proxy:
    return shared()


@pytest.fixture
def holding(shared) -> Proxy:
    """Under a policy that holds what is unknown."""
    return shared("--policy", "payment")


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Proxy]]:
    """Starts proxies of the test's own, each on a new store: `start(url, "--required")`."""
    with contextlib.ExitStack() as opened:

        def begin(upstream: str, *options: str, env=None) -> Proxy:
            running = Proxy(tmp_path, upstream, *options, env=env)
            opened.callback(running.stop)
            return running

        yield begin


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """Starts upstreams that talk as the test says."""
    with contextlib.ExitStack() as opened:

        def begin(talk, port: int = 0) -> Scripted:
            running = Scripted(talk, port)
            opened.callback(running.close)
            return running

        yield begin


@pytest.fixture
def key() -> str:
    return f"key-{uuid.uuid4().hex}"


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex}"


def seen(answer: Answer) -> list[tuple[str, str]]:
    """The header lines that Node got, names in lower case."""
    names = [text.lower() for text in answer.json["headers"][::2]]
    return list(zip(names, answer.json["headers"][1::2], strict=True))


def values(answer: Answer, name: str) -> list[str]:
    return [value for each, value in seen(answer) if each == name]


# --- streams -------------------------------------------------------------------------------------


def test_without_a_key_a_request_streams_both_ways(proxy, run):
    lines = [("Host", "shop"), ("Transfer-Encoding", "chunked"), ("X-Run", run)]
    connection = proxy.connect().send(head("POST", "/upper", lines))
    for word in (b"one", b"two"):
        connection.send(b"3\r\n" + word + b"\r\n")
        connection.until(word.upper())  # while the request goes on
    connection.send(b"0\r\n\r\n").until(b"0\r\n\r\n")
    connection.close()


def test_with_a_key_the_body_is_read_first_and_the_answer_comes_whole(proxy, folder, key, run):
    lines = [("Host", "shop"), ("Content-Length", "6"), ("X-Run", run), ("Idempotency-Key", key)]
    connection = proxy.connect().send(head("POST", "/upper", [*lines, ("Connection", "close")]))
    connection.send(b"one")
    for _ in range(3):  # for each of these the proxy has long read what came before
        proxy.client.post("/pay")
    assert folder.runs(run) == 0
    answer = connection.send(b"two").answer()
    assert (answer.status, answer.body, folder.runs(run)) == (200, b"ONETWO", 1)


def test_a_body_of_a_known_length_passes_as_such_and_one_in_chunks_in_chunks(proxy, key):
    for told in ({}, {"key": key}):
        answer = proxy.client.post("/seen", body=BODY, **told)
        assert values(answer, "content-length") == [str(len(BODY))]
        assert values(answer, "transfer-encoding") == []
        answer = proxy.client.post(
            "/seen", chunks=[BODY, BODY], **{name: f"{value}-2" for name, value in told.items()}
        )
        assert values(answer, "content-length") == []
        assert values(answer, "transfer-encoding") == ["chunked"]
        assert answer.json["sum"] == hashlib.sha256(BODY + BODY).hexdigest()


def test_large_bodies_pass_a_slow_upstream_and_a_slow_client(proxy, start, scripted):
    size = 4 << 20
    release: list[object] = []

    def slow(talking):
        got = len(until(talking).partition(b"\r\n\r\n")[2])
        eventually(lambda: bool(release), "the test to let the upstream read")
        while got < size:
            got += len(talking.recv(1 << 16))
        talking.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        talking.sendall(b"y" * size)
        until(talking, b"never")

    client = start(scripted(slow).url).connect()
    client.send(head("PUT", "/", [("Host", "shop"), ("Content-Length", str(size))]))
    sent = 0
    client._socket.settimeout(1)
    with contextlib.suppress(TimeoutError):
        while sent < size:
            sent += client._socket.send(b"x" * min(1 << 16, size - sent))
    client._socket.settimeout(30)
    release.append(True)
    client.send(b"x" * (size - sent))
    proxy.client.ask("GET", "/pay")  # meanwhile nobody reads the answer
    assert len(client.until(b"y" * size).partition(b"\r\n\r\n")[2]) == size
    client.close()


def test_an_early_answer_comes_through_while_the_request_is_still_sent(proxy):
    lines = [("Host", "shop"), ("Content-Length", "1000000")]
    connection = proxy.connect().send(head("POST", "/early", lines) + b"x")
    assert b"too large" in connection.until(b"too large")
    connection.close()


def test_no_method_but_post_and_patch_is_touched_by_a_key(proxy, folder, key, run):
    for _ in range(2):
        answer = proxy.client.ask("GET", "/pay", key=key, run=run)
        assert (answer.status, answer.replayed) == (201, False)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", proxy.port)) as client:
        client.request("HEAD", "/large/1234", headers={"Idempotency-Key": key, "X-Run": run})
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        assert answer.getheader("Content-Length") == "1234"
        client.request("GET", "/status/304", headers={"X-Run": run})
        assert (client.getresponse().status, folder.runs(run)) == (304, 4)


# --- header lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True])
def test_header_lines_of_one_connection_do_not_pass(proxy, key, keyed):
    answer = proxy.client.post(
        "/seen",
        key=key if keyed else None,
        lines=[
            ("Connection", "X-Hop, keep-alive"),
            ("X-Hop", "1"),
            ("Keep-Alive", "timeout=5"),
            ("Proxy-Authorization", "Basic x"),
            ("Proxy-Connection", "keep-alive"),
            ("TE", "trailers"),
            ("Trailer", "X-Sum"),
            ("Upgrade", "h2c"),
            ("X-End", "a"),
            ("X-End", "b"),
        ],
    )
    names = {name for name, _ in seen(answer)}
    hop = {"x-hop", "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer"}
    assert names.isdisjoint(hop | {"upgrade"})
    assert values(answer, "x-end") == ["a", "b"]
    assert ("idempotency-key" in names) == keyed


def test_header_lines_of_the_upstreams_connection_do_not_come_back(proxy, key):
    for told in ({}, {"key": key}, {"key": key}):
        answer = proxy.client.post("/hop", **told)
        assert answer.status == 201
        assert answer.all("x-hop") == answer.all("keep-alive") == []
        assert answer.all("connection") == ["close"]  # our client asks for it
        assert len(answer.all("date")) == 1
        assert answer.all("server") == []


def test_expect_is_answered_here_and_not_passed_on(proxy, folder):
    lines = [("Host", "shop"), ("Content-Length", "2"), ("Expect", "100-continue")]
    connection = proxy.connect().send(head("POST", "/seen", [*lines, ("Connection", "close")]))
    connection.until(b"100 Continue")
    answer = connection.send(b"{}").answer()
    assert answer.status == 200
    assert values(answer, "expect") == []
    assert folder.runs("expected") == 0


def test_what_says_who_the_client_is_is_overwritten(proxy):
    answer = proxy.client.post(
        "/seen",
        lines=[
            ("X-Forwarded-For", "1.2.3.4"),
            ("X-Forwarded-Proto", "https"),
            ("X-Forwarded-Port", "443"),
            ("X_Forwarded_Host", "evil"),
            ("X-Forwarded-User", "root"),
            ("Forwarded", "for=1.2.3.4"),
        ],
    )
    told = [(name, value) for name, value in seen(answer) if "forwarded" in name]
    assert told == [
        ("x-forwarded-for", "127.0.0.1"),
        ("x-forwarded-host", "shop.example"),
        ("x-forwarded-proto", "http"),
    ]
    assert values(answer, "host") == ["shop.example"]


def test_a_client_of_http_1_0_without_a_host_gets_an_answer(proxy, node):
    answer = proxy.connect().send(b"GET /seen HTTP/1.0\r\n\r\n").answer()
    assert values(answer, "host") == [f"127.0.0.1:{node.port}"]
    assert values(answer, "content-length") == values(answer, "transfer-encoding") == []


def test_the_target_passes_as_it_was_written(proxy):
    target = "//seen/..%2f/%70?a=%2f&b"
    assert proxy.client.ask("GET", f"/seen{target}").json["target"] == f"/seen{target}"


def test_paths_that_the_upstream_can_tell_apart_are_different_requests(proxy, key):
    assert proxy.client.post("/seen/a%2Fb", key=key).status == 200
    assert proxy.client.post("/seen/a%2Fb", key=key).replayed
    for other in ("/seen/a/b", "/seen/a%2fb", "/seen/a%FFb"):
        assert proxy.client.post(other, key=key).code == "payload_mismatch"


def test_redirects_are_not_followed(proxy, folder, key, run):
    for told in ({}, {"key": key}):
        answer = proxy.client.post("/redirect/302", run=run, **told)
        assert (answer.status, answer.header("location")) == (302, "/pay")
    assert folder.runs(run) == 2


def test_bodies_are_not_decompressed(proxy, key):
    for replayed in (False, True):
        answer = proxy.client.post("/packed", key=key, lines=[("Accept-Encoding", "gzip")])
        assert answer.replayed == replayed
        assert answer.header("content-encoding") == "gzip"
        assert gzip.decompress(answer.body).startswith(b"packed packed")


# --- what is refused -----------------------------------------------------------------------------


REFUSED = {
    "GET @evil/": "invalid_target",
    "GET http://evil/pay": "invalid_target",
    "POST /pay#fragment": "invalid_target",
    "GET evil": "invalid_target",
    "OPTIONS *": "invalid_target",
    "CONNECT evil:443": "not_implemented",
    "connect evil:443": "not_implemented",
    "TRACE /pay": "not_implemented",
}


@pytest.mark.parametrize("target", REFUSED)
def test_a_target_that_is_no_path_is_refused(proxy, folder, run, target):
    lines = f"{target} HTTP/1.1\r\nHost: shop\r\nX-Run: {run}\r\n\r\n"
    answer = proxy.connect().send(lines.encode()).answer()  # to the end: the connection is closed
    assert answer.code == REFUSED[target]
    assert answer.status == (400 if answer.code == "invalid_target" else 501)
    assert answer.header("cache-control") == "no-store"
    assert folder.runs(run) == 0


def test_websockets_are_refused(proxy, folder, run):
    lines = [("Connection", "Upgrade"), ("Upgrade", "WebSocket"), ("Sec-WebSocket-Version", "13")]
    answer = proxy.client.ask("GET", "/pay", run=run, lines=lines)
    assert (answer.status, answer.code, folder.runs(run)) == (501, "not_implemented", 0)


def test_an_upgrade_to_http_2_is_ignored_without_a_word(proxy):
    lines = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "A")]
    assert proxy.client.ask("GET", "/seen", lines=lines).status == 200
    assert "upgrade" not in proxy.log().lower()


def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(proxy, folder, run):
    lines = [("Host", "shop"), ("Content-Length", "5"), ("Transfer-Encoding", "chunked")]
    sent = head("POST", "/pay", [*lines, ("X-Run", run)]) + chunked([b"{}"])
    answer = proxy.connect().send(sent).answer()
    assert (answer.status, answer.code, folder.runs(run)) == (400, "body_incomplete", 0)


def test_chunks_of_http_1_0_are_refused(proxy, folder, run):
    lines = [("Host", "shop"), ("Transfer-Encoding", "chunked"), ("X-Run", run)]
    sent = head("POST", "/pay", lines).replace(b"HTTP/1.1", b"HTTP/1.0") + chunked([b"{}"])
    answer = proxy.connect().send(sent).answer()
    assert (answer.status, answer.code, folder.runs(run)) == (400, "body_incomplete", 0)


def test_framing_with_underscores_does_not_pass(proxy):
    lines = [("Content_Length", "99"), ("Transfer_Encoding", "chunked"), ("X_Other", "stays")]
    names = [name for name, _ in seen(proxy.client.post("/seen", lines=lines))]
    assert "x_other" in names
    assert not {"content_length", "transfer_encoding"} & {*names}


@pytest.mark.parametrize(
    "path",
    [
        "/private/../pay",
        "/private/..;/pay",
        "/private/%2e%2E/pay",
        "/a\\..\\pay",
        "/pay/.",
        "//pay",
        "/%2Fpay",
        "/\\pay",
    ],
)
def test_no_odd_parts_lead_past_the_patterns(shared, folder, run, path):
    for options in (("--include", "/pay", "--required"), ("--exclude", "/private/*", "--required")):
        client = shared(*options).client
        answer = client.post(path, run=run)
        assert (answer.status, answer.code, folder.runs(run)) == (400, "invalid_target", 0)
        assert b"invalid_target" not in client.ask("GET", path).body


def test_patterns_say_which_paths_need_a_key(shared, key):
    options = ("--include", "/pay", "--include", "/re*", "--exclude", "/redirect/*", "--required")
    client = shared(*options).client
    assert client.post("/pay").code == client.post("/refund").code == "key_missing"
    assert client.post("/login").status == 201
    assert client.post("/redirect/303").status == 303
    assert [client.post("/pay", key=key).replayed for _ in range(2)] == [False, True]


def test_a_body_beyond_the_limit_needs_no_key_to_pass(shared, key):
    client = shared("--max-body", "10").client
    assert client.post("/pay", body=BODY, key=key).code == "body_too_large"
    assert client.post("/pay", body=BODY).status == 201


# --- tenants -------------------------------------------------------------------------------------


@pytest.fixture
def of_tenants(shared) -> Proxy:
    return shared("--tenant-header", "X-Tenant")


def test_each_tenant_has_keys_of_its_own(of_tenants, key):
    ann, bob = (of_tenants.client.post("/pay", key=key, lines=[("X-Tenant", who)]) for who in "ab")
    assert (ann.status, bob.status) == (201, 201)
    assert ann.json["number"] != bob.json["number"]
    again = of_tenants.client.post("/seen", lines=[("X-Tenant", "a")])
    assert values(again, "x-tenant") == ["a"]
    assert of_tenants.client.post("/pay", key=key, lines=[("x-tenant", "a")]).body == ann.body


@pytest.mark.parametrize("lines", [[], [("X-Tenant", "")]])
def test_a_request_with_a_key_needs_a_tenant(of_tenants, folder, key, run, lines):
    answer = of_tenants.client.post("/pay", key=key, run=run, lines=lines)
    assert (answer.status, answer.code, folder.runs(run)) == (401, "identity_missing", 0)
    assert of_tenants.client.post("/pay", lines=lines).status == 201


@pytest.mark.parametrize(
    "names", [["X-Tenant", "X-Tenant"], ["X_Tenant"], ["X-Tenant", "x_tenant"]]
)
@pytest.mark.parametrize("keyed", [False, True])
def test_a_tenant_that_is_not_clear_is_refused(of_tenants, folder, run, names, keyed):
    answer = of_tenants.client.post(
        "/pay", key=run if keyed else None, run=run, lines=[(name, "ann") for name in names]
    )
    assert (answer.status, answer.code, folder.runs(run)) == (400, "invalid_tenant", 0)


@pytest.mark.parametrize("named", ["X-Tenant", "close, x-tenant "])
def test_connection_does_not_take_the_tenant_from_the_upstream(of_tenants, folder, key, run, named):
    lines = [("X-Tenant", "ann"), ("Connection", named)]
    for told in ({}, {"key": key}):
        answer = of_tenants.client.post("/pay", run=run, lines=lines, **told)
        assert (answer.status, answer.code, folder.runs(run)) == (400, "invalid_tenant", 0)


def test_without_a_tenant_header_the_log_warns(proxy, of_tenants):
    assert "all clients share their keys" in proxy.log()
    assert "share their keys" not in of_tenants.log()


# --- the upstream fails --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["http", "payment"])
def test_an_upstream_that_is_not_reached_has_run_nothing(start, scripted, policy, key):
    port = free_port()
    strict = {"SEMEL_FAILURE": "final", "SEMEL_MAX_ATTEMPTS": "1"}
    proxy = start(f"http://127.0.0.1:{port}", "--policy", policy, env=strict)
    for told in ({}, {"key": key}, {"key": key}):
        answer = proxy.client.post("/pay", body=BODY, **told)
        assert (answer.status, answer.code) == (502, "upstream_unreached")
        assert (answer.header("retry-after"), answer.header("cache-control")) == ("1", "no-store")

    def talk(talking):
        until(talking)
        talking.sendall(OK)

    scripted(talk, port)
    assert proxy.client.post("/pay", body=BODY, key=key).body == b"ok"
    assert f"127.0.0.1:{port}" in proxy.wait_for("nothing ran")


def test_an_upstream_without_tls_is_not_reached_by_https(start, node, key):
    client = start(node.url.replace("http:", "https:"), "--policy", "payment").client
    for _ in range(2):
        assert client.post("/pay", key=key).code == "upstream_unreached"


def test_an_upstream_is_reached_by_https(start, scripted, tmp_path, key):
    import ssl

    from servers.redis import Certificates

    files = Certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)

    def talk(talking):
        with context.wrap_socket(talking, server_side=True) as secured:
            until(secured)
            secured.sendall(OK)

    url = scripted(talk).url.replace("http:", "https:")
    trusting = start(url, env={"SSL_CERT_FILE": str(files.authority)})
    assert trusting.client.post("/pay", key=key).body == b"ok"
    assert start(url).client.post("/pay", key=f"{key}-2").code == "upstream_unreached"


def test_after_an_upstream_that_broke_off_the_key_is_free(proxy, folder, key, run):
    answer = proxy.client.post("/die_once", key=key, run=run)
    assert (answer.status, answer.code) == (502, "upstream_broken")
    assert answer.header("retry-after") is None
    answer = proxy.client.post("/die_once", key=key, run=run)
    assert (answer.status, folder.runs(run)) == (201, 2)


def test_under_hold_an_upstream_that_broke_off_is_unknown_until_resolved(
    holding, folder, key, run, capsys
):
    assert holding.client.post("/die_once", key=key, run=run).code == "upstream_broken"
    url = f"sqlite:///{folder.root / 'semel.db'}"
    for _ in range(2):
        answer = holding.client.post("/die_once", key=key, run=run)
        assert (answer.status, answer.code, folder.runs(run)) == (409, "outcome_unknown", 1)
    assert main(["resolve", "http", key, "--status", "201", "--body", "paid", "--url", url,
                 "--header", "Content-Type: text/plain"]) == 0  # fmt: skip
    answer = holding.client.post("/die_once", key=key, run=run)
    assert (answer.status, answer.body, answer.replayed, folder.runs(run)) == (
        201,
        b"paid",
        True,
        1,
    )


def test_an_answer_that_ends_too_soon_is_no_answer(proxy, holding, folder, key, run):
    for each, code in ((proxy, "upstream_broken"), (holding, "outcome_unknown")):
        mine = f"{key}-{code}"
        assert each.client.post("/die_late/5", key=mine).code == "upstream_broken"
        assert each.client.post("/die_late/5", key=mine, run=run).code == code
    assert folder.runs(run) == 1


def test_an_answer_that_has_begun_is_cut_off_with_its_upstream(proxy, holding, key):
    size = 2 << 20
    for each, told in ((proxy, {}), (proxy, {"key": key}), (holding, {"key": f"{key}-2"})):
        with pytest.raises(EOFError):
            each.client.post(f"/die_late/{size}", **told)
    assert holding.client.post(f"/die_late/{size}", key=f"{key}-2").code == "outcome_unknown"


def test_to_http_1_0_a_response_that_was_cut_off_is_reset(start, scripted):
    """Else it would look like one that ended with its connection."""

    def talk(talking):
        until(talking)
        talking.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")

    proxy = start(scripted(talk).url)
    with socket.create_connection((HOST, proxy.port), PATIENCE) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            until(client, b"never")
    proxy.wait_for("the response is cut off")


def test_an_answer_too_large_to_be_kept_passes_and_never_runs_again(proxy, folder, key, run):
    answer = proxy.client.post("/large_chunks/2000", key=key, run=run)
    assert len(answer.body) == 2000 * 1024
    again = proxy.client.post("/large_chunks/2000", key=key, run=run)
    assert (again.status, again.code, folder.runs(run)) == (200, "result_omitted", 1)


def test_under_hold_a_request_with_a_key_has_a_connection_of_its_own(holding, proxy, key):
    def ports(client, **told):
        return [client.post("/seen", **told).json["port"] for _ in range(2)]

    first, second = ports(holding.client)
    assert first == second
    with_keys = [holding.client.post("/seen", key=f"{key}-{n}").json["port"] for n in range(2)]
    assert len({first, *with_keys}) == 3
    one, other = (proxy.client.post("/seen", key=f"{key}-{n}").json["port"] for n in "ab")
    assert one == other


@pytest.mark.parametrize("rule", ['failure = "final"', "max_attempts = 1", 'failure = "unknown"'])
def test_a_connection_that_was_just_closed_costs_no_key(start, scripted, tmp_path, key, rule):
    ran: list[bytes] = []

    def talk(talking):
        """Answer once, without a word that the connection ends there."""
        ran.append(until(talking))
        talking.sendall(OK)
        until(talking)

    (tmp_path / "semel.toml").write_text(f"[scopes.http]\n{rule}\n")
    proxy = start(scripted(talk).url)
    assert proxy.client.ask("GET", "/").body == b"ok"
    assert proxy.client.post("/pay", key=key).body == b"ok"
    assert len(ran) == 2


ODD: dict[str, bytes] = {
    "nothing": b"",
    "no-HTTP": b"+PONG\r\n\r\n",
    "half-a-head": b"HTTP/1.1 200 OK\r\nX-Secret: s3cret",
    "a-status-beyond-599": b"HTTP/1.1 999 No\r\nContent-Length: 0\r\n\r\n",
    "another-protocol": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "an-endless-head": b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 70_000,
    "half-a-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
}
WHOLE: dict[str, tuple[bytes, bytes]] = {
    "hints-before-it": (b"HTTP/1.1 103 Early\r\nLink: </a>\r\n\r\n" + OK, b"ok"),
    "an-end-with-the-connection": (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
    "HTTP-1.0": (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
    "two-lengths": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunked([b"chunks", b" count"]),
        b"chunks count",
    ),
}
"""What an upstream may answer at the path of this name; of an answer that is whole also its body."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Iterator[Proxy]:
    """A proxy under hold, in front of an upstream that answers oddly and then ends."""
    answers = ODD | {name: answered for name, (answered, _) in WHOLE.items()}

    def talk(talking):
        path = until(talking).split(b" ")[1].decode()
        talking.sendall(answers[path[1:]])

    with contextlib.closing(Scripted(talk)) as upstream:
        running = Proxy(tmp_path_factory.mktemp("odd"), upstream.url, "--policy", "payment")
        yield running
        running.stop()


@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_is_none(odd, name, key):
    assert odd.client.post(f"/{name}", key=key).code == "upstream_broken"
    assert odd.client.post(f"/{name}", key=key).code == "outcome_unknown"
    assert "s3cret" not in odd.log()
    assert "PONG" not in odd.log()


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_of_any_form_is_read_to_its_end(odd, name, key):
    for told in ({}, {"key": key}, {"key": key}):
        answer = odd.client.post(f"/{name}", **told)
        assert (answer.status, answer.body, answer.rest) == (200, WHOLE[name][1], b"")


def test_an_answer_without_an_end_is_none_if_the_connection_breaks(start, scripted, key):
    def talk(talking):
        until(talking)
        talking.sendall(b"HTTP/1.1 200 OK\r\n\r\nto the")
        talking.setsockopt(1, 13, b"\x01\0\0\0\0\0\0\0")  # SOL_SOCKET, SO_LINGER: close by a reset

    proxy = start(scripted(talk).url, "--policy", "payment")
    assert proxy.client.post("/pay", key=key).code == "upstream_broken"
    assert proxy.client.post("/pay", key=key).code == "outcome_unknown"


# --- connections that are kept -------------------------------------------------------------------


def test_an_idle_connection_is_closed_soon(start, scripted):
    ended: list[bytes] = []

    def talk(talking):
        until(talking)
        talking.sendall(OK)
        ended.append(talking.recv(1))

    assert start(scripted(talk).url).client.ask("GET", "/").body == b"ok"
    eventually(lambda: ended == [b""], "the proxy to close it")


# --- clients that leave --------------------------------------------------------------------------


def test_without_a_key_the_upstream_learns_that_the_client_has_left(proxy, folder, run):
    connection = proxy.client.open("GET", f"/events/{run}", run=run)
    connection.until(b"data: 1")
    connection.leave()
    eventually(lambda: folder.runs(f"closed-{run}") == 1, "Node to see the end")


def test_a_client_that_leaves_in_the_middle_of_its_body_ends_the_request(proxy, folder, run):
    lines = [("Host", "shop"), ("Content-Length", "100"), ("X-Run", run)]
    connection = proxy.connect().send(head("POST", "/upper", lines) + b"abc")
    connection.until(b"ABC")
    connection.leave()
    eventually(lambda: folder.runs(f"aborted-{run}") == 1, "Node to see the end")


def test_with_a_key_a_request_runs_to_its_end_without_its_client(proxy, folder, key, run):
    connection = proxy.client.open("POST", f"/wait/{run}", key=key, run=run)
    eventually(lambda: folder.runs(run) == 1, "the request to run")
    connection.leave()
    assert proxy.client.post(f"/wait/{run}", key=key, run=run).code == "concurrent_request"
    folder.open_gate(run)
    eventually(
        lambda: proxy.client.post(f"/wait/{run}", key=key, run=run).replayed,
        "the answer to be saved",
    )
    assert folder.runs(run) == 1


def test_an_event_stream_with_a_key_passes_live_and_ends_with_its_client(proxy, folder, key, run):
    connection = proxy.client.open("POST", f"/events/{run}", key=key, run=run)
    assert b"idempotent-unprotected: stream" in connection.until(b"data: 1").lower()
    connection.leave()
    eventually(lambda: folder.runs(f"closed-{run}") == 1, "Node to see the end")


# --- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"POST /pay HTTP/1.1\r\nHost: shop\r\n"])
def test_connections_that_ask_nothing_leave_room_for_requests(start, node, folder, key, sent):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))  # a child inherits it
    try:
        proxy = start(node.url, "--tenant-header", "X-Tenant")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    lines = [("X-Tenant", "ann")]
    running = proxy.client.open("POST", f"/wait/{key}", key=key, lines=lines, run=key)
    eventually(lambda: folder.runs(key) == 1, "a request to run")
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.callback(proxy.connect().send(sent).leave)
        assert proxy.client.post("/pay", key=f"{key}-2", lines=lines).status == 201
    assert "out of system resource" not in proxy.log()
    folder.open_gate(key)
    assert running.answer().status == 201


# --- the process ---------------------------------------------------------------------------------


def test_sigterm_lets_requests_end(start, node, folder, key, run):
    proxy = start(node.url, "--tenant-header", "X-Tenant")
    lines = [("X-Tenant", "ann")]
    connections = [
        proxy.client.open("POST", f"/wait/{run}", key=given, lines=lines, run=run)
        for given in (key, None)
    ]
    eventually(lambda: folder.runs(run) == 2, "both to run")
    proxy.terminate()
    eventually(lambda: _is_closed(proxy), "the proxy to take no more")
    folder.open_gate(run)
    assert [connection.answer().status for connection in connections] == [201, 201]
    assert proxy.wait() == 0


def _is_closed(proxy: Proxy) -> bool:
    try:
        proxy.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_what_runs_longer_than_the_grace_is_broken_off(tmp_path, node, folder, key, run):
    proxy = Proxy(tmp_path, node.url, "--grace", "0.2s", "--policy", "payment")
    connections = [
        proxy.client.open("POST", f"/wait/{run}", key=given, run=run) for given in (key, None)
    ]
    slow = proxy.connect().send(head("POST", "/pay", [("Host", "shop"), ("Content-Length", "5")]))
    left = proxy.client.open("POST", f"/wait/{run}", key=f"{key}-2", run=run)
    eventually(lambda: folder.runs(run) == 3, "all to run")
    left.leave()
    proxy.stop()
    folder.open_gate(run)
    assert [connection.answer().code for connection in connections] == ["upstream_broken"] * 2
    slow.close()
    with Idempotency(f"sqlite:///{tmp_path / 'semel.db'}") as engine:
        assert {record.key for record in engine.records(scope="http")} == {key, f"{key}-2"}
        assert all(record.abandoned for record in engine.records(scope="http"))


def test_no_key_body_or_path_is_logged(start, scripted):
    def talk(talking):
        until(talking)

    proxy = start(scripted(talk).url, "--tenant-header", "X-Tenant")
    told = {"body": b"s3cret-body", "lines": [("X-Tenant", "s3cret-ann"), ("Cookie", "s3cret")]}
    assert proxy.client.post("/s3cret?s3cret", key="s3cret-key", **told).status == 502
    proxy.wait_for("the client gets 502")
    assert "s3cret" not in proxy.log()


WRONG = {
    "ftp://127.0.0.1:1": "the upstream must be http://HOST:PORT",
    "http://": "the upstream must be http://HOST:PORT",
    "127.0.0.1:1": "the upstream must be http://HOST:PORT",
    "http://127.0.0.1:99999": "the upstream must be http://HOST:PORT",
    "http://ann:s3cret@127.0.0.1:1": "the upstream must be http://HOST:PORT",
    "http://127.0.0.1:1/base": "the upstream must be http://HOST:PORT",
    "http://127.0.0.1:1?a": "the upstream must be http://HOST:PORT",
    "http://127.0.0.1:1#a": "the upstream must be http://HOST:PORT",
    "http://b\u00fccher": "the upstream must be http://HOST:PORT",
    "http://shop..example": "the upstream must be http://HOST:PORT",
    f"http://{'a' * 64}.example": "the upstream must be http://HOST:PORT",
    "http://127.0.0.1:0": "the upstream must be http://HOST:PORT",
}


@pytest.mark.parametrize(("url", "told"), WRONG.items())
def test_an_upstream_that_cannot_be_one_is_refused(tmp_path, monkeypatch, capsys, url, told):
    monkeypatch.chdir(tmp_path)
    assert main(["proxy", "--upstream", url, "--store", "memory://"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "s3cret" not in error


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tenant-header", "X_Tenant"], "must have no underscore, got 'X_Tenant'"),
        (["--tenant-header", "X Tenant"], "must be the name of a header"),
        (["--include", "pay"], "a path pattern begins with / or *"),
    ],
)
def test_options_that_cannot_be_used_are_refused(tmp_path, monkeypatch, capsys, options, told):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["proxy", "--upstream", "http://127.0.0.1:1", "--store", "memory://", *options]) == 2
    )
    assert told in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(tmp_path, monkeypatch, capsys, node):
    monkeypatch.chdir(tmp_path)
    options = ["--store", "memory://", "--port", str(node.port)]
    assert main(["proxy", "--upstream", "http://127.0.0.1:1", *options]) == 2
    assert f"cannot listen on 127.0.0.1, port {node.port}" in capsys.readouterr().err


def test_the_store_is_sqlite_unless_the_environment_or_a_file_names_another(start, node, tmp_path):
    assert not (tmp_path / "semel.db").exists()
    proxy = start(node.url, env={"SEMEL_URL": f"sqlite:///{tmp_path / 'other.db'}"})
    proxy.client.post("/pay", key="k")
    assert (tmp_path / "other.db").exists()
    assert not (tmp_path / "semel.db").exists()

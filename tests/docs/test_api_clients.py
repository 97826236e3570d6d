"""The samples that clients of an API are given do what the page beside them says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

KEY = "order-1"
BUSY = (409, {"Retry-After": "1"})
DOWN = (503, {})


@pytest.fixture(scope="module")
def page(project):
    return (project / "docs" / "protect" / "api-clients.md").read_text(encoding="utf-8")


@contextmanager
def api(*answers: tuple[int, dict[str, str]] | None) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these answers in turn (None: it hangs up), then the last one for ever."""
    left, seen = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.headers["Idempotency-Key"], json.loads(body)))
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer is None:
                self.close_connection = True
                return
            status, headers = answer
            self.send_response(status)
            for name, value in {"Content-Length": "0", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/payments", seen
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def curl(page, url):
    (command,) = re.findall(r"^\$ (curl .*\n.*)$", page, re.MULTILINE)
    command = command.replace("https://api.example/payments", url)
    script = f"KEY={KEY}\n{command} -s -o /dev/null -w '%{{http_code}}'"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    return done.stdout


def javascript(page, url):
    (code,) = re.findall(r"^```js\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    call = f"post({json.dumps(url)}, {json.dumps(KEY)}, {{amount: 500}})"
    script = f"{code}\n{call}.then((response) => console.log(response.status))"
    done = subprocess.run(
        [shutil.which("node") or "", "-e", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl_repeats_the_request_with_its_key_but_not_a_409(page):
    with api(None, DOWN, (201, {})) as (url, seen):
        assert curl(page, url) == "201"
    assert seen == [(KEY, {"amount": 500})] * 3
    for status in (409, 422):
        with api((status, {"Retry-After": "1"})) as (url, seen):
            assert curl(page, url) == str(status)
        assert len(seen) == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here")
def test_javascript_repeats_the_request_with_its_key_until_it_is_answered(page):
    with api(None, DOWN, BUSY, (201, {})) as (url, seen):
        assert javascript(page, url) == "201"
    assert seen == [(KEY, {"amount": 500})] * 4
    for status in (409, 422):
        with api((status, {})) as (url, seen):
            assert javascript(page, url) == str(status)
        assert len(seen) == 1

"""What Prometheus reads, over HTTP: exact sums, few labels, in one process and in many."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import httpx
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engines.facade import KINDS, PATIENCE, World, wait_until
from measuring import unmeasured
from observe.counting import CALLS, CALLS_OF_A_CHILD, FORKS, THREADS
from semel import Idempotency, events
from semel.core.records import Identity
from semel.errors import ConfigError
from semel.observe import Tally
from semel.observe.prometheus import StuckCollector, TallyCollector, prometheus_hook
from semel.observe.tally import EVENT_NAMES, RUN_BUCKETS, STORE_BUCKETS
from servers.prometheus import promtool

HERE = Path(__file__).parent
SECRET = "card-4242"


@pytest.fixture
def registry():
    return CollectorRegistry()


@contextlib.contextmanager
def served(registry):
    """The metrics of this process, as prometheus_client serves them."""

    class Quiet(WSGIRequestHandler):
        def log_message(self, *_):
            pass

    app = prometheus_client.make_wsgi_app(registry)
    with make_server("127.0.0.1", 0, app, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def get(url: str) -> str:
    return httpx.get(url, timeout=PATIENCE).raise_for_status().text


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels: ("semel_events_total", "shop", "Ran")."""
    order = ("store", "scope", "event", "held", "le")
    return {
        (sample.name, *(sample.labels[name] for name in order if name in sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def families(text: str) -> dict[str, str]:
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def check_with_promtool(text: str) -> None:
    """Let Prometheus's own linter read the metrics."""
    ran = promtool("check", "metrics", given=text)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def play(kind: str, hook) -> None:
    """Two runs and a replay in one scope, a failure in another."""
    with World(kind, "memory://") as world:
        engine = world.kind.engine(world._store(), hooks=[hook])
        for key in ("a", SECRET, SECRET):
            world.kind.call(engine.execute, key, lambda: "paid", scope="payments")
        with pytest.raises(ZeroDivisionError):
            world.kind.call(engine.execute, SECRET, lambda: 1 / 0, scope="mails")
        world.kind.finish(engine.close)


# --- one process -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_happened_is_scraped(registry, kind):
    play(kind, prometheus_hook(registry))
    with served(registry) as url:
        text = get(url)
    found = samples(text)
    happened = {key[1:]: n for key, n in found.items() if key[0] == "semel_events_total" and n}
    assert happened == {
        ("payments", "Ran"): 2,
        ("payments", "Replayed"): 1,
        ("mails", "Failed"): 1,
    }
    assert found["semel_run_seconds_count", "payments"] == 2
    assert found["semel_store_seconds_count", "payments"] == 3
    assert found["semel_store_seconds_sum", "payments"] > 0
    assert found["semel_result_bytes_total", "payments"] == 2 * len('"paid"')
    assert not [key for key in found if key[0] != "semel_events_total" and "mails" in key]


def test_the_metrics_have_these_names_kinds_and_buckets(registry):
    play("threads", prometheus_hook(registry))
    with served(registry) as url:
        text = get(url)
    assert families(text) == {
        "semel_events": "counter",
        "semel_run_seconds": "histogram",
        "semel_store_seconds": "histogram",
        "semel_result_bytes": "counter",
    }
    found = samples(text)
    for name, bounds in (("run", RUN_BUCKETS), ("store", STORE_BUCKETS)):
        buckets = [key for key in found if key[0] == f"semel_{name}_seconds_bucket"]
        assert [float(le) for _, _, le in buckets] == [*bounds, float("inf")]
        counts = [found[key] for key in buckets]
        assert counts == sorted(counts)
        assert counts[-1] == found[f"semel_{name}_seconds_count", "payments"]


def test_a_call_slower_than_every_bound_is_in_the_last_bucket_alone(registry):
    hook = prometheus_hook(registry)
    seconds, asked = RUN_BUCKETS[-1] + 1, STORE_BUCKETS[-1] + 1
    identity = Identity("shop", "k")
    hook(events.Ran(identity=identity, seconds=seconds, size=0, store_seconds=asked))
    found = samples(prometheus_client.generate_latest(registry).decode())
    for name, took in (("run", seconds), ("store", asked)):
        buckets = {
            key[-1]: n for key, n in found.items() if key[0] == f"semel_{name}_seconds_bucket"
        }
        assert buckets.pop("+Inf") == found[f"semel_{name}_seconds_count", "shop"] == 1
        assert set(buckets.values()) == {0}
        assert found[f"semel_{name}_seconds_sum", "shop"] == took


def test_every_event_of_a_scope_is_there_from_the_start(registry):
    play("threads", prometheus_hook(registry))
    with served(registry) as url:
        found = samples(get(url))
    for scope in ("payments", "mails"):
        named = {key[2] for key in found if key[:2] == ("semel_events_total", scope)}
        assert named == set(EVENT_NAMES)


def test_no_key_and_no_digest_is_a_label(registry):
    play("threads", prometheus_hook(registry))
    with served(registry) as url:
        text = get(url)
    assert SECRET not in text
    assert Identity("payments", SECRET).key_digest not in text


def test_eight_threads_with_ten_thousand_events_each_are_scraped_exactly(registry):
    hook = prometheus_hook(registry)
    ran = events.Ran(identity=Identity("shop", "k"), seconds=1.0, size=3, store_seconds=0.5)
    with served(registry) as url:

        def work():
            for _ in range(10_000):
                hook(ran)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        get(url)  # in between, which disturbs nothing
        for thread in threads:
            thread.join()
        found = samples(get(url))
    assert found["semel_events_total", "shop", "Ran"] == 80_000
    assert found["semel_run_seconds_count", "shop"] == 80_000
    assert found["semel_run_seconds_sum", "shop"] == 80_000
    assert found["semel_store_seconds_sum", "shop"] == 40_000
    assert found["semel_result_bytes_total", "shop"] == 240_000


def test_a_tally_of_your_own_can_be_shown(registry):
    tally = Tally()
    registry.register(TallyCollector(tally))
    with Idempotency("memory://", hooks=[tally]) as idem:
        idem.execute("k", lambda: 1)
    assert (
        registry.get_sample_value("semel_events_total", {"scope": "default", "event": "Ran"}) == 1
    )


def test_a_second_hook_in_the_same_registry_is_rejected(registry):
    prometheus_hook(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        prometheus_hook(registry)


def test_the_usual_registry_is_that_of_prometheus_client():
    hook = prometheus_hook()
    try:
        assert isinstance(hook, Tally)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            prometheus_hook(prometheus_client.REGISTRY)
    finally:
        names = prometheus_client.REGISTRY._names_to_collectors
        prometheus_client.REGISTRY.unregister(names["semel_events_total"])


def test_what_prometheus_client_has_no_more_is_named(registry, monkeypatch):
    monkeypatch.delattr("prometheus_client.values.ValueClass._multiprocess")
    with pytest.raises(ConfigError, match=r"prometheus-client .* has no .*\._multiprocess"):
        prometheus_hook(registry)


@pytest.mark.parametrize("kind", KINDS)
def test_promtool_finds_nothing_wrong(registry, kind):
    play(kind, prometheus_hook(registry))
    with Idempotency("memory://") as idem:
        registry.register(StuckCollector(idem))
        with served(registry) as url:
            text = get(url)
    assert "semel_store_up 1" in text
    check_with_promtool(text)


# --- many processes --------------------------------------------------------------------------


@pytest.fixture
def multiprocess(tmp_path, monkeypatch):
    """The folder in which prometheus_client adds up the processes."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    return folder


@contextlib.contextmanager
def gunicorn(store: str, *options: str):
    """A shop with two workers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, fd = listening.getsockname()[1], listening.fileno()
        command = [sys.executable, "-m", "gunicorn", "--workers", "2", "--bind", f"fd://{fd}"]
        process = subprocess.Popen(
            [*command, "--log-level", "warning", *options, "observe.scraped:app"],
            cwd=HERE.parent,
            env={**os.environ, "SHOP_STORE": store},
            pass_fds=[fd],
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE)


@pytest.mark.parametrize("options", [(), ("--preload",)], ids=["loaded later", "preloaded"])
def test_two_workers_of_gunicorn_are_added_up(multiprocess, sqlite_url, options):
    seen: list[dict] = []
    with gunicorn(sqlite_url, *options) as url, ThreadPoolExecutor(8) as clients:

        def pay(number):
            seen.append(json.loads(get(f"{url}/{number}")))

        def both_have_worked():
            list(clients.map(pay, [number % 40 for number in range(200)]))
            pids = [answer["pid"] for answer in seen]
            return len(set(pids)) == 2 and min(map(pids.count, set(pids))) >= 20

        wait_until(both_have_worked)
        texts = [get(f"{url}/metrics") for _ in range(4)]  # from one worker or the other
    replayed = sum(answer["replayed"] for answer in seen)
    for text in texts:
        found = samples(text)
        assert found["semel_events_total", "shop", "Ran"] == len(seen) - replayed == 40
        assert found["semel_events_total", "shop", "Replayed"] == replayed
        assert found["semel_events_total", "shop", "LostLease"] == 0
        assert found["semel_run_seconds_count", "shop"] == 40
        assert found["semel_store_seconds_count", "shop"] == len(seen)
        assert found["semel_result_bytes_total", "shop"] == 40 * len('"paid"')
        assert found["semel_store_up",] == 1
    check_with_promtool(texts[0])


def test_the_plain_counters_have_the_names_labels_and_buckets_of_the_tally(multiprocess, registry):
    """In a process of its own: prometheus_client decides on its mode when it is imported."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from observe.test_prometheus import *\n"
        "play('threads', prometheus_hook(CollectorRegistry()))\n"
        "registry = CollectorRegistry()\n"
        "from prometheus_client.multiprocess import MultiProcessCollector\n"
        "MultiProcessCollector(registry)\n"
        "print(prometheus_client.generate_latest(registry).decode())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(HERE.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    plain = samples(ran.stdout)
    play("threads", prometheus_hook(registry))
    tally = samples(prometheus_client.generate_latest(registry).decode())
    assert plain.keys() == tally.keys()
    assert {key: value for key, value in plain.items() if key[0].endswith("_total")} == {
        key: value for key, value in tally.items() if key[0].endswith("_total")
    }


@pytest.mark.timeout(180)
def test_a_process_that_forks_while_its_threads_count_is_added_up(multiprocess):
    ran = subprocess.run(
        [sys.executable, HERE / "counting.py", "prometheus"],
        capture_output=True,
        text=True,
        env=unmeasured(),
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = samples(ran.stdout)
    happened = {key[1:]: n for key, n in found.items() if key[0] == "semel_events_total" and n}
    assert happened == {
        ("shop", "Ran"): THREADS * 100,
        ("shop", "Replayed"): THREADS * (CALLS - 100),
        ("child", "Ran"): FORKS * CALLS_OF_A_CHILD,
    }
    assert found["semel_store_seconds_count", "shop"] == THREADS * CALLS

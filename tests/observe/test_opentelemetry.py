"""What OpenTelemetry gets: the metrics, and the attributes of the span in which a call is made."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engines.facade import KINDS, World
from semel import AsyncIdempotency, Idempotency, Policy, events
from semel.core.records import Identity
from semel.errors import PayloadMismatch
from semel.observe.opentelemetry import OpenTelemetryHook
from semel.observe.tally import MOST_SCOPES, OTHER, RUN_BUCKETS, STORE_BUCKETS

SECRET = "card-4242"


class Telemetry:
    """What an application of OpenTelemetry has: a meter, a tracer, and what they collect."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])
        self._exporter = InMemorySpanExporter()
        self._tracers = TracerProvider()
        self._tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self._tracers.get_tracer("shop")

    def metrics(self):
        [resource] = self._reader.get_metrics_data().resource_metrics
        [scope] = resource.scope_metrics
        assert scope.scope.name == "semel"
        return {metric.name: metric for metric in scope.metrics}

    def points(self, name):
        """The data points of a metric by their attributes."""
        return {
            tuple(sorted(point.attributes.items())): point
            for point in self.metrics()[name].data.data_points
        }

    def happened(self):
        return {
            (dict(labels)["scope"], dict(labels)["event"]): point.value
            for labels, point in self.points("semel.events").items()
            if point.value
        }

    def spans(self):
        return {span.name: dict(span.attributes) for span in self._exporter.get_finished_spans()}

    def close(self) -> None:
        self.meters.shutdown()
        self._tracers.shutdown()


@pytest.fixture
def telemetry():
    opened = Telemetry()
    yield opened
    opened.close()


@pytest.fixture
def hook(telemetry):
    return OpenTelemetryHook(telemetry.meters)


# --- metrics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_happened_is_measured(telemetry, hook, kind):
    with World(kind, "memory://") as world:
        engine = world.kind.engine(world._store(), hooks=[hook])
        for key in ("a", SECRET, SECRET):
            world.kind.call(engine.execute, key, lambda: "paid", scope="payments")
        with pytest.raises(ZeroDivisionError):
            world.kind.call(engine.execute, "a", lambda: 1 / 0, scope="mails")
        world.kind.finish(engine.close)
    assert telemetry.happened() == {
        ("payments", "Ran"): 2,
        ("payments", "Replayed"): 1,
        ("mails", "Failed"): 1,
    }
    labels = (("scope", "payments"),)
    for name, count in (("run.duration", 2), ("store.duration", 3), ("result.size", 2)):
        points = telemetry.points(f"semel.{name}")
        assert set(points) == {labels}
        assert points[labels].count == count
    assert telemetry.points("semel.result.size")[labels].sum == 2 * len('"paid"')


def test_the_metrics_have_units_and_the_buckets_of_the_tally(telemetry, hook):
    hook(events.Ran(identity=Identity("shop", "k"), seconds=1, size=3, store_seconds=0.5))
    metrics = telemetry.metrics()
    assert {name: metric.unit for name, metric in metrics.items()} == {
        "semel.events": "{event}",
        "semel.run.duration": "s",
        "semel.store.duration": "s",
        "semel.result.size": "By",
    }
    [run] = telemetry.points("semel.run.duration").values()
    [store] = telemetry.points("semel.store.duration").values()
    assert (run.explicit_bounds, store.explicit_bounds) == (RUN_BUCKETS, STORE_BUCKETS)


def test_a_replay_that_did_not_ask_the_store_says_nothing_of_its_speed(telemetry, hook):
    hook(events.Replayed(identity=Identity("shop", "k"), waited=True))
    assert "semel.store.duration" not in telemetry.metrics()


def test_after_a_hundred_scopes_all_further_ones_are_measured_together(telemetry, hook):
    for number in range(MOST_SCOPES + 20):
        for _ in range(2):
            hook(events.RejectedBusy(identity=Identity(f"tenant-{number}", "k")))
    happened = telemetry.happened()
    assert len(happened) == MOST_SCOPES + 1
    assert happened["tenant-99", "RejectedBusy"] == 2
    assert happened[OTHER, "RejectedBusy"] == 40


# --- spans -----------------------------------------------------------------------------------


def test_the_span_of_the_caller_says_what_happened(telemetry, hook):
    with Idempotency("memory://", hooks=[hook]) as idem:
        for name in ("first", "second"):
            with telemetry.tracer.start_as_current_span(name):
                idem.execute(SECRET, lambda: "paid", scope="payments")
    about = {
        "semel.scope": "payments",
        "semel.attempt": 1,
        "semel.key_digest": Identity("payments", SECRET).key_digest,
    }
    assert telemetry.spans() == {
        "first": {"semel.event": "Ran", **about},
        "second": {"semel.event": "Replayed", **about},
    }


async def test_each_task_describes_its_own_span(telemetry, hook):
    async def paid():
        await asyncio.sleep(0)
        return "paid"

    async def pay(number):
        with telemetry.tracer.start_as_current_span(f"request {number}"):
            await idem.execute(f"order:{number}", paid, scope="payments")

    async with AsyncIdempotency("memory://", hooks=[hook]) as idem:
        await asyncio.gather(*map(pay, range(5)))
    digests = {name: span["semel.key_digest"] for name, span in telemetry.spans().items()}
    assert digests == {
        f"request {number}": Identity("payments", f"order:{number}").key_digest
        for number in range(5)
    }


def test_the_last_of_several_events_stays(telemetry, hook):
    with (
        Idempotency("memory://", hooks=[hook]) as idem,
        telemetry.tracer.start_as_current_span("request"),
    ):
        idem.execute("a", lambda: 1, scope="shop", payload=1)
        with pytest.raises(PayloadMismatch):
            idem.execute("a", lambda: 1, scope="shop", payload=2)
    assert telemetry.spans()["request"]["semel.event"] == "Mismatched"


def test_an_event_without_an_attempt_has_no_number(telemetry, hook):
    with telemetry.tracer.start_as_current_span("request"):
        hook(events.RejectedBusy(identity=Identity("shop", "k")))
    assert "semel.attempt" not in telemetry.spans()["request"]


def test_a_span_that_has_ended_is_left_alone(telemetry, hook, caplog):
    from opentelemetry import trace

    span = telemetry.tracer.start_span("request")
    span.end()
    with trace.use_span(span):
        hook(events.RejectedBusy(identity=Identity("shop", "k")))
    assert telemetry.spans() == {"request": {}}
    assert caplog.text == ""


def test_without_telemetry_nothing_is_measured_and_nothing_breaks():
    with Idempotency("memory://", hooks=[OpenTelemetryHook()], policy=Policy()) as idem:
        assert idem.execute("k", lambda: 1) == 1

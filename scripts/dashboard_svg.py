"""Draws the Grafana dashboard from its own queries on real data: docs/assets/dashboard.svg.

Grafana isn't needed. An application with semel runs here for a few minutes, and a private
Prometheus (from `make servers`) reads its metrics each second. Each panel of
`semel/observe/dashboard.json` down to `LAST_ROW` is drawn from what its queries return, with its
place, title, and unit. Everything is bound to the loopback interface.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from prometheus_client import REGISTRY, start_http_server

from semel import Idempotency, IdempotencyError, Policy
from semel.observe.prometheus import StuckCollector, prometheus_hook

PROJECT = Path(__file__).resolve().parents[1]
PICTURE = PROJECT / "docs" / "assets" / "dashboard.svg"
DASHBOARD = PROJECT / "src" / "semel" / "observe" / "dashboard.json"
PROMETHEUS = PROJECT / ".servers" / "prometheus"
SPAWN = multiprocessing.get_context("spawn")

LAST_ROW = 39
"""Where the drawing ends, in rows of the dashboard's grid."""
MINUTE = 60
RATE_INTERVAL = "20s"
UNIT_WIDTH, UNIT_HEIGHT, HEAD = 40, 21, 44
COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff9830", "#f2495c", "#5794f2", "#b877d9", "#705da0")
NAMED = {"green": "#299c46", "red": "#d44a3a", "yellow": "#b88a14", "blue": "#3274d9"}

STYLE = """\
    .page { fill: #111217; stroke: #2c3235 }
    .panel { fill: #181b1f; stroke: #2c3235 }
    .title { fill: #e6e8ec; font-size: 13px; font-weight: 600 }
    .small { fill: #ffffff; font-size: 11.5px; font-weight: 600 }
    .soft { fill: #9aa2ad; font-size: 11px }
    .value { fill: #ffffff; font-size: 30px; font-weight: 600; text-anchor: middle }
    .end { text-anchor: end }
    .mid { text-anchor: middle }
    .grid { stroke: #2c3235 }
    .line { fill: none; stroke-width: 1.5; stroke-linejoin: round }"""


class Line(NamedTuple):
    """What one query returned under one name."""

    name: str
    points: list[tuple[float, float]]


# --- the application -----------------------------------------------------------------------------

NEW, FAILS, MISTAKEN = 0.6, 0.02, 0.01
"""Shares of the calls: the first of its key, an operation that fails, another payload."""
SCOPES: Mapping[str, Policy] = {
    "orders.pay": Policy.payment(lease=15),
    "mails.send": Policy(concurrent="reject"),
    "stock.book": Policy(lease=15),
}


def dies(url: str, key: str, scope: str) -> None:
    """End the process in the middle of an operation, as a crash does."""
    Idempotency(url, policy=SCOPES[scope]).execute(key, lambda: os._exit(1), scope=scope, payload=1)


def work(idem: Idempotency, seed: int, stop: threading.Event) -> None:
    """Call operations, many of them again, as clients and brokers do."""
    chance = random.Random(seed)  # noqa: S311 - traffic, not secrets
    keys: list[tuple[str, str]] = []

    def operation() -> str:
        time.sleep(chance.lognormvariate(-4.4, 0.8))
        if chance.random() < FAILS:
            raise ConnectionError("the other system is unreachable")
        return "done " * chance.randrange(1, 60)

    while not stop.wait(chance.expovariate(14 if int(time.monotonic() / 45) % 2 else 9)):
        if not keys or chance.random() < NEW:
            scope = chance.choices([*SCOPES], weights=[5, 3, 2])[0]
            keys.append((scope, f"{seed}-{len(keys)}"))
            scope, key = keys[-1]
        else:
            scope, key = chance.choice(keys[-30:])
        payload = 2 if chance.random() < MISTAKEN else 1
        with suppress(IdempotencyError, ConnectionError):
            idem.execute(key, operation, scope=scope, payload=payload, policy=SCOPES[scope])


def application(url: str, port: int, stop: threading.Event) -> list[threading.Thread]:
    """Start the application and its metrics."""
    idem = Idempotency(url, hooks=[prometheus_hook()])
    StuckCollector(idem, registry=REGISTRY, every=1)
    start_http_server(port, addr="127.0.0.1")
    # Pairs have the same keys, so that duplicates also meet while the first one runs.
    threads = [
        threading.Thread(target=work, args=(idem, seed // 2, stop), daemon=True)
        for seed in range(6)
    ]
    for thread in threads:
        thread.start()
    return threads


def crashes(url: str, seconds: float) -> None:
    """Let processes die now and then, and wait until the time is over."""
    begin = time.monotonic()
    for number, (after, scope) in enumerate(
        [(0.3, "stock.book"), (0.35, "orders.pay"), (0.6, "orders.pay")]
    ):
        time.sleep(max(0.0, begin + after * seconds - time.monotonic()))
        process = SPAWN.Process(target=dies, args=(url, f"crash-{number}", scope))
        process.start()
        process.join()
    time.sleep(max(0.0, begin + seconds - time.monotonic()))


# --- Prometheus ----------------------------------------------------------------------------------


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def prometheus(folder: Path, port: int, target: int) -> subprocess.Popen[bytes]:
    """Start a private Prometheus that reads the application each second."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: shop, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}\n"
    )
    return subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )


def ask(port: int, query: str, begin: float, end: float) -> list[dict[str, Any]]:
    """Return what a query found between two times."""
    fields = {"query": query, "start": begin, "end": end, "step": 2}
    url = f"http://127.0.0.1:{port}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=10) as response:
        found: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return found


def lines(port: int, panel: Mapping[str, Any], begin: float, end: float) -> Iterator[Line]:
    """Return what the queries of a panel found, under the names of their legends."""
    for target in panel.get("targets", ()):
        query = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
        query = query.replace("$job", ".*").replace("$scope", ".*")
        for found in ask(port, query, begin, end):
            name = target["legendFormat"]
            for label in ("event", "scope", "store", "held", "job", "instance"):
                name = name.replace(f"{{{{{label}}}}}", found["metric"].get(label, ""))
            points = [(float(at), float(value)) for at, value in found["values"]]
            known = [point for point in points if math.isfinite(point[1])]
            if known:
                yield Line(name.strip() or panel["title"], known)


# --- the drawing ---------------------------------------------------------------------------------


def shown(value: float, unit: str | None) -> str:
    """Return a value as people read it."""
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s":
        if value >= MINUTE:
            return f"{value / MINUTE:.1f} min"
        return f"{value:.0f} s" if value >= 1 else f"{value * 1000:.3g} ms"
    text = f"{value:.3g}"
    return f"{text}/s" if unit == "reqps" else text


def draw(
    panels: Sequence[Mapping[str, Any]],
    found: Callable[[Mapping[str, Any]], list[Line]],
    span: tuple[float, float],
) -> str:
    """Return the picture."""
    width, height = 24 * UNIT_WIDTH + 16, HEAD + LAST_ROW * UNIT_HEIGHT + 14
    parts: list[str] = []
    told: list[str] = []
    for panel in panels:
        place = panel["gridPos"]
        if place["y"] + place["h"] > LAST_ROW:
            continue
        box = (
            8 + place["x"] * UNIT_WIDTH,
            HEAD + place["y"] * UNIT_HEIGHT,
            place["w"] * UNIT_WIDTH,
            place["h"] * UNIT_HEIGHT,
        )
        told.append(panel["title"])
        if panel["type"] == "row":
            parts.append(_text(box[0] + 6, box[1] + 16, panel["title"], "title"))
        elif panel["type"] == "stat":
            parts += _stat(panel, found(panel), box)
        else:
            parts += _graph(panel, found(panel), box, span)
    body = "\n".join(f"  {part}" for part in parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" role="img" aria-labelledby="title desc" \
font-family="system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif">
  <title id="title">The semel dashboard, drawn from its own queries</title>
  <desc id="desc">{escape("; ".join(told))}</desc>
  <style>
{STYLE}
  </style>
  <rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>
  {_text(16, 28, "semel", "title")}
  {_text(width - 16, 28, f"last {(span[1] - span[0]) / MINUTE:.0f} minutes", "soft end")}
{body}
</svg>
"""


Box = tuple[int, int, int, int]


def _stat(panel: Mapping[str, Any], lines: Sequence[Line], box: Box) -> Iterator[str]:
    left, top, width, height = box
    defaults = panel["fieldConfig"]["defaults"]
    value = lines[0].points[-1][1] if lines else None
    steps = defaults["thresholds"]["steps"]
    reached = [
        step["color"]
        for step in steps
        if value is None or step["value"] is None or value >= step["value"]
    ]
    colour = NAMED["green" if value is None else reached[-1]]
    texts = {
        key: option["text"]
        for mapping in defaults.get("mappings", ())
        for key, option in mapping["options"].items()
    }
    text = defaults["noValue"] if value is None else shown(value, defaults.get("unit"))
    text = texts.get(text, text)
    yield _rect((left + 3, top + 3, width - 6, height - 6), f'rx="3" fill="{colour}"')
    yield _text(left + 10, top + 20, panel["title"], "small")
    yield _text(left + width // 2, top + height - 18, text, "value")


def _graph(
    panel: Mapping[str, Any], lines: Sequence[Line], box: Box, span: tuple[float, float]
) -> Iterator[str]:
    left, top, width, height = box
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults.get("custom", {})
    # What stays at zero has no line to see; its name would only push the others out.
    lines = [line for line in lines if any(value for _, value in line.points)]
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    yield _rect((left + 3, top + 3, width - 6, height - 6), 'rx="3" class="panel"')
    yield _text(left + 12, top + 21, panel["title"], "title")
    if not lines:
        yield _text(left + width // 2, top + height // 2, "No data", "soft mid")
        return
    x0, x1 = left + 62, left + width - 14
    y0, y1 = top + 34, top + height - 44
    drawn = _stack(lines) if stacked else [(line, None) for line in lines]
    highest = max(value for line, _ in drawn for _, value in line.points) or 1.0
    ceiling = _nice(highest)

    def spot(at: float, value: float) -> str:
        across = x0 + (x1 - x0) * (at - span[0]) / (span[1] - span[0])
        return f"{across:.0f} {y1 - (y1 - y0) * value / ceiling:.1f}"

    for share in (0.0, 0.5, 1.0):
        y = y1 - (y1 - y0) * share
        yield f'<path class="grid" d="M{x0} {y:.1f}H{x1}"/>'
        yield _text(x0 - 6, int(y) + 4, shown(ceiling * share, defaults.get("unit")), "soft end")
    for number, (line, below) in reversed(list(enumerate(drawn))):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join(spot(*point) for point in line.points)
        fill = custom.get("fillOpacity", 0) / 100
        if fill:
            floor = below or [(at, 0.0) for at, _ in line.points]
            back = "L".join(spot(*point) for point in reversed(floor))
            yield f'<path d="M{path}L{back}z" fill="{colour}" fill-opacity="{fill:g}"/>'
        yield f'<path class="line" stroke="{colour}" d="M{path}"/>'
    yield from _legend([line.name for line in lines], left + 12, top + height - 26, width - 24)


def _stack(lines: Sequence[Line]) -> list[tuple[Line, list[tuple[float, float]]]]:
    """Put each line upon the sum of those before it."""
    times = sorted({at for line in lines for at, _ in line.points})
    sums = dict.fromkeys(times, 0.0)
    stacked: list[tuple[Line, list[tuple[float, float]]]] = []
    for line in lines:
        below = [(at, sums[at]) for at in times]
        for at, value in line.points:
            sums[at] += value
        stacked.append((Line(line.name, [(at, sums[at]) for at in times]), below))
    return stacked


def _nice(value: float) -> float:
    """Return the next value that divides well."""
    power = 1.0
    while power > value:
        power /= 10
    while power * 10 <= value:
        power *= 10
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)


def _legend(names: Sequence[str], left: int, top: int, width: int) -> Iterator[str]:
    x, y = left, top
    for number, name in enumerate(names):
        room = 20 + round(6.2 * len(name))
        if x + room > left + width and x > left:
            x, y = left, y + 15
        yield _rect((x, y - 4, 10, 3), f'fill="{COLOURS[number % len(COLOURS)]}"')
        yield _text(x + 14, y, name, "soft")
        x += room


def _rect(box: Box, rest: str) -> str:
    x, y, width, height = box
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {rest}/>'


def _text(x: int, y: int, text: str, classes: str) -> str:
    return f'<text class="{classes}" x="{x}" y="{y}">{escape(text)}</text>'


def main() -> int:
    """Run the application, let Prometheus read it, and draw what the dashboard would show."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of traffic (%(default)s)")
    seconds = parser.parse_args().seconds
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics, port = free_port(), free_port()
        url = f"sqlite:///{folder / 'semel.db'}"
        threads = application(url, metrics, stop)
        server = prometheus(folder, port, metrics)
        try:
            begin = time.time()
            crashes(url, seconds)
            span = (begin + 10, time.time())  # a rate needs some seconds before it
            picture = draw(panels, lambda panel: list(lines(port, panel, *span)), span)
        finally:
            server.terminate()
            server.wait()
            stop.set()
            for thread in threads:
                thread.join(5)
    PICTURE.write_text(picture, encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(PROJECT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

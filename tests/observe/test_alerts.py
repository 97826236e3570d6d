"""The shipped alert rules and dashboard: they work, and use nothing that is not exported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from observe.test_prometheus import served
from semel import Idempotency, events, open_store
from semel.cli import main
from semel.core.records import ClaimRequest, Identity
from semel.observe.prometheus import StuckCollector, prometheus_hook
from servers.prometheus import PATIENCE, prometheus_server, promtool
from servers.redis import free_port, wait_until

SHIPPED = Path(str(files("semel.observe")))
RULES = SHIPPED / "alerts.yml"
DASHBOARD = SHIPPED / "dashboard.json"
EXAMPLES = Path(__file__).with_name("alerts.test.yml")
ROOT = Path(__file__).resolve().parents[2]

METRIC = re.compile(r"\b(?:job\w*:)?semel_\w+(?::\w+)?")
SELECTOR = re.compile(rf"({METRIC.pattern})(?:\{{([^}}]*)\}})?")
MATCHER = re.compile(r'(\w+)\s*(=~|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")
OF_ALERT = re.compile(r"\$labels\.(\w+)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")

OF_TARGETS = {"job", "instance"}
"""Labels that Prometheus adds to everything that it scrapes."""


def rules() -> list[dict]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def alerts() -> dict[str, dict]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panels() -> list[dict]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Every expression of the dashboard, with the variables set as Grafana sets them."""
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [
        expr.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$scope", ".*")
        for expr in shown
    ]


# --- the rules -----------------------------------------------------------------------------------


def test_promtool_finds_nothing_wrong_with_the_rules():
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_each_alert_fires_and_stays_quiet_as_its_examples_say():
    done = promtool("test", "rules", EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_an_example_that_fires_and_one_that_does_not():
    fires, quiet = set(), set()
    for example in yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))["tests"]:
        tests = example["alert_rule_test"]
        fired = {test["alertname"] for test in tests if test["exp_alerts"]}
        fires |= fired
        quiet |= {test["alertname"] for test in tests} - fired
    assert fires == quiet == set(alerts())


def test_the_alerts_that_were_promised_are_there():
    assert {
        "SemelStuck",
        "SemelUnreconciled",
        "SemelRetryStorm",
        "SemelPayloadConflicts",
        "SemelLostLease",
        "SemelStoreFailing",
    } <= set(alerts())


def test_every_alert_names_its_section_of_the_runbook_and_no_host():
    for name, alert in alerts().items():
        assert alert["labels"]["severity"] in {"critical", "warning"}
        page, _, anchor = alert["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (\w+)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
        assert [heading for heading in headings if heading.lower() == anchor] == [name]
        assert "://" not in str(alert["annotations"])


def test_the_runbook_has_a_section_for_each_alert_and_for_no_other():
    page = (ROOT / "docs" / "operate" / "runbook.md").read_text("utf-8")
    assert set(re.findall(r"^#+ (Semel\w+)$", page, re.MULTILINE)) == set(alerts())


def test_the_page_of_metrics_lists_every_alert_with_its_severity():
    page = (ROOT / "docs" / "operate" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]\(runbook.md#(\w+)\) \|.*\| (\w+) \|$", page, re.MULTILINE)
    assert {name: severity for name, _, severity in rows} == {
        name: alert["labels"]["severity"] for name, alert in alerts().items()
    }
    assert all(anchor == name.lower() for name, anchor, _ in rows)


# --- the dashboard -------------------------------------------------------------------------------


def test_the_dashboard_is_one_that_grafana_imports():
    board = dashboard()
    assert board["schemaVersion"] == 36  # Grafana 9: later ones bring it up to date themselves
    assert "id" not in board  # the number in a database of Grafana's: each import gets its own
    assert board["uid"] == "semel"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 20
    for panel in board["panels"]:
        grid = panel["gridPos"]
        assert 0 <= grid["x"] <= 24 - grid["w"], panel["title"]


def test_no_two_panels_lie_on_each_other():
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))


def test_the_reader_chooses_data_source_job_and_scope():
    board = dashboard()
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "scope"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == (
        "datasource",
        "prometheus",
    )
    of_the_reader = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["datasource"] == of_the_reader
        for target in panel["targets"]:
            assert target["datasource"] == of_the_reader
            assert 'job=~"$job"' in target["expr"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for one in (*board["annotations"]["list"], variables["job"], variables["scope"]):
        assert one["datasource"] == of_the_reader


def test_every_query_of_the_dashboard_is_one_for_prometheus(tmp_path):
    named = [{"record": f"q{i}", "expr": expr} for i, expr in enumerate(queries())]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": named}]}), "utf-8")
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_names_only_alerts_that_exist():
    named = re.findall(r"\bSemel\w+", " ".join(panel["description"] for panel in panels()))
    assert len(named) >= 5
    assert set(named) <= set(alerts())


def test_the_panels_that_the_runbook_names_are_there():
    page = (ROOT / "docs" / "operate" / "runbook.md").read_text("utf-8")
    page = re.sub(r"\*\*.*?\*\*", "", " ".join(page.split()))
    named = set(re.findall(r"\*([A-Z][a-z ]+)\*", page))
    assert len(named) >= 5
    assert named <= {panel["title"] for panel in panels()}


# --- what they are made of -----------------------------------------------------------------------


class Shop:
    """A process that exports everything, with what every alert and every panel asks for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.hook = prometheus_hook(self.registry)
        self.store = open_store("memory://")
        self.idem = Idempotency(self.store, hooks=[self.hook])
        self.other = open_store("memory://")
        StuckCollector({"shop": self.store, "mails": self.other}, registry=self.registry)
        for _ in range(2):
            self.idem.execute("order:1", lambda: "paid", scope="orders.pay")
        self.abandon("order:2", age=1000.0, hold=True)
        self.abandon("order:3", age=10.0, hold=False)

    def abandon(self, key: str, *, age: float, hold: bool) -> None:
        """Leave an attempt behind whose lease ended this long ago."""
        identity, owner = Identity("orders.pay", key), key.encode().rjust(12)
        self.store.claim(ClaimRequest(identity, owner, None, 60.0, 600.0, hold))
        assert self.store.renew(identity, owner, -age)

    def exported(self) -> dict[str, dict[str, set[str]]]:
        """Every value of every label, by metric."""
        found: dict[str, dict[str, set[str]]] = {}
        text = generate_latest(self.registry).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = found.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    labels.setdefault(name, set()).add(value)
        return found


@pytest.fixture
def shop():
    made = Shop()
    yield made
    made.idem.close()
    made.store.close()
    made.other.close()


def recorded() -> dict[str, dict[str, set[str]]]:
    """The labels of what the rules record, as its name tells them."""
    names = [rule["record"] for rule in rules() if "record" in rule]
    return {name: {label: set() for label in name.partition(":")[0].split("_")} for name in names}


def test_rules_and_dashboard_use_only_metrics_labels_and_values_that_are_exported(shop):
    exported = shop.exported()
    known = exported | recorded()
    used = set()
    for expr in [rule["expr"] for rule in rules()] + queries():
        labels = set()
        for metric, matchers in SELECTOR.findall(expr):
            assert metric in known, expr
            used.add(metric)
            labels |= set(known[metric])
            for label, operator, value in MATCHER.findall(matchers):
                if label not in OF_TARGETS and value != ".*":
                    assert label in known[metric], expr
                    values = value.split("|") if operator == "=~" else [value]
                    kind = exported["semel_events_total"] if metric in recorded() else known[metric]
                    assert set(values) <= kind[label], expr
        for grouping in GROUPING.findall(expr):
            assert set(grouping.replace(" ", "").split(",")) <= labels | OF_TARGETS, expr
    assert {"semel_events_total", "semel_stuck", "semel_stuck_oldest_seconds"} < used
    # A metric that nobody looks at would be missed by nobody, either.
    parts = ("_bucket", "_count", "_sum", "_created")
    assert used >= {name for name in exported if not name.endswith(parts)}


def test_texts_name_only_labels_that_their_expressions_have(shop):
    labels = {label for known in shop.exported().values() for label in known} | OF_TARGETS
    for alert in alerts().values():
        shown = set(OF_ALERT.findall(str(alert["annotations"])))
        grouped = {name for one in GROUPING.findall(alert["expr"]) for name in one.split(", ")}
        parts = METRIC.findall(alert["expr"])
        of_parts = {label for one in parts for label in recorded().get(one, ())}
        assert shown <= grouped | of_parts, alert["alert"]
    for panel in panels():
        for target in panel["targets"]:
            assert set(LEGEND.findall(target["legendFormat"])) <= labels, panel["title"]


def test_prometheus_finds_data_for_every_panel_and_fires_what_it_should(shop, tmp_path):
    def announce(kind, times=1):
        for _ in range(times):
            shop.hook(kind(identity=Identity("orders.pay", "order:1")))

    with (
        served(shop.registry) as url,
        prometheus_server(tmp_path, url.removeprefix("http://"), RULES) as server,
    ):
        wait_until(lambda: server.query("semel_store_up") != [], "a first scrape", PATIENCE)
        announce(events.LostLease)
        announce(events.Mismatched, 6)
        announce(events.RanUnprotected)
        for expr in queries():
            wait_until(lambda expr=expr: server.query(expr) != [], expr, PATIENCE)
        expected = {
            "SemelStuck",
            "SemelUnreconciled",
            "SemelLostLease",
            "SemelPayloadConflicts",
            "SemelRanUnprotected",
        }
        wait_until(lambda: server.alerts() >= expected, "the alerts", PATIENCE)
        assert server.alerts() == expected


def test_prometheus_is_told_of_a_store_that_is_down(tmp_path):
    registry = CollectorRegistry()
    with (
        Idempotency(f"redis://127.0.0.1:{free_port()}") as idem,
        served(registry) as url,
    ):
        StuckCollector(idem, registry=registry)
        with prometheus_server(tmp_path, url.removeprefix("http://"), RULES) as server:
            # Pending: it fires after a minute.
            wait_until(lambda: server.alerts() == {"SemelStoreDown"}, "the alert", PATIENCE)


# --- how users get them --------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "file"), [("alerts", RULES), ("dashboard", DASHBOARD)])
def test_the_command_prints_what_is_shipped_and_needs_no_store(tmp_path, what, file):
    done = subprocess.run(
        [sys.executable, "-m", "semel", "monitoring", what],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == file.read_bytes()
    assert done.stdout.isascii()  # whatever the encoding of the terminal


def test_the_alerts_name_the_address_of_the_team_s_runbook(capsys, tmp_path):
    assert main(["monitoring", "alerts", "--runbook", "https://wiki.shop.example/semel?v=2"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "alerts.yml").write_text(text, "utf-8")
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", tmp_path / "alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    (group,) = yaml.safe_load(text)["groups"]
    found = [rule["annotations"]["runbook"] for rule in group["rules"] if "alert" in rule]
    assert found == [
        f"https://wiki.shop.example/semel?v=2#{alert['annotations']['runbook'].partition('#')[2]}"
        for alert in alerts().values()
    ]
    # Nothing else has changed.
    assert text.replace("https://wiki.shop.example/semel?v=2#", "docs/operate/runbook.md#") == (
        RULES.read_text("utf-8")
    )


@pytest.mark.parametrize(
    "address",
    [
        "",
        "runbook.md",
        "https://",
        "https://w/#top",
        "https://a b",
        "https://{{ x }}",
        "http://\x1b",
    ],
)
def test_an_address_that_is_none_is_rejected(capsys, address):
    with pytest.raises(SystemExit) as ended:
        main(["monitoring", "alerts", "--runbook", address])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "argument --runbook: " in told.err
    assert "web address" in told.err
    assert told.out == ""


def test_a_dashboard_has_no_runbook_to_name(capsys):
    assert main(["monitoring", "dashboard", "--runbook", "https://wiki.shop.example"]) == 2
    told = capsys.readouterr()
    assert "--runbook" in told.err
    assert "alerts" in told.err
    assert "dashboard" in told.err
    assert told.out == ""


def test_the_command_names_what_it_can_print(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["monitoring", "pictures"])
    assert ended.value.code == 2
    assert "'alerts', 'dashboard'" in capsys.readouterr().err

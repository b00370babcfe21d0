"""Alerts and dashboards ask for metrics that exist, and say what to do.

That each fires when it should is tested by promtool: deploy/prometheus/tests, `make alerts-check`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from headrace_common.errors import BY_REASON, Internal, Unimplemented
from headrace_common.metrics import LATENCY_BUCKETS_S

ROOT = Path(__file__).parents[3]
RULE_FILES = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
RULES: list[dict[str, Any]] = [
    rule
    for path in RULE_FILES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
# What a scrape adds to every series.
OF_TARGETS = {"job", "instance", "service"}
OF_PROMETHEUS = {"up": set(), "ALERTS": {"alertname", "alertstate", "severity"}}
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum")}
SELECTOR = re.compile(r"\b((?:headrace[:_]|process_|up\b|ALERTS\b)[a-zA-Z0-9_:]*)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def load(path: str) -> ModuleType:
    name = re.sub(r"\W", "_", path)
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    """What docs/METRICS.md is made from, by the name of each series."""
    found = {}
    for documented in load("docs/generate.py").catalogue().values():
        for it in documented:
            for suffix in SUFFIXES.get(it.kind, ("",)):
                found[it.name + suffix] = it
    assert len(found) > 100
    return found


def boards() -> Iterator[tuple[str, str, str]]:
    """Yield dashboard, query and legend of each line."""
    yield from load("deploy/grafana/ask.py").lines()


def asked() -> list[tuple[str, str]]:
    rules = [(rule.get("alert", rule.get("record")), rule["expr"]) for rule in RULES]
    return [*rules, *((where, expr) for where, expr, _ in boards())]


def labels_of(name: str, metrics: dict[str, Any]) -> set[str]:
    """Return the labels that a series may be asked for by.

    Raises:
        KeyError: nothing has that name.
    """
    if name in RECORDED:
        return {"goal"}
    if name in OF_PROMETHEUS:
        return OF_PROMETHEUS[name] | OF_TARGETS
    le = {"le"} if name.endswith("_bucket") else set()
    return set(metrics[name].labels) | le | OF_TARGETS


def grouped_by(expr: str) -> set[str]:
    names = (it.strip() for group in GROUPING.findall(expr) for it in group.split(","))
    return {it for it in names if it}


def test_every_metric_and_label_that_is_asked_for_exists(metrics) -> None:
    """A misspelt one is no error in Prometheus, only an alert that never fires."""
    wrong = []
    for where, expr in asked():
        known: set[str] = set()
        for name, matchers in SELECTOR.findall(expr):
            try:
                labels = labels_of(name, metrics)
            except KeyError:
                wrong.append(f"{where}: {name}")
                continue
            known |= labels
            wrong += [
                f"{where}: {name} has no label {label}"
                for label, _, _ in MATCHER.findall(matchers)
                if label not in labels
            ]
        unknown = grouped_by(expr) - known
        wrong += [f"{where}: nothing has a label {label}" for label in unknown]
    assert wrong == []
    assert len(asked()) > 100


def test_legends_name_labels_that_the_query_leaves(metrics) -> None:
    for where, expr, legend in boards():
        left = grouped_by(expr)
        if not left:
            left = {it for name, _ in SELECTOR.findall(expr) for it in labels_of(name, metrics)}
        assert set(LEGEND.findall(legend)) <= left, where


def test_a_live_prometheus_tells_of_wrong_queries_and_legends() -> None:
    """What `deploy/grafana/ask.py` says of its answers."""
    faults = load("deploy/grafana/ask.py").faults
    lines = {"status": "success", "data": {"result": [{"metric": {"reason": "x"}}]}}
    assert faults("{{reason}} of all", lines) == []
    assert faults("{{ reason }}, {{model}}", lines) == ["no label model"]
    assert faults("{{model}}", {"status": "success", "data": {"result": []}}) == []
    assert faults("", {"status": "error", "error": "parse error"}) == ["parse error"]


def test_values_that_are_asked_for_can_come(metrics) -> None:
    """Buckets exist; and a rare counter begins at zero, or its first event would have no rate."""
    missing = []
    for where, expr in asked():
        for name, matchers in SELECTOR.findall(expr):
            wanted = {
                label: value for label, sign, value in MATCHER.findall(matchers) if sign == "="
            }
            if "le" in wanted:
                assert float(wanted["le"]) in LATENCY_BUCKETS_S, where
            elif name in metrics and metrics[name].kind == "counter" and wanted:
                begins = metrics[name].begins_with
                if not any(wanted.items() <= it.items() for it in begins):
                    missing.append(f"{where}: {name}{wanted}")
    assert missing == []


def test_what_raises_an_alert_by_its_events_begins_at_zero(metrics) -> None:
    """Also where all but some values count: a burst as a series' first value is no increase."""
    missing = [
        f"{name}: {metric}{{{matchers}}}"
        for name, rule in ALERTS.items()
        for metric, matchers in re.findall(
            r"increase\((headrace_\w+)(?:\{([^}]*)\})?\[", rule["expr"]
        )
        if metrics[metric].labels and not metrics[metric].begins_with
    ]
    assert missing == []


def test_no_metric_has_a_label_of_the_targets(metrics) -> None:
    """Prometheus would rename ours to exported_..., and whoever asks for it finds nothing."""
    assert [name for name, it in metrics.items() if set(it.labels) & OF_TARGETS] == []


def test_failures_are_the_errors_that_are_ours() -> None:
    """A new reason with a status of 5xx counts as a failure of the goal, or this fails."""
    ours = {it.reason for it in BY_REASON.values() if it.http_status >= 500}
    ours = (ours | {Internal.reason}) - {Unimplemented.reason}
    outcomes = [
        set(value.split("|"))
        for rule in RULES
        if rule.get("labels") == {"goal": "requests"}
        for _, matchers in SELECTOR.findall(rule["expr"])
        for _, _, value in MATCHER.findall(matchers)
    ]
    assert outcomes == [ours, ours | {"ok", "output_blocked"}]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"].keys() == {"summary", "runbook"}
    runbook = (ROOT / rule["annotations"]["runbook"]).read_text()
    assert f"`{name}`" in runbook
    for part in ("**Meaning.**", "**First look.**", "**Mitigation.**", "**Over when**"):
        assert part in runbook, part


def test_the_architecture_names_alerts_that_exist() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## 6.")[2].partition("## 7.")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    named = [re.findall(r"`(\w+)`", row[4]) for row in rows]
    assert all(named)
    assert {it for names in named for it in names} <= set(ALERTS)


def test_every_runbook_is_of_an_alert() -> None:
    pages = {f"docs/runbooks/{it.name}" for it in (ROOT / "docs/runbooks").glob("*.md")}
    linked = {rule["annotations"]["runbook"] for rule in ALERTS.values()}
    assert pages - linked == {"docs/runbooks/README.md"}


def test_each_alert_is_seen_to_fire_and_not_to_fire() -> None:
    """Each case begins with nothing firing; every alert fires in one of its file's."""
    for path in RULE_FILES:
        tests = yaml.safe_load((path.parents[1] / "tests" / path.name).read_text())["tests"]
        checks = [it for case in tests for it in case["promql_expr_test"]]
        assert all(case["promql_expr_test"][0]["exp_samples"] == [] for case in tests)
        fired = {
            re.search(r'alertname="(\w+)"', sample["labels"])[1]
            for check in checks
            for sample in check["exp_samples"]
        }
        groups = yaml.safe_load(path.read_text())["groups"]
        assert fired == {it["alert"] for group in groups for it in group["rules"] if "alert" in it}


def test_the_composition_has_what_it_mounts() -> None:
    """Rules and dashboards reach their containers; panels do not overlap."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = {
        target: ROOT / source
        for name in ("prometheus", "grafana")
        for source, target, *_ in (it.split(":") for it in services[name]["volumes"])
    }
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (rules,) = config["rule_files"]
    assert sorted(mounts["/etc/prometheus/rules"].glob(Path(rules).name)) == RULE_FILES
    provisioning = mounts["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/headrace.yml").read_text())[
        "providers"
    ]
    folder = mounts[provider["options"]["path"]]
    assert len(list(folder.glob("*.json"))) == 5
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounts[str(home.parent)] / home.name).exists()
    for path in folder.glob("*.json"):
        panels = json.loads(path.read_text())["panels"]
        assert len({it["id"] for it in panels}) == len(panels)
        places = [it["gridPos"] for it in panels]
        cells = [
            (x, y)
            for it in places
            for x in range(it["x"], it["x"] + it["w"])
            for y in range(it["y"], it["y"] + it["h"])
        ]
        assert len(cells) == len(set(cells)), path.name
        assert max(x for x, _ in cells) == 23

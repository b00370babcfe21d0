"""Write Grafana's dashboards from the tables below, or check that they are current.

Usage: ``python deploy/grafana/generate.py [--check | --queries]``. A panel is a title, a unit of
Grafana's and one query a line with its legend; everything else is the same for all panels. Two
panels a row. ``--queries`` prints all queries as a file of rules, which promtool can parse.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "boards"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 12, 8


@dataclass(frozen=True)
class Panel:
    """Lines over time; *queries* are pairs of PromQL and legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""


def panel(title: str, unit: str, *queries: tuple[str, str], help: str = "") -> Panel:
    """Make a panel."""
    return Panel(title, unit, queries, help)


def per_s(counter: str, by: str = "", match: str = "") -> str:
    """Return the query of a counter's rate, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{match}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Return the query of one counter's rate as a share of another's."""
    return f"{per_s(part)} / {per_s(whole)}"


def spread(histogram: str, match: str = "") -> tuple[tuple[str, str], ...]:
    """Return the queries of a histogram's median, 95th and 99th percentile."""
    rate = f"sum by (le) (rate({histogram}_bucket{match}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {rate})", f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


FLEET = (
    panel("Requests by outcome", "reqps",
          (per_s("headrace_gateway_requests_total", "outcome"), "{{outcome}}"),
          help="ok, output_blocked, or why not: the reasons are those of error bodies."),
    panel("Goals: what was missed, last hour", "percentunit",
          ("headrace:missed:ratio_1h", "{{goal}}"),
          ("headrace:goal_allowance", "allowed: {{goal}}"),
          help="Also over 5 m, 30 m, 6 h and 3 d: headrace:missed:ratio_*"),
    panel("Time to first token, streams", "s",
          *spread("headrace_gateway_ttft_seconds", '{way="stream"}')),
    panel("Time per further token, streams", "s", *spread("headrace_gateway_tpot_seconds")),
    panel("Time of each stage, 95th percentile", "s",
          ("histogram_quantile(0.95, sum by (stage, le) "
           "(rate(headrace_gateway_stage_seconds_bucket[$__rate_interval])))", "{{stage}}"),
          ("histogram_quantile(0.95, sum by (le) "
           "(rate(headrace_router_queue_seconds_bucket[$__rate_interval])))", "router queue"),
          ("histogram_quantile(0.95, sum by (le) "
           "(rate(headrace_worker_queue_seconds_bucket[$__rate_interval])))", "worker queue")),
    panel("Requests under way", "short",
          ("sum(headrace_gateway_running_requests)", "at gateways"),
          ("sum(headrace_router_waiting_requests)", "wait in routers"),
          ("sum(headrace_worker_waiting_requests)", "wait at workers"),
          ("sum(headrace_worker_running_requests)", "in batches")),
    panel("Tokens", "short", (per_s("headrace_gateway_tokens_total", "kind"), "{{kind}}/s")),
    panel("Done without", "reqps",
          (per_s("headrace_gateway_degraded_total", "dependency"), "{{dependency}}"),
          help="Requests served without an answer of a dependency: ARCHITECTURE.md, section 6."),
    panel("Ready", "short", ("sum by (service) (headrace_ready)", "{{service}}"),
          ("min by (model) (headrace_router_model_ready_replicas)", "workers of {{model}}")),
    panel("Memory", "bytes", ("process_resident_memory_bytes", "{{service}} {{instance}}")),
)  # fmt: skip

ROUTER = (
    panel("Prompt tokens found in caches", "percentunit",
          (share("headrace_router_actual_cached_tokens_total",
                 "headrace_worker_prefix_query_tokens_total"), "of all"),
          (share("headrace_router_actual_cached_tokens_total",
                 "headrace_router_predicted_cached_tokens_total"), "of those predicted"),
          help="Below 1 of those predicted: the index tells of blocks that are gone."),
    panel("Decisions and refusals", "reqps",
          (per_s("headrace_router_decisions_total", "policy"), "{{policy}}"),
          (per_s("headrace_router_refusals_total", "reason"), "refused: {{reason}}")),
    panel("First token: observed / predicted", "none",
          *spread("headrace_router_ttft_error_ratio"),
          help="1 = as predicted; the policies pick by the prediction."),
    panel("Time to decide", "s", *spread("headrace_router_decision_seconds")),
    panel("Time in the router's queues", "s", *spread("headrace_router_queue_seconds")),
    panel("Replicas", "short",
          ("max by (state) (headrace_router_replicas)", "{{state}}"),
          ("max(headrace_router_broken_replicas)", "breaker open")),
    panel("Taken to another replica", "reqps",
          (per_s("headrace_gateway_resumes_total", "reason"), "{{reason}}"),
          (per_s("headrace_gateway_retries_total", "outcome"), "retries {{outcome}}")),
    panel("Age of the prefix index", "s",
          ("headrace_router_index_staleness_seconds", "{{instance}}")),
    panel("Size of the prefix index", "short",
          ("headrace_router_index_entries", "blocks at {{instance}}"),
          ("sum(headrace_cache_index_publishers)", "workers that publish")),
    panel("Index: read again, Redis missed", "short",
          (per_s("headrace_router_index_rescans_total", "reason"), "{{reason}}/s"),
          (per_s("headrace_cache_index_store_failures_total"), "Redis missed/s")),
)  # fmt: skip

WORKERS = (
    panel("KV in use", "percentunit", ("headrace_worker_kv_used_ratio", "{{instance}}")),
    panel("Requests in the batch", "short",
          ("headrace_worker_running_requests", "{{instance}}"),
          ("headrace_worker_waiting_requests", "{{instance}} wait")),
    panel("Tokens computed", "short",
          (per_s("headrace_worker_tokens_total", "instance, kind"), "{{kind}}/s {{instance}}")),
    panel("Found in the prefix cache", "percentunit",
          ("sum by (instance) (rate(headrace_worker_prefix_hit_tokens_total[$__rate_interval])) / "
           "sum by (instance) (rate(headrace_worker_prefix_query_tokens_total[$__rate_interval]))",
           "{{instance}}")),
    panel("Duration of a step", "s", *spread("headrace_worker_step_duration_seconds")),
    panel("First token, from accepted", "s", *spread("headrace_worker_ttft_seconds")),
    panel("Time per further token", "s", *spread("headrace_worker_tpot_seconds")),
    panel("How requests end", "reqps",
          (per_s("headrace_worker_requests_total", "outcome"), "{{outcome}}"),
          (per_s("headrace_worker_preemptions_total"), "put back"),
          (per_s("headrace_worker_step_failures_total"), "steps that raised")),
    panel("Time without a step while there is work", "s",
          ("headrace_worker_stalled_seconds", "{{instance}}")),
)  # fmt: skip

GUARD = (
    panel("Verdicts", "reqps",
          (per_s("headrace_guard_verdicts_total", "direction, action"),
           "{{direction}} {{action}}")),
    panel("Findings", "reqps",
          (per_s("headrace_guard_findings_total", "category, action"), "{{category}} {{action}}")),
    panel("Time of a check: input", "s",
          *spread("headrace_guard_check_duration_seconds", '{direction="input"}')),
    panel("Time of a check: output", "s",
          *spread("headrace_guard_check_duration_seconds", '{direction="output"}')),
    panel("Could not be judged", "reqps",
          (per_s("headrace_guard_not_evaluated_total", "reason"), "{{reason}}"),
          (per_s("headrace_guard_fail_open_total"), "passed all the same")),
    panel("Went out unscanned", "short",
          ("sum by (kind) (headrace_guard_released_unscanned_total)", "{{kind}}"),
          help="leak must stay where it is: docs/runbooks/guard-leak.md"),
    panel("Characters held back", "short", *spread("headrace_guard_held_chars")),
    panel("Waiting", "short",
          ("sum(headrace_guard_long_texts_waiting)", "long texts"),
          ("sum(headrace_guard_embeddings_waiting)", "embeddings"),
          ("sum(headrace_guard_audit_waiting)", "audit records"),
          ("sum(headrace_guard_audit_unpublished)", "audit records for Kafka")),
)  # fmt: skip

MONEY = (
    panel("Admissions", "reqps",
          (per_s("headrace_ratelimit_decisions_total", "outcome, dimension"),
           "{{outcome}} {{dimension}}")),
    panel("Limits kept without Redis, without the rate limiter", "short",
          ("max(headrace_ratelimit_degraded)", "without Redis"),
          ("max(headrace_gateway_limiter_away)", "without the rate limiter"),
          ("sum(headrace_gateway_owed_settlements)", "settlements wait at gateways"),
          ("sum(headrace_ratelimit_kept_settlements)", "settlements wait for Redis")),
    panel("Outbox: oldest event", "s",
          ("headrace_gateway_outbox_oldest_age_seconds", "{{instance}}")),
    panel("Outbox: how full", "percentunit",
          ("headrace_gateway_outbox_pending_bytes / headrace_gateway_outbox_limit_bytes",
           "{{instance}}"),
          help="At 1 new requests are refused."),
    panel("Ledger: not booked yet", "short",
          ("sum(headrace_billing_consumer_lag_messages)", "messages"),
          ("max(headrace_billing_open_requests)", "open requests"),
          help="No line: Kafka cannot be asked."),
    panel("Ledger: booked", "reqps",
          (per_s("headrace_billing_events_booked_total", "kind, source"), "{{kind}} {{source}}"),
          (per_s("headrace_billing_failures_total", "part"), "{{part}} fails")),
    panel("Needs a person", "short",
          ("sum(headrace_billing_dead_letters_total)", "dead letters"),
          ("sum(headrace_billing_amount_mismatches_total)", "amounts that differ"),
          ("sum(headrace_gateway_unpriced_requests_total)", "requests without a price"),
          ("max by (of) (headrace_billing_reconcile_missing)", "reconcile misses: {{of}}"),
          ("max(headrace_billing_export_refused_requests)", "exports refused")),
    panel("Room on disks", "bytes", ("headrace_disk_free_bytes", "{{use}} {{instance}}")),
)  # fmt: skip

BOARDS = {
    "fleet": ("Fleet", FLEET),
    "router": ("Router and caches", ROUTER),
    "workers": ("Workers", WORKERS),
    "guard": ("Guard", GUARD),
    "money": ("Money", MONEY),
}


def board(uid: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """Render one dashboard."""
    return {
        "uid": f"headrace-{uid}",
        "title": f"Headrace: {title}",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable()]},
        "links": [_to_the_others()],
        "panels": [_alerts(), *(_lines(idx, it) for idx, it in enumerate(panels))],
    }


def _to_the_others() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "Headrace",
        "tags": ["headrace"],
        "asDropdown": False,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _alerts() -> dict[str, Any]:
    expr = 'sum by (alertname, severity) (ALERTS{alertstate="firing"})'
    return {
        "id": 1,
        "type": "stat",
        "title": "Alerts that fire",
        "description": "Nothing here is good. What to do: docs/runbooks.",
        "gridPos": {"h": 3, "w": 2 * WIDTH, "x": 0, "y": 0},
        "datasource": SOURCE,
        "targets": [_target(0, expr, "{{severity}}: {{alertname}}") | {"instant": True}],
        "fieldConfig": {
            "defaults": {"color": {"mode": "fixed", "fixedColor": "red"}, "noValue": "none"},
            "overrides": [],
        },
        "options": {
            "textMode": "name",
            "colorMode": "background",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        },
    }


def _lines(idx: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(idx, 2)
    return {
        "id": idx + 2,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": 3 + row * HEIGHT},
        "datasource": SOURCE,
        "targets": [_target(i, expr, legend) for i, (expr, legend) in enumerate(panel.queries)],
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
    }


def _target(idx: int, expr: str, legend: str) -> dict[str, Any]:
    return {"refId": chr(65 + idx), "datasource": SOURCE, "expr": expr, "legendFormat": legend}


def queries() -> list[str]:
    """Return every query of every dashboard as Prometheus is asked it."""
    boards = [board(uid, title, panels) for uid, (title, panels) in BOARDS.items()]
    targets = [it for one in boards for panel in one["panels"] for it in panel["targets"]]
    return sorted({it["expr"].replace("$__rate_interval", "1m") for it in targets})


def main() -> None:
    """Write all dashboards; ``--check``: compare, and exit 1 on a difference."""
    if "--queries" in sys.argv:
        # As rules, for promtool.
        rules = [{"record": f"q:{idx}", "expr": expr} for idx, expr in enumerate(queries())]
        sys.stdout.write(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
        return
    wanted = {
        FOLDER / f"{uid}.json": json.dumps(board(uid, title, panels), indent=1) + "\n"
        for uid, (title, panels) in BOARDS.items()
    }
    if "--check" not in sys.argv:
        for path, text in wanted.items():
            path.write_text(text)
        return
    there = {path: path.read_text() for path in FOLDER.glob("*.json")}
    if there != wanted:
        raise SystemExit("stale dashboards, run `make docs`")


if __name__ == "__main__":
    main()

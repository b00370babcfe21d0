"""The compose file and the launcher's plan describe the same fleet."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_common.settings import RpcServiceSettings
from headrace_launcher.plan import FleetOptions, num_ports, plan_fleet

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture(scope="module")
def planned() -> dict[str, set[str]]:
    """Names of the settings that the launcher gives each service for sure."""
    paths = dict.fromkeys(("state_dir", "model_path", "valkey_server", "kafka_broker"), Path("/x"))
    options = FleetOptions(host="h", port=1, num_workers=2, model_name="m", **paths)
    specs = plan_fleet(options, list(range(20_000, 20_000 + num_ports(options))))
    return {spec.name: set(spec.environment) for spec in specs if spec.environment}


def service_of(child: str) -> str:
    """Name the compose service of one of the launcher's children."""
    return "worker" if child.startswith("worker-") else child


def test_has_the_same_services_with_the_same_settings(compose, planned) -> None:
    """A setting that the launcher passes is passed by the compose file too."""
    for name, settings in planned.items():
        # Replicas are named after their containers.
        own = {"HEADRACE_WORKER_WORKER_ID", "HEADRACE_WORKER_ROLE"}
        given = set(compose["services"][service_of(name)]["environment"])
        assert settings - given - own == set(), name


def test_every_setting_exists(compose) -> None:
    """No variable of ours is misspelt: each is a field of the service's settings class."""
    import importlib

    from headrace_common.telemetry import TelemetrySettings

    known = {f"HEADRACE_TELEMETRY_{name}".upper() for name in TelemetrySettings.model_fields}
    for service in ("gateway", "router", "cache_index", "guard", "worker", "ratelimit", "billing"):
        module = importlib.import_module(f"headrace_{service}.settings")
        for cls in vars(module).values():
            if isinstance(cls, type) and getattr(cls, "prefix", ""):
                known |= {f"{cls.prefix}{name}".upper() for name in cls.model_fields}
    known |= {
        "HEADRACE_LAUNCHER_CACHE_DIR",
        "HEADRACE_LAUNCHER_BILLING_ADDRESS",
        "HEADRACE_LAUNCHER_GUARD_ADDRESS",
    }
    for name, service in compose["services"].items():
        ours = {v for v in service.get("environment", {}) if v.startswith("HEADRACE_")}
        assert ours - known == set(), name


def test_every_service_of_ours_is_watched_bounded_and_scraped(compose, planned) -> None:
    """Health check on /ready, restart, bounded logs; and a Prometheus target."""
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    fixed, replicas = config["scrape_configs"]
    scraped = {one["targets"][0] for one in fixed["static_configs"]}
    scraped |= {f"{name}:9100" for name in replicas["dns_sd_configs"][0]["names"]}
    assert scraped == {f"{service_of(name)}:9100" for name in planned}
    for name in map(service_of, planned):
        service = compose["services"][name]
        assert "9100" in service["healthcheck"]["test"][-1], name
        assert "GET /ready" in service["healthcheck"]["test"][-1], name
        assert service["restart"] == "unless-stopped", name
        assert service["logging"]["options"]["max-size"], name


def test_no_service_of_ours_may_do_more_than_it_needs(compose, planned) -> None:
    """No capabilities, no new privileges, nothing written but to volumes and /tmp."""
    for name in {*map(service_of, planned), "model-fetch", "admin"}:
        service = compose["services"][name]
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert (service["read_only"], service["tmpfs"]) == (True, ["/tmp"]), name


def test_who_waits_for_a_worker_may_take_as_long_as_one(compose) -> None:
    """A router without workers is not ready; were it called unhealthy, the start would fail."""
    checks = {name: compose["services"][name]["healthcheck"] for name in ("worker", "router")}
    assert checks["worker"]["start_period"] == checks["router"]["start_period"] == "900s"


def test_the_grace_to_stop_is_longer_than_the_drain(compose, planned) -> None:
    """Docker kills what has not ended by then."""
    drain_grace_s = RpcServiceSettings.model_fields["drain_grace_s"].default
    for name in map(service_of, planned):
        grace = compose["services"][name]["stop_grace_period"]
        assert int(grace.removesuffix("s")) >= drain_grace_s + 5, name


def test_gateways_can_be_told_to_share_ports_and_outbox(compose) -> None:
    """As many as are started know of one another, and each finds a seat."""
    gateway = compose["services"]["gateway"]
    assert gateway["scale"] == gateway["environment"]["HEADRACE_GATEWAY_NUM_REPLICAS"]
    assert gateway["environment"]["HEADRACE_GATEWAY_OUTBOX_SEATS"] >= 2
    assert gateway["environment"]["HEADRACE_GATEWAY_STATE_URL"].startswith("postgresql")


def test_secrets_come_from_the_environment_file_only(compose) -> None:
    """No password in the compose file; .env.example names every variable that is asked for."""
    text = (ROOT / "docker-compose.yml").read_text()
    asked = set(re.findall(r"\$\{([A-Z_]+)", text))
    named = set(re.findall(r"^([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M))
    assert asked == named
    assert "change-me" not in text


def test_only_loopback_is_published_by_default(compose) -> None:
    """Everything else is reachable inside the compose network only."""
    published = [p for s in compose["services"].values() for p in s.get("ports", [])]
    assert published
    assert all(p.startswith(("127.0.0.1:", "${HEADRACE_BIND:-127.0.0.1}:")) for p in published)

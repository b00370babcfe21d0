"""The compose file and the launcher's plan describe the same fleet."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_has_the_same_services_with_the_same_settings(compose, planned) -> None:
    """A setting that the launcher passes is passed by the compose file too."""
    for name, settings in planned.items():
        assert name in compose["services"]
        given = set(compose["services"][name]["environment"])
        assert settings - given == set(), name


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
    scraped = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    for name in planned:
        service = compose["services"][name]
        assert "9100/ready" in service["healthcheck"]["test"][-1], name
        assert service["restart"] == "unless-stopped", name
        assert service["logging"]["options"]["max-size"], name
        assert f"{name}:9100" in scraped


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

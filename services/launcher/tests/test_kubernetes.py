"""The manifests describe the fleet of the compose file, and what they name is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_common.settings import RpcServiceSettings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
MANIFESTS: list[dict[str, Any]] = [
    one for path in FILES for one in yaml.safe_load_all(path.read_text())
]
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PRE_STOP_S = 5
# Compose's own: seats on one volume, and policies that one guard takes for all.
ONLY_IN_COMPOSE = {"HEADRACE_GATEWAY_OUTBOX_SEATS", "HEADRACE_GUARD_POLICY_DIR"}


def of_kind(*kinds: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in MANIFESTS if one["kind"] in kinds}


WORKLOADS = of_kind("Deployment", "StatefulSet")


def pod(name: str) -> dict[str, Any]:
    return WORKLOADS[name]["spec"]["template"]["spec"]


def service_container(name: str) -> dict[str, Any]:
    (container,) = pod(name)["containers"]
    return container


def environment(name: str) -> dict[str, Any]:
    return {it["name"]: it.get("value", it) for it in service_container(name)["env"]}


def test_all_files_are_applied() -> None:
    """A forgotten one would only be noticed on a cluster."""
    assert KUSTOMIZATION["resources"] == [path.name for path in FILES]
    containers = [c for name in WORKLOADS for c in all_containers(name)]
    assert {c["image"] for c in containers} == {it["name"] for it in KUSTOMIZATION["images"]}


def all_containers(name: str) -> list[dict[str, Any]]:
    return [*pod(name)["containers"], *pod(name).get("initContainers", [])]


def test_settings_are_those_of_the_compose_file_and_exist() -> None:
    """A setting too few falls back to loopback; a misspelt one keeps the service from starting."""
    for name in WORKLOADS:
        given = set(environment(name))
        wanted = set(COMPOSE[name]["environment"])
        wanted = {it for it in wanted if not it.startswith("HEADRACE_TELEMETRY_")}
        assert wanted - given == ONLY_IN_COMPOSE & wanted, name
        prefix = f"HEADRACE_{name.replace('-', '_').upper()}_"
        settings = importlib.import_module(f"headrace_{name.replace('-', '_')}.settings")
        classes = [it for it in vars(settings).values() if getattr(it, "prefix", "") == prefix]
        fields = {f"{prefix}{field}".upper() for it in classes for field in it.model_fields}
        assert given - fields == set(), name


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_may_do_no_more_than_it_needs(name: str) -> None:
    """No root, no capabilities, no token of the cluster's, nothing written but to volumes."""
    context = pod(name)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == 10001
    assert pod(name)["automountServiceAccountToken"] is False
    # Variables of a Service named headrace-... would be refused as unknown settings.
    assert pod(name)["enableServiceLinks"] is False
    for container in all_containers(name):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        volumes = {it["name"] for it in pod(name)["volumes"]}
        claims = WORKLOADS[name]["spec"].get("volumeClaimTemplates", [])
        volumes |= {it["metadata"]["name"] for it in claims}
        assert {it["name"] for it in container["volumeMounts"]} <= volumes


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_gets_work_only_while_ready_and_time_to_drain(name: str) -> None:
    """Readiness is asked of /ready; only a process that is dead is started anew."""
    container = service_container(name)
    # A gateway is in the Service from its first /ready on, so that it can tell what is away.
    asked_ready, asked_alive = "readinessProbe", "startupProbe"
    if name == "gateway":
        asked_ready, asked_alive = asked_alive, asked_ready
    assert container[asked_ready]["httpGet"] == {"path": "/ready", "port": "metrics"}
    for probe in ("livenessProbe", asked_alive):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "metrics"}
    assert {"name": "metrics", "containerPort": 9100} in container["ports"]
    assert environment(name)[f"HEADRACE_{name.replace('-', '_').upper()}_METRICS_LISTEN"].endswith(
        ":9100"
    )
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PRE_STOP_S)]
    drain_grace_s = RpcServiceSettings.model_fields["drain_grace_s"].default
    assert pod(name)["terminationGracePeriodSeconds"] >= PRE_STOP_S + drain_grace_s + 10


def test_a_gateway_outwaits_the_first_start_of_the_workers() -> None:
    """They fetch and prepare a model meanwhile, and it would be killed for their slowness."""

    def allowed_s(name: str) -> int:
        probe = service_container(name)["startupProbe"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert allowed_s("gateway") >= 10 * 60
    # Nobody else's start waits for others, so a minute tells a dead one.
    assert {allowed_s(name) for name in WORKLOADS if name != "gateway"} == {60}


def test_addresses_name_a_service_and_its_port() -> None:
    """Every host:port that a pod is given is served by pods that listen there."""
    served = {}
    for name, service in of_kind("Service").items():
        (target,) = [w for w in WORKLOADS.values() if labels_of(w) == service["spec"]["selector"]]
        ports = {p["name"]: p for p in service_container(target["metadata"]["name"])["ports"]}
        for port in service["spec"]["ports"]:
            served[f"{name}:{port['port']}"] = ports[port["targetPort"]]["containerPort"]
    named = {
        value.removeprefix("dns:")
        for name in WORKLOADS
        for key, value in environment(name).items()
        if isinstance(value, str) and re.search(r"_(ADDRESS|WORKERS)$", key)
    }
    assert named
    assert named - set(served) == set()


def labels_of(workload: dict[str, Any]) -> dict[str, str]:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    return labels


def test_routers_find_each_worker_by_itself() -> None:
    """A name with one address for all would hide the workers behind it."""
    name, _, port = (
        environment("router")["HEADRACE_ROUTER_WORKERS"].partition(":")[2].partition(":")
    )
    workers = of_kind("Service")[name]["spec"]
    assert workers["clusterIP"] == "None" or workers["clusterIP"] is None
    assert workers["ports"][0]["port"] == int(port)


def test_what_has_replicas_keeps_most_of_them_through_a_node_s_maintenance() -> None:
    """One at a time may be evicted, and one that serves nobody at any time."""
    budgets = of_kind("PodDisruptionBudget")
    several = {name for name, one in WORKLOADS.items() if one["spec"]["replicas"] > 1}
    assert set(budgets) == several
    for name, budget in budgets.items():
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert budget["spec"]["selector"]["matchLabels"] == labels_of(WORKLOADS[name])


def test_shares_are_of_as_many_as_there_may_be() -> None:
    """While the limiter or Redis is away, all shares together must not be more than the limit."""
    most = of_kind("HorizontalPodAutoscaler")["gateway"]["spec"]["maxReplicas"]
    assert environment("gateway")["HEADRACE_GATEWAY_NUM_REPLICAS"] == str(most)
    replicas = WORKLOADS["ratelimit"]["spec"]["replicas"]
    assert environment("ratelimit")["HEADRACE_RATELIMIT_NUM_REPLICAS"] == str(replicas)


def test_where_the_stores_are_comes_from_a_secret() -> None:
    """No password, and no address of a store, in a manifest."""
    for name in WORKLOADS:
        for key, value in environment(name).items():
            if re.search(r"_(REDIS_URL|KAFKA_BOOTSTRAP|DATABASE_URL|STATE_URL)$", key):
                assert value["valueFrom"]["secretKeyRef"]["name"] == "headrace-stores"


def test_only_the_public_api_may_be_called_from_outside() -> None:
    """Services trust their callers; billing's admin API asks for no key."""
    inside, public = of_kind("NetworkPolicy").values()
    part_of = {"app.kubernetes.io/part-of": "headrace"}
    assert inside["spec"]["podSelector"]["matchLabels"] == part_of
    own, metrics = inside["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": part_of}}]}
    assert metrics == {"ports": [{"port": 9100}]}
    assert public["spec"]["podSelector"]["matchLabels"] == labels_of(WORKLOADS["gateway"])
    assert public["spec"]["ingress"] == [{"ports": [{"port": 8080}]}]

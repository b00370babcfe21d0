"""What a fleet is made of: pure, from options and free ports to the list of processes to run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from headrace_common.settings import join_address
from headrace_launcher.fleet_view import Role
from headrace_launcher.upstream_file import Upstream

_SERVICE_START_S = 60.0
_WORKER_START_S = 600.0  # a big model, a cold disk
# Services that are ready only once some worker is.
_AFTER_WORKERS = ("router", "gateway")
_STORE_STOP_S = 10.0
_STOP_MARGIN_S = 5.0


# Opened once the model is prepared; workers wait for it.
MODEL_GATE = "model"


class ProbeKind(StrEnum):
    """How a child is asked whether it is ready."""

    HTTP = "http"
    REDIS = "redis"
    KAFKA = "kafka"


@dataclass(frozen=True)
class FleetOptions:
    """What an operator chooses, resolved: programs exist, the model is prepared."""

    state_dir: Path
    host: str
    port: int
    num_workers: int
    model_path: Path
    model_name: str
    valkey_server: Path
    kafka_broker: Path
    redis_url: str = ""
    kafka_bootstrap: str = ""
    kafka_max_bytes: int = 256 * 2**20
    database_url: str = ""
    drain_grace_s: float = 20.0
    num_cpus: int = 1
    # The last ones, which only compute prompts for the others.
    num_prefill_workers: int = 0
    # None = in the state directory.
    model_routes_file: Path | None = None
    # Engines of another make, by name of their worker.
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)
    # Of the guard; None = it goes without.
    embedding_dir: Path | None = None
    # Each on a port of its own: `port` and those after it.
    num_gateways: int = 1


@dataclass(frozen=True)
class ChildSpec:
    """One process: how to start it, how to know it is ready, when to start and when to stop it."""

    name: str
    role: Role
    argv: tuple[str, ...]
    address: str
    probe: ProbeKind
    # Children that must be ready, and gates that must be open, before this one starts.
    needs: tuple[str, ...]
    # Lower stages are stopped first; those of one stage together.
    stop_stage: int
    metrics_address: str = ""
    admin_address: str = ""
    # Wins over the environment / only fills gaps in it.
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    # Names the setting by which the child is told the descriptor of its listening socket. The
    # supervisor holds that socket, so connections wait in it while the child starts again.
    listen_fd_setting: str = ""
    # Likewise for the line by which it hands over (`headrace_common.succession`).
    succession_fd_setting: str = ""
    start_timeout_s: float = _SERVICE_START_S
    stop_grace_s: float = _STORE_STOP_S
    # With more memory it starts anew: for what keeps there only what nobody needs of it again.
    max_memory_bytes: int | None = None

    @property
    def shows_loading(self) -> bool:
        """Whether it can be asked how far it has loaded."""
        return self.role is Role.WORKER


# Where callers wait for nobody else: the next process starts while the last one still serves.
_HAND_OVER = ("gateway", "guard")
# Gateways of one outbox at a time: one, its successor, those that still drain, one left by another.
_NUM_SEATS = 8
# Order of start; the stores come before, workers after the router, the gateway last.
_SERVICES = ("billing", "cache-index", "router", "guard", "ratelimit")
# Redis shares the cores of one machine with everything here: it may be late without being away.
_DEFAULTS = {
    "ratelimit": {"HEADRACE_RATELIMIT_REDIS_TIMEOUT_S": "0.2"},
    # Two threads for products of a few rows by the words stage's weights only wait for one another.
    "guard": {"OPENBLAS_NUM_THREADS": "1"},
}
# Not the router: it is ready only with a worker, and both start up side by side with the gateway.
_GATEWAY_NEEDS = ("billing", "guard", "ratelimit")
_STOP_STAGE = {
    "gateway": 0, "worker": 1, "router": 2, "guard": 2, "ratelimit": 2, "cache-index": 2,
    "billing": 3, "kafka": 4, "valkey": 4,
}  # fmt: skip


def num_ports(options: FleetOptions) -> int:
    """Return how many inner ports the fleet may need."""
    num_workers = options.num_workers + len(options.upstreams)
    return 2 + 2 * len(_SERVICES) + 2 * num_workers + options.num_gateways + 1


def gateway_name(number: int) -> str:
    """Name a gateway by its number, from 1."""
    return "gateway" if number == 1 else f"gateway-{number}"


def plan_fleet(options: FleetOptions, ports: list[int]) -> list[ChildSpec]:
    """List the children in the order in which they start.

    Args:
        options: the choices.
        ports: free ports on the loopback address, at least `num_ports` of them.
    """
    return _Planner(options, ports).children()


class _Planner:
    def __init__(self, options: FleetOptions, ports: list[int]) -> None:
        self._options = options
        inner = iter(f"127.0.0.1:{port}" for port in ports)
        self._valkey, self._kafka = next(inner), next(inner)
        self._address = {name: next(inner) for name in _SERVICES}
        self._workers = [(next(inner), next(inner)) for _ in range(options.num_workers)]
        self._upstreams = {name: (next(inner), next(inner)) for name in options.upstreams}
        self._gateways = [gateway_name(n + 1) for n in range(options.num_gateways)]
        self._metrics = {name: next(inner) for name in (*_SERVICES, *self._gateways)}
        self._admin = next(inner)
        for n, name in enumerate(self._gateways):
            self._address[name] = join_address(options.host, options.port + n)
        self._redis_url = options.redis_url or f"redis://{self._valkey}/0"
        self._bootstrap = options.kafka_bootstrap or self._kafka

    def children(self) -> list[ChildSpec]:
        stores = [
            *([] if self._options.redis_url else [self._valkey_server()]),
            *([] if self._options.kafka_bootstrap else [self._kafka_broker()]),
        ]
        store_names = tuple(store.name for store in stores)
        services = [self._service(name, store_names) for name in _SERVICES]
        worker_needs = (*store_names, MODEL_GATE)
        workers = [self._worker(idx, worker_needs) for idx in range(len(self._workers))]
        upstreams = [self._upstream(name, store_names) for name in self._upstreams]
        gateways = [self._service("gateway", _GATEWAY_NEEDS, it) for it in self._gateways]
        return [*stores, *services, *workers, *upstreams, *gateways]

    def _valkey_server(self) -> ChildSpec:
        host, _, port = self._valkey.rpartition(":")
        argv = (
            str(self._options.valkey_server), "--bind", host, "--port", port,
            "--dir", str(self._options.state_dir / "valkey"), "--appendonly", "yes",
            "--appendfsync", "everysec", "--save", "", "--daemonize", "no",
            "--set-proc-title", "no",  # keep the folder in the list of processes
        )  # fmt: skip
        return self._store("valkey", argv, self._valkey, ProbeKind.REDIS)

    def _kafka_broker(self) -> ChildSpec:
        url = f"tcp://{self._kafka}"
        argv = (
            str(self._options.kafka_broker), "broker", "--listener-url", url,
            "--advertised-listener-url", url, "--storage-engine", "memory://tansu/",
        )  # fmt: skip
        # It forgets nothing by itself, whatever a topic's retention says, and what was lost with it
        # and is not booked is produced again (ADR 5, 8).
        store = self._store("kafka", argv, self._kafka, ProbeKind.KAFKA)
        return replace(store, max_memory_bytes=self._options.kafka_max_bytes)

    def _store(self, name: str, argv: tuple[str, ...], address: str, probe: ProbeKind) -> ChildSpec:
        return ChildSpec(
            name=name,
            role=Role.STORE,
            argv=argv,
            address=address,
            probe=probe,
            needs=(),
            stop_stage=_STOP_STAGE[name],
        )

    def _service(self, name: str, needs: tuple[str, ...], own_name: str = "") -> ChildSpec:
        own_name = own_name or name
        prefix = f"HEADRACE_{name.replace('-', '_').upper()}_"
        own = {
            "LISTEN": self._address[own_name],
            "METRICS_LISTEN": self._metrics[own_name],
            **self._wiring(name, own_name),
        }
        return ChildSpec(
            name=own_name,
            role=Role.SERVICE,
            argv=_module(name),
            address=self._address[own_name],
            metrics_address=self._metrics[own_name],
            admin_address=self._admin if name == "billing" else "",
            probe=ProbeKind.HTTP,
            needs=needs,
            stop_stage=_STOP_STAGE[name],
            environment={prefix + key: value for key, value in own.items()},
            defaults={**self._common_defaults(prefix), **_DEFAULTS.get(name, {})},
            listen_fd_setting=prefix + "LISTEN_FD" if name in _HAND_OVER else "",
            succession_fd_setting=prefix + "SUCCESSION_FD" if name in _HAND_OVER else "",
            stop_grace_s=self._options.drain_grace_s + _STOP_MARGIN_S,
            start_timeout_s=_WORKER_START_S if name in _AFTER_WORKERS else _SERVICE_START_S,
        )

    def _wiring(self, name: str, own_name: str) -> dict[str, str]:
        state_dir = self._options.state_dir
        match name:
            case "gateway":
                peers = ("router", "guard", "ratelimit", "billing")
                addresses = {f"{peer.upper()}_ADDRESS": self._address[peer] for peer in peers}
                # An outbox has one writer; what is kept for callers is shared by all gateways.
                outbox = str(state_dir / own_name.replace("gateway", "outbox", 1))
                state = f"sqlite:///{state_dir / 'gateway.sqlite3'}"
                routes = self._options.model_routes_file or state_dir / "model-routes.toml"
                stores = {
                    "OUTBOX_DIR": outbox, "OUTBOX_SEATS": str(_NUM_SEATS), "STATE_URL": state,
                }  # fmt: skip
                return {
                    **addresses,
                    **stores,
                    "KAFKA_BOOTSTRAP": self._bootstrap,
                    "MODEL_ROUTES_FILE": str(routes),
                    "NUM_REPLICAS": str(len(self._gateways)),
                }
            case "router":
                both = (*self._workers, *self._upstreams.values())
                workers = ",".join(address for address, _ in both)
                return {"REDIS_URL": self._redis_url, "WORKERS": workers}
            case "cache-index":
                return {"REDIS_URL": self._redis_url}
            case "ratelimit":
                address = self._address["billing"]
                return {"REDIS_URL": self._redis_url, "BILLING_ADDRESS": address}
            case "guard":
                folder, embedding = state_dir / "guard", self._options.embedding_dir
                return {
                    **({"EMBEDDING_DIR": str(embedding)} if embedding else {}),
                    "KAFKA_BOOTSTRAP": self._bootstrap,
                    "AUDIT_DIR": str(folder / "audit"),
                    "POLICY_DIR": str(folder / "policies"),
                }
            case "billing":
                url = self._options.database_url or f"sqlite:///{state_dir / 'billing.sqlite3'}"
                return {
                    "DATABASE_URL": url,
                    "KAFKA_BOOTSTRAP": self._bootstrap,
                    "ADMIN_LISTEN": self._admin,
                    "GUARD_ADDRESS": self._address["guard"],
                }
            case _:
                return {}

    def _pool_role(self, idx: int) -> str:
        num_prefill = self._options.num_prefill_workers
        if not num_prefill:
            return "both"
        return "prefill" if idx >= len(self._workers) - num_prefill else "decode"

    def _worker(self, idx: int, needs: tuple[str, ...]) -> ChildSpec:
        address, metrics_address = self._workers[idx]
        name, prefix = f"worker-{idx + 1}", "HEADRACE_WORKER_"
        own = {
            "LISTEN": address,
            "METRICS_LISTEN": metrics_address,
            "WORKER_ID": name,
            "MODEL_PATH": str(self._options.model_path),
            "MODEL_NAME": self._options.model_name,
            "CACHE_INDEX_ADDRESS": self._address["cache-index"],
            "KAFKA_BOOTSTRAP": self._bootstrap,
            "ROLE": self._pool_role(idx),
        }
        # Workers leave cores to one another by themselves; torch, in what it does, would not.
        num_threads = str(max(1, self._options.num_cpus))
        torch_threads = str(max(1, self._options.num_cpus // len(self._workers)))
        return ChildSpec(
            name=name,
            role=Role.WORKER,
            argv=_module("worker"),
            address=address,
            metrics_address=metrics_address,
            probe=ProbeKind.HTTP,
            needs=needs,
            stop_stage=_STOP_STAGE["worker"],
            environment={prefix + key: value for key, value in own.items()},
            defaults={
                **self._common_defaults(prefix),
                "HEADRACE_WORKER_NUM_THREADS": num_threads,
                "OMP_NUM_THREADS": torch_threads,
            },
            start_timeout_s=_WORKER_START_S,
            stop_grace_s=self._options.drain_grace_s + _STOP_MARGIN_S,
        )

    def _upstream(self, name: str, needs: tuple[str, ...]) -> ChildSpec:
        address, metrics_address = self._upstreams[name]
        prefix = "HEADRACE_UPSTREAM_"
        own = {
            **self._options.upstreams[name].environment(),
            "LISTEN": address,
            "METRICS_LISTEN": metrics_address,
            "WORKER_ID": name,
            "KAFKA_BOOTSTRAP": self._bootstrap,
        }
        return ChildSpec(
            name=name,
            role=Role.SERVICE,
            argv=(sys.executable, "-m", "headrace_worker.upstream"),
            address=address,
            metrics_address=metrics_address,
            probe=ProbeKind.HTTP,
            needs=needs,
            stop_stage=_STOP_STAGE["worker"],
            environment={prefix + key: value for key, value in own.items()},
            defaults=self._common_defaults(prefix),
            stop_grace_s=self._options.drain_grace_s + _STOP_MARGIN_S,
        )

    def _common_defaults(self, prefix: str) -> dict[str, str]:
        return {
            prefix + "DRAIN_GRACE_S": str(self._options.drain_grace_s),
            "HEADRACE_TELEMETRY_TRACE_DIR": str(self._options.state_dir / "traces"),
            "HEADRACE_TELEMETRY_SAMPLE_RATIO": "1",
        }


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"headrace_{name.replace('-', '_')}")

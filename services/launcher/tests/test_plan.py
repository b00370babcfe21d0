"""What a fleet is made of."""

import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_common.settings import SettingsError
from headrace_launcher.fleet_view import Role
from headrace_launcher.plan import MODEL_GATE, ChildSpec, FleetOptions, num_ports, plan_fleet
from headrace_launcher.upstream_file import load_upstreams

PORTS = list(range(20_000, 20_100))


def plan(**changes: Any) -> dict[str, ChildSpec]:
    values: dict[str, Any] = {
        "state_dir": Path("/state"),
        "host": "127.0.0.1",
        "port": 8080,
        "num_workers": 2,
        "model_path": Path("/model"),
        "model_name": "m",
        "valkey_server": Path("/bin/valkey-server"),
        "kafka_broker": Path("/bin/tansu"),
        "num_cpus": 8,
    }
    options = FleetOptions(**{**values, **changes})
    return {spec.name: spec for spec in plan_fleet(options, PORTS[: num_ports(options)])}


def test_lists_every_part_in_the_order_of_its_start() -> None:
    """Stores, services, workers, and the gateway last."""
    assert list(plan()) == [
        "valkey", "kafka", "billing", "cache-index", "router", "guard", "ratelimit", "worker-1",
        "worker-2", "gateway",
    ]  # fmt: skip


def test_the_guard_is_told_where_its_embedding_model_is() -> None:
    """Only if there is one; the guard does without."""
    name = "HEADRACE_GUARD_EMBEDDING_DIR"
    assert plan(embedding_dir=Path("/models/e"))["guard"].environment[name] == "/models/e"
    assert name not in plan()["guard"].environment


def test_only_the_broker_may_start_anew_for_its_memory() -> None:
    """All else holds what it needs: limits in valkey, streams in workers."""
    bounds = {name: spec.max_memory_bytes for name, spec in plan(kafka_max_bytes=2**25).items()}
    assert bounds.pop("kafka") == 2**25
    assert set(bounds.values()) == {None}


def test_stops_the_gateway_first_and_the_stores_last() -> None:
    """What takes requests leaves before what serves it."""
    stage = {name: spec.stop_stage for name, spec in plan().items()}
    assert stage["gateway"] < stage["worker-1"] == stage["worker-2"] < stage["router"]
    assert stage["router"] < stage["billing"] < stage["kafka"] == stage["valkey"]


def test_no_two_parts_share_an_address_and_all_but_the_gateway_are_on_loopback() -> None:
    """Every service and every metrics page has a port of its own."""
    specs = plan(host="0.0.0.0").values()
    addresses = [s.address for s in specs] + [s.metrics_address for s in specs if s.metrics_address]
    assert len(set(addresses)) == len(addresses) == 2 + 2 * 8
    assert [a for a in addresses if not a.startswith("127.0.0.1:")] == ["0.0.0.0:8080"]


def test_who_listens_on_sockets_that_the_supervisor_holds_and_hands_over() -> None:
    """Those whose callers have nobody else to ask; two of one outbox need a seat each."""
    handed = {
        name: (it.listen_fd_setting, it.succession_fd_setting)
        for name, it in plan(num_gateways=2).items()
        if it.listen_fd_setting or it.succession_fd_setting
    }
    gateway = "HEADRACE_GATEWAY_LISTEN_FD", "HEADRACE_GATEWAY_SUCCESSION_FD"
    guard = "HEADRACE_GUARD_LISTEN_FD", "HEADRACE_GUARD_SUCCESSION_FD"
    assert handed == {"gateway": gateway, "gateway-2": gateway, "guard": guard}
    assert int(plan()["gateway"].environment["HEADRACE_GATEWAY_OUTBOX_SEATS"]) > 2


def test_several_gateways_share_all_but_port_and_outbox() -> None:
    """Each writes an outbox of its own; what is kept for callers is there for all of them."""
    specs = plan(num_gateways=3)
    gateways = [spec for name, spec in specs.items() if name.startswith("gateway")]
    assert [it.name for it in gateways] == ["gateway", "gateway-2", "gateway-3"]
    assert [it.address for it in gateways] == [f"127.0.0.1:{port}" for port in (8080, 8081, 8082)]
    assert len({it.metrics_address for it in gateways}) == 3
    own = {"LISTEN", "METRICS_LISTEN", "OUTBOX_DIR"}
    prefix = "HEADRACE_GATEWAY_"
    outboxes = {it.environment[prefix + "OUTBOX_DIR"] for it in gateways}
    assert outboxes == {"/state/outbox", "/state/outbox-2", "/state/outbox-3"}
    shared = [
        {k: v for k, v in it.environment.items() if k.removeprefix(prefix) not in own}
        for it in gateways
    ]
    assert shared[0] == shared[1] == shared[2]


def test_wires_the_services_to_each_other() -> None:
    """Each address that a service is given is the address that the other one listens on."""
    specs = plan()
    gateway = specs["gateway"].environment
    for peer in ("router", "guard", "ratelimit", "billing"):
        assert gateway[f"HEADRACE_GATEWAY_{peer.upper()}_ADDRESS"] == specs[peer].address
    workers = ",".join(specs[name].address for name in ("worker-1", "worker-2"))
    assert specs["router"].environment["HEADRACE_ROUTER_WORKERS"] == workers
    for name in ("router", "cache-index", "ratelimit"):
        prefix = f"HEADRACE_{name.replace('-', '_').upper()}_"
        assert (
            specs[name].environment[prefix + "REDIS_URL"] == f"redis://{specs['valkey'].address}/0"
        )
    kafka = specs["kafka"].address
    assert gateway["HEADRACE_GATEWAY_KAFKA_BOOTSTRAP"] == kafka
    assert specs["billing"].environment["HEADRACE_BILLING_KAFKA_BOOTSTRAP"] == kafka
    worker = specs["worker-2"].environment
    assert worker["HEADRACE_WORKER_CACHE_INDEX_ADDRESS"] == specs["cache-index"].address
    assert worker["HEADRACE_WORKER_WORKER_ID"] == "worker-2"
    assert worker["HEADRACE_WORKER_MODEL_PATH"] == "/model"


def test_redis_beside_everything_else_gets_more_time() -> None:
    """It may be late without being away; the environment may still say otherwise."""
    assert plan()["ratelimit"].defaults["HEADRACE_RATELIMIT_REDIS_TIMEOUT_S"] == "0.2"


def test_every_service_runs_as_its_module_with_this_python() -> None:
    """``python -m headrace_x``, also when the service's name has a hyphen."""
    specs = plan()
    assert specs["cache-index"].argv == (sys.executable, "-m", "headrace_cache_index")
    assert specs["worker-2"].argv == (sys.executable, "-m", "headrace_worker")


def test_stores_of_the_operator_are_used_instead_of_embedded_ones() -> None:
    """With URLs given, neither valkey-server nor the broker is started or waited for."""
    specs = plan(
        redis_url="redis://r:1/0", kafka_bootstrap="k:2", database_url="postgresql+psycopg://d"
    )
    assert not [spec for spec in specs.values() if spec.role is Role.STORE]
    assert specs["billing"].needs == ()
    assert specs["ratelimit"].environment["HEADRACE_RATELIMIT_REDIS_URL"] == "redis://r:1/0"
    assert specs["gateway"].environment["HEADRACE_GATEWAY_KAFKA_BOOTSTRAP"] == "k:2"
    billing = specs["billing"].environment
    assert billing["HEADRACE_BILLING_DATABASE_URL"] == "postgresql+psycopg://d"


@pytest.mark.parametrize(
    ("num_cpus", "workers", "threads"), [(2, 2, "1"), (8, 2, "4"), (2, 4, "1")]
)
def test_workers_share_the_cores(num_cpus: int, workers: int, threads: str) -> None:
    """A worker may use all cores, torch its share, at least one; an operator's value would win."""
    defaults = plan(num_cpus=num_cpus, num_workers=workers)["worker-1"].defaults
    assert defaults["HEADRACE_WORKER_NUM_THREADS"] == str(num_cpus)
    assert defaults["OMP_NUM_THREADS"] == threads


def test_the_guard_multiplies_in_one_thread() -> None:
    """Its matrices are small; an operator's value would win."""
    assert plan()["guard"].defaults["OPENBLAS_NUM_THREADS"] == "1"


def test_the_public_listener_is_where_the_operator_wants_it() -> None:
    """``--host`` and ``--port`` are the gateway's."""
    specs = plan(host="0.0.0.0", port=9999)
    assert specs["gateway"].environment["HEADRACE_GATEWAY_LISTEN"] == "0.0.0.0:9999"


def test_what_waits_for_a_worker_gets_its_time_to_start() -> None:
    """The router is ready once some worker is: a slow model must not fail it."""
    specs = plan()
    slow = {name for name, spec in specs.items() if spec.start_timeout_s > 60}
    assert slow == {"router", "gateway"} | {name for name in specs if name.startswith("worker")}


def test_upstreams_are_workers_to_the_router(tmp_path: Path) -> None:
    """One adapter each; the key stays in its file."""
    path = tmp_path / "upstreams.toml"
    path.write_text(
        'version = 1\n[upstreams.gpu-box]\nurl = "http://h:8000/v1"\nmodel = "q"\n'
        'api_key_file = "/run/key"\ncontinuous_usage = true\ncache_salt = true'
    )
    children = plan(upstreams=load_upstreams(path))
    adapter = children["gpu-box"]
    assert adapter.argv[-1] == "headrace_worker.upstream"
    assert adapter.environment["HEADRACE_UPSTREAM_URL"] == "http://h:8000/v1"
    assert adapter.environment["HEADRACE_UPSTREAM_API_KEY_FILE"] == "/run/key"
    assert adapter.environment["HEADRACE_UPSTREAM_CONTINUOUS_USAGE"] == "true"
    assert adapter.environment["HEADRACE_UPSTREAM_CACHE_SALT"] == "true"
    assert adapter.address in children["router"].environment["HEADRACE_ROUTER_WORKERS"].split(",")
    routes = children["gateway"].environment["HEADRACE_GATEWAY_MODEL_ROUTES_FILE"]
    assert routes == "/state/model-routes.toml"
    path.write_text('version = 1\n[upstreams.x]\nurl = "http://user:secret@h/v1"\nmodel = "q"')
    with pytest.raises(SettingsError, match="url"):
        load_upstreams(path)


def test_no_upstream_is_named_as_a_part_of_the_fleet(tmp_path: Path) -> None:
    """It would share that one's log, gate and place in the index."""
    path = tmp_path / "upstreams.toml"
    for name in [*plan(), MODEL_GATE, "worker-17", "gateway-2"]:
        path.write_text(f'version = 1\n[upstreams.{name}]\nurl = "http://h/v1"\nmodel = "q"')
        with pytest.raises(SettingsError, match=f"{name} is the name of a part"):
            load_upstreams(path)

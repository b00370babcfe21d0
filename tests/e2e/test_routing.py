"""Routing by cached prefixes on four real workers, and what faults do to it: nothing is lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import redis
from grpc import insecure_channel

from headrace_common.kv_index import DELTA_FIELD, IndexKeys, RegistryEntry, ReplicaKey
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.cache_index.v1.cache_index_pb2 import (
    GetStatsRequest,
    GetStatsResponse,
    IndexDelta,
)
from headrace_contracts.cache_index.v1.cache_index_pb2_grpc import CacheIndexStub
from headrace_contracts.router.v1 import router_pb2
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_GPU
from headrace_testing.api import cached_tokens, chat, metric, unique
from headrace_testing.processes import ApiKey, Fleet, running_fleet
from headrace_testing.waiting import eventually_sync, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

NUM_WORKERS = 4
LONG = "The miller counts sacks of rye, oats, barley, wheat and spelt before the frost. " * 14
_ROUTER = router_pb2.DESCRIPTOR.services_by_name["Router"]
PICK = method_ref(_ROUTER, "Pick", router_pb2.PickMessage, router_pb2.Decision)


@pytest.fixture(scope="module")
def wide_fleet(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Fleet]:
    """Four workers, for this module."""
    state_dir = tmp_path_factory.mktemp("wide") / "state"
    environment = {"HEADRACE_LAUNCHER_MAX_CRASHES": "50"}
    with running_fleet(state_dir, num_workers=NUM_WORKERS, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def key(wide_fleet: Fleet) -> ApiKey:
    return wide_fleet.create_key("routing")


def ask(fleet: Fleet, key: ApiKey, prompt: str, **fields: object) -> httpx.Response:
    answer = chat(fleet, key, prompt, **{"max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def replica(answer: httpx.Response) -> str:
    return answer.headers["x-headrace-replica"]


def hit_ratio(answer: httpx.Response) -> float:
    usage = answer.json()["usage"]
    return cached_tokens(usage) / usage["prompt_tokens"]


def is_found(fleet: Fleet, key: ApiKey, prompt: str) -> bool:
    """Whether a request with this prefix meets a worker that holds it."""
    return hit_ratio(ask(fleet, key, f"{prompt} {time.time_ns()}")) > 0.5


@contextmanager
def steady_load(fleet: Fleet, key: ApiKey) -> Iterator[list[httpx.Response]]:
    """Two clients that ask without pause; each of their answers must be a 200."""
    answers: list[httpx.Response] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            answers.append(chat(fleet, key, unique("Count to three."), max_tokens=2))

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(client) for _ in range(2)]
        try:
            yield answers
        finally:
            over.set()
    for one in running:
        one.result()
    assert {answer.status_code for answer in answers} == {200}, [a.text for a in answers[-3:]]


def index_stats(fleet: Fleet) -> dict[str, GetStatsResponse.ReplicaStats]:
    with insecure_channel(fleet.service("cache-index")["address"]) as channel:
        stats = CacheIndexStub(channel).GetStats(GetStatsRequest(), timeout=5)
    return {one.replica.worker_id: one for one in stats.replicas}


def router_metric(fleet: Fleet, name: str) -> float:
    return metric(fleet.service("router")["metrics_address"], name)


def test_a_hot_prefix_does_not_pile_on_one_worker(wide_fleet: Fleet, key: ApiKey) -> None:
    """Alone each request meets the warm worker; forty at once also use others.

    Their output is what makes the warm worker dear: a few tokens each would rightly stay there.
    """
    prompt = unique(LONG)
    warm = replica(ask(wide_fleet, key, prompt))
    time.sleep(0.3)
    for number in range(3):
        answer = ask(wide_fleet, key, f"{prompt} {number}?")
        assert replica(answer) == warm
        assert hit_ratio(answer) > 0.8
    with ThreadPoolExecutor(40) as pool:
        answers = pool.map(
            lambda number: ask(wide_fleet, key, f"{prompt} So: {number}", max_tokens=48), range(40)
        )
        shares = Counter(map(replica, answers))
    assert max(shares.values()) <= 0.8 * 40, shares


def test_a_cold_burst_computes_its_prefix_only_now_and_then(wide_fleet: Fleet, key: ApiKey) -> None:
    """Eight at once with a prefix nobody holds: most of them wait for the one that computes it."""
    prompt = unique(LONG)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda number: ask(wide_fleet, key, f"{prompt} {number}!"), range(8))
        hits = [hit_ratio(answer) > 0.5 for answer in answers]
    assert sum(hits) >= 4, hits


def test_a_second_router_knows_the_same(wide_fleet: Fleet, key: ApiKey, tmp_path: Path) -> None:
    """Started beside the first, it learns index and workers from scratch and hears its peer."""
    with second_router(wide_fleet, tmp_path) as (address, metrics):
        eventually_sync(lambda: index_warm(metrics) and metric(metrics, PEERS) == 1, within_s=20)
        entries = metric(metrics, "headrace_router_index_entries")
        assert entries == router_metric(wide_fleet, "headrace_router_index_entries")
        chosen = asyncio.run(pick_some(address, wide_fleet.model, 40))
        assert len(chosen) > 1
        assert set(chosen) <= {worker["id"] for worker in wide_fleet.status()["workers"]}
    eventually_sync(lambda: router_metric(wide_fleet, PEERS) == 0, within_s=5)


PEERS = "headrace_router_peer_routers"


def index_warm(metrics_address: str) -> bool:
    return bool(httpx.get(f"http://{metrics_address}/ready", timeout=5).json()["index_warm"])


@contextmanager
def second_router(fleet: Fleet, folder: Path) -> Iterator[tuple[str, str]]:
    """A router process of the test's own; yields its address and that of its metrics."""
    address, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    status = fleet.status()
    settings = {
        "REDIS_URL": f"redis://{fleet.service('valkey')['address']}/0",
        "WORKERS": ",".join(worker["address"] for worker in status["workers"]),
        "LISTEN": address,
        "METRICS_LISTEN": metrics,
    }
    environment = os.environ | {f"HEADRACE_ROUTER_{name}": v for name, v in settings.items()}
    with (folder / "router.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace_router"], env=environment, stdout=log, stderr=log
        )
    try:

        def is_up() -> bool:
            try:
                return httpx.get(f"http://{metrics}/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        eventually_sync(is_up, within_s=30)
        yield address, metrics
    finally:
        process.kill()
        process.wait()


async def pick_some(address: str, model: str, count: int) -> Counter[str]:
    """Pick and keep, so that load is counted; return who was chosen."""
    client, chosen = SessionClient(address), Counter[str]()
    try:
        calls = []
        for number in range(count):
            call = await client.start(PICK, timeout_s=20)
            request = router_pb2.PickRequest(request_id=str(number), model=model, prompt_tokens=8)
            call.send(router_pb2.PickMessage(pick=request))
            decision = await call.receive()
            assert decision is not None
            chosen[decision.replica.worker_id] += 1
            calls.append(call)
    finally:
        await client.close()
    return chosen


@pytest.mark.chaos
def test_lost_doubled_and_late_changes_are_noticed(wide_fleet: Fleet, key: ApiKey) -> None:
    """A number that jumps leads to that replica's sets, an old one to nothing; under load.

    In the end the router's mirror equals the index.
    """
    host, _, port = wide_fleet.service("valkey")["address"].rpartition(":")
    keys = IndexKeys()
    before = router_metric(wide_fleet, "headrace_router_index_rescans_total")
    with steady_load(wide_fleet, key), redis.Redis(host, int(port)) as store:
        for jump in (5, -1, 5):
            for worker, text in store.hgetall(keys.registry).items():
                entry = RegistryEntry.decode(text)
                late = IndexDelta(
                    replica=ReplicaKey(worker.decode(), entry.incarnation).to_ref(),
                    model=entry.model,
                    seq=max(0, entry.seq + jump),
                    tier=CACHE_TIER_GPU,
                    added=os.urandom(8),
                )
                store.xadd(keys.deltas, {DELTA_FIELD: late.SerializeToString()})
            time.sleep(0.3)
    after = router_metric(wide_fleet, "headrace_router_index_rescans_total")
    assert after >= before + 2 * NUM_WORKERS
    eventually_sync(lambda: mirror_equals_index(wide_fleet), within_s=20, every_s=0.3)


def mirror_equals_index(fleet: Fleet) -> bool:
    """Distinct blocks in the router's mirror, and members of all sets in Redis."""
    host, _, port = fleet.service("valkey")["address"].rpartition(":")
    with redis.Redis(host, int(port)) as store:
        sets = list(store.scan_iter("headrace:{kv}:blocks:*", count=1000))
        members = set().union(*(store.smembers(name) for name in sets)) if sets else set()
    assert len(members) == router_metric(fleet, "headrace_router_index_entries")
    return True


@pytest.mark.chaos
def test_a_restarted_worker_is_expected_to_hold_nothing(wide_fleet: Fleet, key: ApiKey) -> None:
    """SIGKILL under load: its requests go on elsewhere, its blocks are gone at once from the index.

    It comes back under the same name and address, as another replica that holds nothing yet.
    """
    prompt = unique(LONG)
    warm = replica(ask(wide_fleet, key, prompt))
    address = wide_fleet.worker(warm)["address"]
    before = eventually_sync(lambda: index_stats(wide_fleet)[warm])
    assert before.num_blocks > 0
    with steady_load(wide_fleet, key):
        os.kill(wide_fleet.worker_pid(warm), signal.SIGKILL)
        answer = ask(wide_fleet, key, f"{prompt} And?")
        assert replica(answer) != warm
        wide_fleet.wait_ready()

        def is_registered() -> GetStatsResponse.ReplicaStats | None:
            found = index_stats(wide_fleet).get(warm)
            old = before.replica.incarnation
            return found if found is not None and found.replica.incarnation > old else None

        after = eventually_sync(is_registered, within_s=20)
    assert wide_fleet.worker(warm)["address"] == address
    assert after.num_blocks < before.num_blocks
    eventually_sync(lambda: is_found(wide_fleet, key, prompt), within_s=20)
    eventually_sync(lambda: mirror_equals_index(wide_fleet), within_s=20, every_s=0.3)


@pytest.mark.chaos
def test_a_frozen_worker_is_left_alone_and_comes_back(wide_fleet: Fleet, key: ApiKey) -> None:
    """SIGSTOP under load: it accepts and says nothing. What was sent there goes on elsewhere.

    Out of rotation after two seconds of silence, back soon after it goes on.
    """
    frozen = replica(ask(wide_fleet, key, unique("Who?")))
    pid = wide_fleet.worker_pid(frozen)
    with steady_load(wide_fleet, key) as answers:
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually_sync(lambda: router_metric(wide_fleet, NOT_READY) == 1, within_s=5)
            since = len(answers)
            eventually_sync(lambda: len(answers) >= since + 10, within_s=30)
            assert frozen not in {replica(answer) for answer in answers[since + 2 :]}
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually_sync(lambda: router_metric(wide_fleet, NOT_READY) == 0, within_s=10)
    wide_fleet.wait_ready()
    assert wide_fleet.worker_pid(frozen) == pid


NOT_READY = 'headrace_router_replicas{state="not_ready"}'


@pytest.mark.chaos
@pytest.mark.parametrize("victims", [("router", "cache-index"), ("valkey",)])
def test_requests_go_on_while_the_index_starts_over(
    wide_fleet: Fleet, key: ApiKey, victims: tuple[str, ...]
) -> None:
    """Router and index, or Redis, are killed under load: every answer is a 200.

    Afterwards the index is whole again, and a prefix from before is still found.
    """
    prompt = unique(LONG)
    ask(wide_fleet, key, prompt)
    with steady_load(wide_fleet, key) as answers:
        for victim in victims:
            os.kill(wide_fleet.service_pid(victim), signal.SIGKILL)
        wide_fleet.wait_ready()
        count = len(answers)
        eventually_sync(lambda: len(answers) > count + 4, within_s=30)
    eventually_sync(lambda: mirror_equals_index(wide_fleet), within_s=30, every_s=0.3)
    eventually_sync(lambda: is_found(wide_fleet, key, prompt), within_s=20)
    log = wide_fleet.log("router")
    assert not re.search(r"Traceback", log), log[-2000:]

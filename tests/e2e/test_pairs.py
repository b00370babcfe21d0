"""One worker computes prompts, another decodes; the first is killed, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from headrace_testing.api import cached_tokens, chat, metric, stream
from headrace_testing.processes import ApiKey, Fleet, running_fleet
from headrace_testing.waiting import eventually_sync

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(200)]

# Pairs wherever they can be: a transfer is free, and any running stream counts much.
POLICY = """
version = 1
[pairs]
setup_s = 0.0
transfer_bytes_per_s = 1e15
stall_weight = 100.0
"""
STORY = "The ferryman counts crates of salt, rope, tar and lamp oil before the tide turns. " * 16


@pytest.fixture(scope="module")
def pair_fleet(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("pairs")
    policy = folder / "policy.toml"
    policy.write_text(POLICY)
    environment = {
        "HEADRACE_LAUNCHER_PREFILL_WORKERS": "1",
        "HEADRACE_ROUTER_POLICY_FILE": str(policy),
    }
    with running_fleet(folder / "state", num_workers=2, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def key(pair_fleet: Fleet) -> ApiKey:
    return pair_fleet.create_key("pairs")


def ask(fleet: Fleet, key: ApiKey, prompt: str, max_tokens: int = 8) -> httpx.Response:
    answer = chat(fleet, key, prompt, max_tokens=max_tokens)
    assert answer.status_code == 200, answer.text
    return answer


def text(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def test_prompts_are_computed_elsewhere_and_no_loss_when_that_worker_dies(
    pair_fleet: Fleet, key: ApiKey
) -> None:
    """The decode worker computes no more than a block of each; the text is a plain worker's."""
    fleet, other_key = pair_fleet, pair_fleet.create_key("pairs-2")
    plain = text(ask(fleet, key, f"Tell more. {STORY}"))
    # A stream that runs makes pairs worth while; it is left in the end.
    running = stream(fleet, key, "Write a long story about a lighthouse.", max_tokens=1500)
    next(one for one in running if one.pieces)
    before = prefilled(fleet)
    answer = ask(fleet, key, f"Once more. {STORY}")
    same = ask(fleet, other_key, f"Tell more. {STORY}")
    assert count(fleet, "worker-1", 'kv_transfers_total{outcome="ok"}') == 2
    assert prefilled(fleet) - before <= 2 * 17
    assert text(same) == plain
    assert cached_tokens(same.json()["usage"]) == 0
    assert {one.headers["x-headrace-replica"] for one in (answer, same)} == {"worker-1"}
    running.close()
    running = stream(fleet, key, "Write a long story about a lighthouse keeper.", max_tokens=1500)
    next(one for one in running if one.pieces)
    # The one that was left may have counted as running still: then this one had a pair too.
    num_before = num_pairs(fleet)
    # Frozen, so that it is surely killed while it owes the blocks: the decode worker computes.
    os.kill(fleet.worker_pid("worker-2"), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask, fleet, key, f"At last. {STORY}")
        eventually_sync(lambda: num_pairs(fleet) == num_before + 1, within_s=20)
        os.kill(fleet.worker_pid("worker-2"), signal.SIGKILL)
        assert late.result(60).headers["x-headrace-replica"] == "worker-1"
    assert count(fleet, "worker-1", 'kv_transfers_total{outcome="failed"}') == 1
    running.close()


def prefilled(fleet: Fleet) -> float:
    return count(fleet, "worker-1", 'tokens_total{kind="prefill"}')


def count(fleet: Fleet, worker: str, name: str) -> float:
    """Read a worker's metric."""
    return metric(fleet.worker(worker)["metrics_address"], f"headrace_worker_{name}")


def num_pairs(fleet: Fleet) -> float:
    """Count the prompts that the router sent elsewhere."""
    address = fleet.service("router")["metrics_address"]
    return metric(address, 'headrace_router_pairs_total{way="pair"}')

"""What Headrace promises, shown on real processes, one test a promise."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from headrace_testing.api import cached_tokens, chat, metric, stream, unique, whole_stream
from headrace_testing.processes import ApiKey, Fleet
from headrace_testing.waiting import eventually_sync

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

LONG = "The ledger lists ink, paper, wax, thread, needles and lamp oil for the winter. " * 20
STORY = "Write a long story about a lighthouse and the people who live near it."


@pytest.fixture(scope="module")
def key(fleet: Fleet) -> ApiKey:
    return fleet.create_key("proofs")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_long_prefix_goes_where_its_blocks_are(
    fleet: Fleet, key: ApiKey, streaming: bool
) -> None:
    """The second request with a long prefix meets the worker that has it and says what it saved.

    Several prefixes, so that chance (one half each) does not pass for routing.
    """
    for _ in range(4):
        prompt = unique(LONG)
        first = chat(fleet, key, prompt + "What comes first?", max_tokens=2)
        assert cached_tokens(first.json()["usage"]) < 64
        time.sleep(0.3)
        if streaming:
            second = whole_stream(fleet, key, prompt + "What comes last?", max_tokens=2)
            usage, headers = second.usage, second.headers
        else:
            answer = chat(fleet, key, prompt + "What comes last?", max_tokens=2)
            usage, headers = answer.json()["usage"], answer.headers
        assert headers["x-headrace-replica"] == first.headers["x-headrace-replica"]
        assert usage is not None
        assert cached_tokens(usage) >= 0.8 * usage["prompt_tokens"]


def test_two_tenants_never_share_a_cache_hit(fleet: Fleet, key: ApiKey) -> None:
    """A prompt is a hit for its own tenant and cold for the other, on the same worker too."""
    other = fleet.create_key("proofs-other")
    prompt = unique(LONG)
    chat(fleet, key, prompt, max_tokens=2)
    time.sleep(0.3)
    assert cached_tokens(chat(fleet, key, prompt, max_tokens=2).json()["usage"]) > 200
    # Twice and more, until both workers have seen it from the first tenant.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: chat(fleet, key, prompt, max_tokens=8), range(4)))
    assert cached_tokens(chat(fleet, other, prompt, max_tokens=2).json()["usage"]) == 0


@pytest.mark.chaos
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.8, "seed": 7}, {"temperature": None, "seed": 7}],
    ids=["greedy", "drawn", "as the model recommends"],
)
def test_a_stream_survives_the_kill_of_its_worker(
    fleet: Fleet, key: ApiKey, sampling: dict[str, Any]
) -> None:
    """SIGKILL in mid-stream: the other worker goes on, the text equals the undisturbed one."""
    fields = {"max_tokens": 60, **sampling}
    undisturbed = whole_stream(fleet, key, STORY, **fields)
    assert len(undisturbed.pieces) > 20
    killed = ""
    for answer in stream(fleet, key, STORY, **fields):
        if len(answer.pieces) == 10 and not killed:
            killed = answer.replica
            os.kill(fleet.worker_pid(killed), signal.SIGKILL)
    assert killed
    assert answer.error is None
    assert answer.is_done
    assert answer.text == undisturbed.text
    assert answer.finish_reason == undisturbed.finish_reason
    assert answer.usage is not None
    assert undisturbed.usage is not None
    for part in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.usage[part] == undisturbed.usage[part]
    fleet.wait_ready()


@pytest.mark.chaos
@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_everything_and_pays_once(fleet: Fleet, streaming: bool) -> None:
    """Blocks, concurrency lease and money hold are back within a second; one booking, cancelled."""
    # One slot, and money for one such request at a time.
    key = fleet.create_key("leavers", max_concurrent=1, budget_usd="0.0001")
    fields = {"max_tokens": 1200, "ignore_eos": True}
    if streaming:
        for answer in stream(fleet, key, STORY, **fields):
            assert answer.status == 200, answer.body
            if len(answer.pieces) >= 5:
                break
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{fleet.base_url}/v1/chat/completions",
                json={
                    "model": fleet.model,
                    "messages": [{"role": "user", "content": STORY}],
                    **fields,
                },
                headers=key.headers,
                timeout=httpx.Timeout(1.0, connect=5),
            )
    left = time.monotonic()
    workers = [worker["metrics_address"] for worker in fleet.status()["workers"]]
    eventually_sync(
        lambda: all(metric(w, "headrace_worker_running_requests") == 0 for w in workers), within_s=1
    )
    answer = chat(fleet, key, "Say hi.", max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - left < 2.5
    records = fleet.closed_usage(key, 2)
    assert [record["status"] for record in records] == ["cancelled", "completed"]
    assert 0 < records[0]["completion_tokens"] < 1200
    assert records[0]["amount_nano_usd"] > 0


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_without_kafka_requests_go_on_and_the_ledger_catches_up(fleet: Fleet, fault: str) -> None:
    """The broker stops for a while, or loses its whole log: each request is booked once."""
    key = fleet.create_key(f"no-kafka-{fault}")
    assert chat(fleet, key, "One.", max_tokens=2).status_code == 200
    fleet.closed_usage(key, 1)
    broker = fleet.service_pid("kafka")
    os.kill(broker, signal.SIGSTOP if fault == "frozen" else signal.SIGKILL)
    try:
        for _ in range(4):
            assert chat(fleet, key, "Two.", max_tokens=2).status_code == 200
    finally:
        if fault == "frozen":
            os.kill(broker, signal.SIGCONT)
    records = fleet.closed_usage(key, 5, within_s=60)
    assert len({record["request_id"] for record in records}) == len(records) == 5
    fleet.wait_ready()


def test_limits_and_guard_refuse_before_a_stream_opens(fleet: Fleet) -> None:
    """A refusal has its real status, also for streams; each says which limit or rule."""
    limited = fleet.create_key("limited", requests_per_minute=2)
    answers = [chat(fleet, limited, "hi", max_tokens=1) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert float(answers[2].headers["retry-after"]) > 0
    guarded = fleet.create_key("guarded", guard_block="zanzibar")
    for streaming in (False, True):
        refused = chat(fleet, guarded, "please ZANZIBAR now", stream=streaming)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "content_filter"


def test_blocked_output_never_reaches_the_client(fleet: Fleet, key: ApiKey) -> None:
    """The stream ends with content_filter before the first letter of a blocked word."""
    plain = whole_stream(fleet, key, STORY, max_tokens=40)
    word = next(w for w in plain.text.split()[5:] if w.isalpha() and len(w) > 4)
    guarded = fleet.create_key("guarded-output", guard_block=word)
    answer = whole_stream(fleet, guarded, STORY, max_tokens=40)
    assert answer.finish_reason == "content_filter"
    assert word.lower() not in answer.text.lower()
    assert answer.text
    assert plain.text.startswith(answer.text)
    assert answer.is_done


def test_a_revoked_key_stops_within_five_seconds(fleet: Fleet) -> None:
    key = fleet.create_key("revoked")
    assert chat(fleet, key, "hi", max_tokens=1).status_code == 200
    fleet.revoke_key(key)
    eventually_sync(
        lambda: chat(fleet, key, "hi", max_tokens=1).status_code == 401, within_s=5, every_s=0.2
    )


def test_one_trace_runs_through_all_services(fleet: Fleet, key: ApiKey) -> None:
    """A request's spans share one trace id from gateway to ledger's side of the wire."""
    before = {span["trace_id"] for span in fleet.spans()}
    assert chat(fleet, key, unique("Trace me."), max_tokens=2).status_code == 200

    def trace_is_whole() -> bool:
        services: dict[str, set[str]] = {}
        for span in fleet.spans():
            if span["trace_id"] not in before:
                services.setdefault(span["trace_id"], set()).add(span["service"].split("-")[0])
        want = {"gateway", "guard", "ratelimit", "router", "worker"}
        assert any(want <= seen for seen in services.values()), services
        return True

    eventually_sync(trace_is_whole, within_s=10, every_s=0.3)


def test_every_service_exports_metrics(fleet: Fleet) -> None:
    status = fleet.status()
    ours = [s for s in status["services"] if s["metrics_address"]]
    assert {s["name"] for s in ours} >= {
        "gateway", "router", "cache-index", "guard", "ratelimit", "billing",
    }  # fmt: skip
    for part in ours + status["workers"]:
        text = httpx.get(f"http://{part['metrics_address']}/metrics", timeout=5).text
        assert "headrace_" in text, part


def test_the_books_balance(fleet: Fleet) -> None:
    """After all of the above: postings sum to zero and balances equal a recount."""

    def verified() -> bool:
        verdict = fleet.verify_ledger()
        assert verdict["postings_sum_nano_usd"] == 0
        assert verdict["num_events"] > 0
        assert verdict["num_open"] == 0, verdict
        return bool(verdict["ok"])

    eventually_sync(verified, within_s=20, every_s=0.5)

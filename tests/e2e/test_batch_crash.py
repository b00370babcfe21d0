"""A batch outlives the gateway that works on it: each line is answered, and paid for, once."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import pytest

from headrace_testing.api import body
from headrace_testing.processes import ApiKey, Fleet
from headrace_testing.waiting import eventually_sync

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(400)]
URL = "/v1/chat/completions"
NUM_LINES = 12


def _start(fleet: Fleet, key: ApiKey) -> str:
    lines = [
        {
            "custom_id": f"l{idx}",
            "method": "POST",
            "url": URL,
            "body": body(fleet, f"Write about {idx}.", max_tokens=64, ignore_eos=True),
        }
        for idx in range(NUM_LINES)
    ]
    file = httpx.post(
        f"{fleet.base_url}/v1/files",
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", "\n".join(json.dumps(line) for line in lines))},
        headers=key.headers,
    ).json()
    asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    made = httpx.post(f"{fleet.base_url}/v1/batches", json=asked, headers=key.headers).json()
    return str(made["id"])


def _batch(fleet: Fleet, key: ApiKey, batch_id: str) -> Any:
    return httpx.get(f"{fleet.base_url}/v1/batches/{batch_id}", headers=key.headers).json()


def test_messages_cut_by_a_crash_are_answered_and_paid_once(fleet: Fleet) -> None:
    """The same of a batch of messages: its requests stand in no file."""
    key = fleet.create_key("message-batch-crash")
    url = f"{fleet.base_url}/v1/messages/batches"
    requests = [
        {
            "custom_id": f"r{idx}",
            "params": body(fleet, f"Write about {idx}.", max_tokens=96),
        }
        for idx in range(NUM_LINES)
    ]
    batch = httpx.post(url, json={"requests": requests}, headers=key.headers).json()
    url = f"{url}/{batch['id']}"
    fleet.closed_usage(key, 1, within_s=60)
    os.kill(fleet.service_pid("gateway"), signal.SIGKILL)
    fleet.wait_ready()
    # Else the crash came too late to show anything.
    assert httpx.get(url, headers=key.headers).json()["processing_status"] == "in_progress"
    batch = eventually_sync(
        lambda: (it := httpx.get(url, headers=key.headers).json())["ended_at"] and it,
        within_s=180,
        every_s=0.5,
    )
    assert batch["request_counts"]["succeeded"] == NUM_LINES
    lines = httpx.get(f"{url}/results", headers=key.headers).text.splitlines()
    results = [json.loads(line) for line in lines]
    assert [it["custom_id"] for it in results] == [it["custom_id"] for it in requests]
    messages = [it["result"]["message"] for it in results]
    answered = {it["id"].replace("msg_", "req_"): it["usage"]["output_tokens"] for it in messages}
    _check_books(fleet, key, answered)


def test_lines_cut_by_a_crash_are_answered_and_paid_once(fleet: Fleet) -> None:
    """The gateway is killed while lines are under way; the books say what the results say."""
    key = fleet.create_key("batch-crash")
    batch_id = _start(fleet, key)
    eventually_sync(
        lambda: _batch(fleet, key, batch_id)["request_counts"]["completed"] >= 2,
        within_s=60,
        every_s=0.05,
    )
    os.kill(fleet.service_pid("gateway"), signal.SIGKILL)
    fleet.wait_ready()
    # What was cut has no result yet, or the test would show nothing.
    assert _batch(fleet, key, batch_id)["request_counts"]["completed"] < NUM_LINES
    batch = eventually_sync(
        lambda: (it := _batch(fleet, key, batch_id))["status"] == "completed" and it,
        within_s=180,
        every_s=0.5,
    )
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    url = f"{fleet.base_url}/v1/files/{batch['output_file_id']}/content"
    results = [json.loads(it) for it in httpx.get(url, headers=key.headers).text.splitlines()]
    assert [it["custom_id"] for it in results] == [f"l{idx}" for idx in range(NUM_LINES)]
    answered = {
        it["response"]["request_id"]: it["response"]["body"]["usage"]["completion_tokens"]
        for it in results
    }
    _check_books(fleet, key, answered)


def _check_books(fleet: Fleet, key: ApiKey, answered: dict[str, int]) -> None:
    assert len(answered) == NUM_LINES

    def are_booked() -> bool:
        # A line that ran twice was first closed as swept; what it made after all corrects that.
        records = fleet.closed_usage(key, NUM_LINES)
        booked = {it["request_id"]: it["completion_tokens"] for it in records}
        assert booked == answered
        assert len(records) == NUM_LINES
        return True

    eventually_sync(are_booked, within_s=60, every_s=1.0)
    fleet.verify_ledger()

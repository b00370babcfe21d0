"""A background response outlives the gateway that makes it, and is paid once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace_testing.api import TIMEOUT
from headrace_testing.processes import Fleet
from headrace_testing.waiting import eventually_sync

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_killed_gateways_background_response_goes_on(fleet: Fleet) -> None:
    """Who reads along comes back by the last number he saw, and finds the same text go on."""
    key = fleet.create_key("background-crash")
    url = f"{fleet.base_url}/v1/responses"
    asked = {
        "model": fleet.model,
        "input": "Write a long story about a mill.",
        "temperature": 1.0,
        "max_output_tokens": 400,
        "background": True,
        "stream": True,
    }
    told: list[dict[str, Any]] = []
    with httpx.stream("POST", url, json=asked, headers=key.headers, timeout=TIMEOUT) as answer:
        events = _events(answer.iter_lines())
        told += [next(events) for _ in range(20)]
        os.kill(fleet.service_pid("gateway"), signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            told.extend(events)
    fleet.wait_ready()
    url = f"{url}/{told[0]['response']['id']}"
    params = {"stream": "true", "starting_after": told[-1]["sequence_number"]}
    with httpx.stream("GET", url, params=params, headers=key.headers, timeout=TIMEOUT) as answer:
        rest = list(_events(answer.iter_lines()))
    kept = httpx.get(url, headers=key.headers).json()
    # Else the crash came too late to show anything.
    assert len(rest) > 20
    whole = told + rest
    assert [it["sequence_number"] for it in whole] == list(range(len(whole)))
    assert whole[-1]["type"] in ("response.completed", "response.incomplete")
    text = "".join(it["delta"] for it in whole if it["type"] == "response.output_text.delta")
    assert text == kept["output"][0]["content"][0]["text"]

    def is_booked() -> bool:
        # It was first closed as swept; what came of it after all corrects that.
        (record,) = fleet.closed_usage(key, 1)
        return bool(record["completion_tokens"] == kept["usage"]["output_tokens"])

    eventually_sync(is_booked, within_s=60, every_s=1.0)
    fleet.verify_ledger()

"""A request with an Idempotency-Key outlives the gateway that answers it, and is paid once."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import pytest

from headrace_testing.api import TIMEOUT, body
from headrace_testing.processes import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


def test_a_killed_gateways_request_is_answered_again_and_paid_once(fleet: Fleet) -> None:
    """The repetition waits only until nobody renews the first one's lease."""
    key = fleet.create_key("repeat")
    headers = {**key.headers, "Idempotency-Key": "once"}
    asked: dict[str, Any] = {
        "json": body(fleet, "Write about water.", max_tokens=64, ignore_eos=True, stream=True),
        "headers": headers,
        "timeout": TIMEOUT,
    }
    url = f"{fleet.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, **asked) as first:
        lines = first.iter_lines()
        assert next(lines).startswith("data:")
        os.kill(fleet.service_pid("gateway"), signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    fleet.wait_ready()
    with httpx.stream("POST", url, **asked) as again:
        text = again.read().decode()
    replayed = httpx.post(url, **asked)
    assert replayed.text == text
    assert len(fleet.closed_usage(key, 1, within_s=60)) == 1
    fleet.verify_ledger()

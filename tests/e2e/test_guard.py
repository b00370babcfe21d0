"""What the guard promises, on real processes: a lasting audit, policies without a restart."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace_testing.api import chat, whole_stream
from headrace_testing.processes import Fleet
from headrace_testing.waiting import eventually_sync

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(240)]

POLICY = """
fails_open = false
blocklist = ["zanzibar"]
owner_exempt = []
[input]
blocklist = "block"
[output]
blocklist = "block"
"""


def audit(fleet: Fleet, request_id: str, kinds: set[str]) -> dict[str, dict[str, Any]]:
    """The audit of a request by kind, once all of *kinds* are there."""

    def written() -> dict[str, dict[str, Any]]:
        done = fleet.try_headrace("guard", "audit", request_id, "--json")
        assert done.returncode == 0, done.stderr
        records = {one["kind"]: one for one in json.loads(done.stdout)["records"]}
        assert kinds <= records.keys()
        return records

    return eventually_sync(written, within_s=30, every_s=0.5)


def test_the_audit_says_what_was_read_and_sent_and_survives_the_guard(fleet: Fleet) -> None:
    """Input, output and what the gateway sent, by request id; the same after a SIGKILL."""
    key = fleet.create_key("guard-audit", guard_block="zanzibar")
    answer = whole_stream(fleet, key, "Tell me of the sea.", max_tokens=12)
    request_id = answer.headers["x-request-id"]
    before = audit(fleet, request_id, {"input", "output", "sent"})
    assert before["input"]["state"] == "clean"
    assert before["output"]["scanned_chars"] == before["output"]["released_chars"]
    assert before["sent"]["released_chars"] == len(answer.text)
    assert before["sent"]["key_id"] == key.key_id
    os.kill(fleet.service_pid("guard"), signal.SIGKILL)
    fleet.wait_ready()
    assert audit(fleet, request_id, {"input", "output", "sent"}) == before
    assert fleet.headrace("guard", "verify").startswith("right")


def test_a_policy_changes_under_a_running_fleet(fleet: Fleet, tmp_path: Path) -> None:
    """Put, used at once, changed, dropped; a key cannot name one that is not there."""
    file = tmp_path / "islands.toml"
    file.write_text(POLICY)
    fleet.headrace("guard", "put", "islands", str(file))
    key = fleet.create_key("guard-policy", guard_policy="islands")
    assert chat(fleet, key, "to zanzibar", max_tokens=2).status_code == 400
    file.write_text(POLICY.replace("zanzibar", "atlantis"))
    fleet.headrace("guard", "put", "islands", str(file))
    assert chat(fleet, key, "to zanzibar", max_tokens=2).status_code == 200
    fleet.headrace("guard", "delete", "islands")
    # The key's policy is gone: nothing passes.
    assert chat(fleet, key, "to zanzibar", max_tokens=2).status_code == 503
    words = ("keys", "create", "--tenant", "t", "--name", "n", "--guard-policy", "islands")
    assert "no policy 'islands'" in fleet.try_headrace(*words).stderr

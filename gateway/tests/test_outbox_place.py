"""Tests of who has which outbox folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.outbox import Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.outbox_place import OutboxInUseError, take_place


def test_gateways_of_one_folder_take_a_seat_each(tmp_path: Path) -> None:
    """Two at once never have the same folder; one that left makes room for the next."""
    first, second = take_place(tmp_path, 2), take_place(tmp_path, 2)
    assert [first.folder, second.folder] == [tmp_path / "1", tmp_path / "2"]
    with pytest.raises(OutboxInUseError, match="all 2 seats"):
        take_place(tmp_path, 2)
    first.release()
    third = take_place(tmp_path, 2)
    assert third.folder == first.folder
    second.release()
    third.release()


def test_without_seats_the_folder_is_one_gateways_own(tmp_path: Path) -> None:
    """The message says how it can be shared."""
    place = take_place(tmp_path)
    assert place.folder == tmp_path
    with pytest.raises(OutboxInUseError, match="its own folder, or the folder seats"):
        take_place(tmp_path)
    place.release()


def test_a_second_gateway_says_in_a_sentence_why_it_cannot_start(tmp_path: Path) -> None:
    """And no traceback."""
    place = take_place(tmp_path)
    settings = {
        "OUTBOX_DIR": str(tmp_path),
        "LISTEN": "127.0.0.1:0",
        "METRICS_LISTEN": "127.0.0.1:0",
    }
    told = {f"HEADRACE_GATEWAY_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "headrace_gateway"]
    ended = subprocess.run(
        command, env={**os.environ, **told}, capture_output=True, text=True, timeout=60, check=False
    )
    place.release()
    assert ended.returncode == 1
    assert "gateway: another gateway uses the outbox" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_whoever_comes_later_finds_what_was_left_in_the_seat(tmp_path: Path) -> None:
    """A gateway container has another name each time; its outbox must not be lost for that."""
    left = Outbox(tmp_path, SystemClock(), OutboxMetrics(CollectorRegistry()), num_seats=2)
    await left.start()
    await left.append_hurried(UsageEvent(kind=UsageEvent.KIND_OPENED, request_id="req_1"))
    await left.close()
    found = Outbox(tmp_path, SystemClock(), OutboxMetrics(CollectorRegistry()), num_seats=2)
    assert [event.request_id for event in await found.start()] == ["req_1"]
    assert found.outbox_id == left.outbox_id
    await found.close()

"""Idempotency-Key over HTTP: the same answer, one bill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_gateway.state.idempotency_records import (
    LEASE_S,
    ClaimKind,
    IdempotencyRecords,
    StoredAnswer,
)
from headrace_gateway.state.store import StateStore
from headrace_testing.clock import FakeClock
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

URL = "/v1/chat/completions"


async def ask(fleet: GatewayFleet, key: str = "k1", api_key: str = "", **fields: Any) -> Any:
    async with fleet.http(api_key or None) as client:
        return await client.post(
            URL, json=chat_body(temperature=1, **fields), headers={"Idempotency-Key": key}
        )


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_same_request_again_gets_the_same_answer(
    fleet: GatewayFleet, is_stream: bool
) -> None:
    """Byte for byte, marked as replayed, under the first request's id; billed once."""
    first = await ask(fleet, stream=is_stream)
    again = await ask(fleet, stream=is_stream)
    assert first.status_code == again.status_code == 200
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert len(fleet.usage.closed_events()) == 1
    assert len(fleet.worker.requests) == 1


@pytest.mark.parametrize("keys", [["a", "b"], ["a", "a"], ["", "b"], ["k" * 256]])
async def test_a_request_has_one_key(fleet: GatewayFleet, keys: list[str]) -> None:
    """Of several nobody knows which counts; refused, and nothing runs."""
    headers = [("Idempotency-Key", key) for key in keys]
    async with fleet.http() as client:
        answer = await client.post(URL, json=chat_body(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert fleet.worker.requests == []


async def test_another_body_is_a_conflict(fleet: GatewayFleet) -> None:
    """The key stands for one body; another API key has keys of its own."""
    await ask(fleet)
    conflict = await ask(fleet, content="other")
    assert conflict.status_code == 409
    assert conflict.json()["error"]["code"] == "idempotency_key_reused"
    other, _ = fleet.new_key()
    assert (await ask(fleet, api_key=other, content="other")).status_code == 200


async def test_a_repetition_waits_for_the_first(fleet: GatewayFleet) -> None:
    """Both get the one answer."""
    fleet.worker.switches.delay_per_token_s = 0.02
    first, second = await asyncio.gather(ask(fleet), ask(fleet))
    assert first.content == second.content
    assert len(fleet.worker.requests) == 1


async def test_a_repetition_does_not_wait_for_ever(fleet_parts: GatewayFleet) -> None:
    """After the bound it is told to come back."""
    fleet_parts.settings["idempotency_wait_s"] = 0.3
    await fleet_parts.start()
    fleet_parts.worker.switches.delay_per_token_s = 0.05
    first = asyncio.create_task(ask(fleet_parts))
    await eventually(lambda: fleet_parts.worker.running)
    second = await ask(fleet_parts)
    assert second.status_code == 409
    assert second.json()["error"]["code"] == "request_in_progress"
    assert second.headers["retry-after"]
    assert (await first).status_code == 200
    await fleet_parts.close()


async def test_a_client_that_leaves_finds_its_answer(fleet: GatewayFleet) -> None:
    """The request goes on, completes, and is billed once."""
    fleet.worker.switches.delay_per_token_s = 0.02
    async with fleet.http() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                URL,
                json=chat_body(temperature=1),
                headers={"Idempotency-Key": "k1"},
                timeout=httpx.Timeout(5, read=0.3),
            )
    again = await ask(fleet)
    assert again.status_code == 200
    assert len(fleet.worker.requests) == 1
    assert len(fleet.usage.closed_events()) == 1
    assert fleet.worker.cancelled == []


async def test_a_refusal_is_not_kept(fleet: GatewayFleet) -> None:
    """Once the cause is gone the same request is served."""
    fleet.worker.switches.refuse = True
    assert (await ask(fleet)).status_code == 503
    fleet.worker.switches.refuse = False
    assert (await ask(fleet)).status_code == 200


async def test_a_dead_process_leaves_its_request_id(tmp_path: Path, clock: FakeClock) -> None:
    """Whoever claims a record after its lease runs under the first id: one bill."""
    state = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock)
    records = IdempotencyRecords(state, 60)
    await records.claim(b"r", b"body", "req_1")
    assert (await records.claim(b"r", b"body", "req_2")).kind is ClaimKind.RUNNING
    clock.advance(LEASE_S + 1)
    taken = await records.claim(b"r", b"body", "req_3")
    assert (taken.kind, taken.request_id) == (ClaimKind.OWN, "req_1")
    clock.advance(61)
    assert (await records.claim(b"r", b"other", "req_4")).request_id == "req_4"
    await state.close()


async def test_a_process_that_was_overtaken_changes_nothing(
    tmp_path: Path, clock: FakeClock
) -> None:
    """It was frozen for longer than its lease: it may not free, renew or answer what is another's.

    Freed, the record would be claimed by a third request, which would run under an id of its own
    beside the second: two bills.
    """
    state = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock)
    records = IdempotencyRecords(state, 600)
    await records.claim(b"r", b"body", "req_1")
    clock.advance(LEASE_S - 1)
    await records.renew(b"r", "req_1")
    clock.advance(LEASE_S - 1)
    assert (await records.claim(b"r", b"body", "req_2")).kind is ClaimKind.RUNNING
    clock.advance(1)
    assert (await records.claim(b"r", b"body", "req_2")).request_id == "req_1"
    await records.release(b"r", "req_1")
    await records.renew(b"r", "req_1")
    late, good = StoredAnswer(200, [], b"late"), StoredAnswer(200, [(b"a", b"b")], b"good")
    assert not await records.keep(b"r", "req_1", late)
    assert (await records.claim(b"r", b"body", "req_3")).kind is ClaimKind.RUNNING
    assert await records.keep(b"r", "req_2", good)
    assert not await records.keep(b"r", "req_1", late)
    found = await records.claim(b"r", b"body", "req_3")
    assert (found.kind, found.request_id, found.answer) == (ClaimKind.FINISHED, "req_1", good)
    await state.close()

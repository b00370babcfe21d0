"""A service that is frozen: it keeps its connections and says nothing. None is waited for long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from headrace_common import frame_socket
from headrace_gateway.clients import billing, worker
from headrace_testing.fake_worker import MODEL, FakeWorker, saying
from headrace_testing.freezable import FreezableWay
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually

# By silence alone a frozen peer's connection is lost so late; each of these requests takes less.
USUAL_SILENCE_S = frame_socket.SILENCE_S
SILENCE_S = 60.0
BOUND_S = SILENCE_S / 3


@pytest.fixture(autouse=True)
def _long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_socket, "SILENCE_S", SILENCE_S)


@contextlib.asynccontextmanager
async def way_to(fleet: GatewayFleet, service: str) -> AsyncIterator[FreezableWay]:
    """Let the gateway reach a service by a way that can be frozen."""
    async with FreezableWay(fleet.settings[f"{service}_address"]) as way:
        fleet.settings[f"{service}_address"] = way.address
        await fleet.restart_gateway()
        yield way
        way.thaw()
        await fleet.stop()


async def ask(fleet: GatewayFleet, key: str | None = None) -> tuple[httpx.Response, float]:
    """Return an answer and the seconds that it took."""
    began_s = time.monotonic()
    async with fleet.http(key) as client:
        answer = await client.post("/v1/chat/completions", json=chat_body())
    return answer, time.monotonic() - began_s


async def test_a_frozen_router_is_passed_by_and_taken_back(fleet: GatewayFleet) -> None:
    """The last list of replicas serves; once it lives again, it chooses again."""
    async with way_to(fleet, "router") as way:
        assert (await ask(fleet))[0].status_code == 200
        num_picks = len(fleet.router.picks)
        way.freeze()
        answers = await asyncio.gather(*(ask(fleet) for _ in range(5)))
        answers.append(await ask(fleet))
        assert {answer.status_code for answer, _ in answers} == {200}
        assert max(took_s for _, took_s in answers) < BOUND_S
        assert len(fleet.router.picks) == num_picks
        way.thaw()

        async def chooses() -> bool:
            answer, _ = await ask(fleet)
            picked = {pick.request_id for pick in fleet.router.picks}
            return answer.headers["x-request-id"] in picked

        await eventually(chooses)
        await fleet.settled()


async def test_a_router_that_lets_a_request_queue_is_waited_for(fleet: GatewayFleet) -> None:
    """A queue is no silence: nobody may slip past it."""
    async with way_to(fleet, "router"):
        fleet.router.gate.clear()
        asked = asyncio.create_task(ask(fleet))
        await eventually(lambda: fleet.router.picks)
        # Three times the gateway's patience.
        done, _ = await asyncio.wait({asked}, timeout=1.2)
        assert not done
        assert fleet.worker.requests == []
        fleet.router.gate.set()
        assert (await asked)[0].status_code == 200


async def test_a_frozen_worker_is_left_before_its_connection_is_lost(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request that meets it moves on after two seconds, the next ones at once."""
    monkeypatch.setattr(worker, "_SILENCE_S", SILENCE_S)
    async with FreezableWay(fleet.workers[0].address) as way:
        fleet.router.add_worker("w0", way.address, [fleet.worker.card()], incarnation=2)
        await eventually(lambda: fleet.gateway.directory.is_ready)
        await ask(fleet)
        await fleet.add_worker(FakeWorker(worker_id="w1"))
        way.freeze()
        answer, took_s = await ask(fleet)
        assert answer.status_code == 200
        assert took_s < BOUND_S
        answer, took_s = await ask(fleet)
        assert answer.status_code == 200
        assert took_s < worker._PATIENCE_S
        assert [len(pick.excluded) for pick in fleet.router.picks[-4:]] == [0, 1, 0, 1]
        way.thaw()
        await fleet.settled()


async def test_a_stream_leaves_a_worker_that_freezes(fleet: GatewayFleet) -> None:
    """Nothing is lost or said twice; it waits for the silence that no living worker keeps."""
    text = "".join(map(chr, range(ord("A"), ord("z"))))
    fleet.worker.script, fleet.worker.switches.delay_per_token_s = saying(text), 0.02
    other = FakeWorker(worker_id="w1", script=saying(text))
    async with FreezableWay(fleet.workers[0].address) as way:
        fleet.router.add_worker("w0", way.address, [fleet.worker.card()], incarnation=2)
        await eventually(lambda: fleet.gateway.directory.is_ready)
        read, gaps_s = "", [0.0]
        async with fleet.openai() as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
            )
            heard_s = time.monotonic()
            async for chunk in stream:
                gaps_s.append(time.monotonic() - heard_s)
                heard_s += gaps_s[-1]
                if chunk.choices:
                    read += chunk.choices[0].delta.content or ""
                if len(gaps_s) == 10:
                    await fleet.add_worker(other)
                    way.freeze()
                    heard_s = time.monotonic()
        assert read == text
        assert len(other.requests) == 1
        assert max(gaps_s) < BOUND_S
        way.thaw()
        await fleet.settled()


async def test_a_frozen_guard_is_known_as_one(fleet: GatewayFleet) -> None:
    """Closed keys are refused and open ones go on, long before the longest wait for a verdict."""
    fleet.settings.update(guard_timeout_s=30.0, guard_wait_s=0.0)
    open_key, _ = fleet.new_key(guard_fail_open=True)
    async with way_to(fleet, "guard") as way:
        assert (await ask(fleet))[0].status_code == 200
        way.freeze()
        refused, took_s = await ask(fleet)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "guard_unavailable")
        assert took_s < BOUND_S
        passed, took_s = await ask(fleet, open_key)
        assert passed.status_code == 200
        assert took_s < BOUND_S


async def test_a_guard_that_thaws_has_refused_nobody(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked, came later or was being answered waits; all is judged once there is a guard."""
    monkeypatch.setattr(frame_socket, "SILENCE_S", USUAL_SILENCE_S)
    text = "".join(map(chr, range(ord("A"), ord("z"))))
    fleet.worker.script, fleet.worker.switches.delay_per_token_s = saying(text), 0.02
    async with way_to(fleet, "guard") as way:
        asked = [asyncio.create_task(ask(fleet))]
        await eventually(lambda: fleet.worker.requests)
        way.freeze()
        asked.append(asyncio.create_task(ask(fleet)))
        await asyncio.sleep(USUAL_SILENCE_S)  # the first one's connection is lost
        asked.append(asyncio.create_task(ask(fleet)))
        await asyncio.sleep(0.5)
        assert not any(it.done() for it in asked)
        way.thaw()
        answers = [answer for answer, _ in await asyncio.gather(*asked)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert [it.json()["choices"][0]["message"]["content"] for it in answers] == [text] * 3


async def test_a_guard_that_pauses_is_waited_for(fleet: GatewayFleet) -> None:
    """A second's pause refuses nobody, and lets nothing pass unread."""
    open_key, _ = fleet.new_key(guard_fail_open=True)
    async with way_to(fleet, "guard") as way:
        assert (await ask(fleet))[0].status_code == 200
        way.freeze()
        asked = [asyncio.create_task(ask(fleet, key)) for key in (None, open_key)]
        await asyncio.sleep(0.9)
        way.thaw()
        assert [(await one)[0].status_code for one in asked] == [200, 200]
        degraded = fleet.gateway.registry.get_sample_value(
            "headrace_gateway_degraded_total", {"dependency": "guard"}
        )
        assert not degraded


async def test_a_frozen_billing_delays_no_refusal(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a key that nobody has seen; what is known needs no billing."""
    monkeypatch.setattr(billing, "_TIMEOUT_S", 30.0)
    async with way_to(fleet, "billing") as way:
        assert (await ask(fleet))[0].status_code == 200
        key, _ = fleet.new_key()
        way.freeze()
        refused, took_s = await ask(fleet, key)
        assert refused.status_code == 503
        assert took_s < BOUND_S
        assert (await ask(fleet))[0].status_code == 200

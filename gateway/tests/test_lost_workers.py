"""A worker is lost, stuck, full or gone: streams go on, or end with an honest error."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from headrace_common.errors import NoReplica
from headrace_contracts.router.v1.router_pb2 import Decision, PickRequest
from headrace_contracts.usage.v1 import usage_pb2
from headrace_contracts.worker.v1 import worker_pb2
from headrace_testing.fake_worker import MODEL, FakeWorker, saying
from headrace_testing.gateway_answers import ask, finish_reasons, streamed_text
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_answer_goes_on_from_another_worker(
    fleet_of_two: GatewayFleet, streaming: bool, n: int
) -> None:
    """A worker that dies after some tokens changes nothing of text and usage."""
    fleet = fleet_of_two
    undisturbed = (await ask(fleet, seed=11, n=n)).json()
    await fleet.settled()
    used = fleet.workers[0] if fleet.workers[0].worker.requests else fleet.workers[1]
    used.worker.switches.die_after_tokens = 5 * n
    options = {"include_usage": True} if streaming else None
    answer = await ask(fleet, seed=11, n=n, stream=streaming, stream_options=options)
    for idx in range(n):
        expected = undisturbed["choices"][idx]["message"]["content"]
        if streaming:
            assert streamed_text(answer, idx) == expected
        else:
            assert answer.json()["choices"][idx]["message"]["content"] == expected
    assert used.worker.switches.die_after_tokens
    closed = fleet.usage.closed_events()[-1]
    assert closed.ending == usage_pb2.ENDING_COMPLETED
    assert closed.usage.output_tokens == undisturbed["usage"]["completion_tokens"]
    assert [ref.worker_id for ref in closed.replicas] == ["w0", "w1"] or [
        ref.worker_id for ref in closed.replicas
    ] == ["w1", "w0"]
    assert len(fleet.router.picks[-1].excluded) == 1
    await fleet.settled()


async def test_connection_cut_in_mid_stream(fleet_of_two: GatewayFleet) -> None:
    """A killed process (connection reset) is the same as an error from it."""
    fleet = fleet_of_two
    for server in fleet.workers:
        server.worker.script = saying("abcdefghijklmnopqrst")
        server.worker.switches.delay_per_token_s = 0.02
    asked = asyncio.create_task(ask(fleet, stream=True))
    running = await eventually(
        lambda: next((it for it in fleet.workers if it.worker.running), None)
    )
    await asyncio.sleep(0.1)
    await running.kill()
    answer = await asked
    assert streamed_text(answer) == "abcdefghijklmnopqrst"
    assert finish_reasons(answer) == ["stop"]
    assert len(fleet.usage.closed_events()) == 1


async def test_held_back_text_survives_a_resume(fleet_of_two: GatewayFleet) -> None:
    """Text that the lost worker held back for a stop string comes from the next one."""
    fleet = fleet_of_two
    for server in fleet.workers:
        server.worker.script = saying("one two three")
    fleet.workers[0].worker.switches.die_after_tokens = 6
    fleet.workers[1].worker.switches.die_after_tokens = None
    answer = await ask(fleet, stream=True, stop=["two!"])
    assert streamed_text(answer) == "one two three"


async def test_stuck_worker_is_left(fleet_of_two: GatewayFleet) -> None:
    """When the fleet learns that a replica makes no progress, its streams move."""
    fleet = fleet_of_two
    for server in fleet.workers:
        server.worker.script = saying("steady")
        server.worker.switches.hang_after_tokens = 3
    asked = asyncio.create_task(ask(fleet, stream=True))
    running = await eventually(
        lambda: next((it for it in fleet.workers if it.worker.running), None)
    )
    for server in fleet.workers:
        if server is not running:
            server.worker.switches.hang_after_tokens = None
    fleet.router.set_state(running.worker.worker_id, worker_pb2.WORKER_STATE_STUCK)
    assert streamed_text(await asked) == "steady"
    await eventually(lambda: running.worker.cancelled)


async def test_embeddings_leave_a_stuck_worker_too(fleet_of_two: GatewayFleet) -> None:
    """They are made by another one at once, and not waited for until the request's time is over."""
    fleet = fleet_of_two
    for server in fleet.workers:
        server.worker.switches.never_begin = True
    async with fleet.http() as client:
        asked = asyncio.create_task(
            client.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
        )
        stuck = await eventually(
            lambda: next((it.worker for it in fleet.workers if it.worker.embed_requests), None)
        )
        for server in fleet.workers:
            server.worker.switches.never_begin = server.worker is stuck
        fleet.router.set_state(stuck.worker_id, worker_pb2.WORKER_STATE_STUCK)
        async with asyncio.timeout(30):
            answer = await asked
    assert answer.status_code == 200, answer.text
    await fleet.settled()


async def test_full_worker_is_passed_over(fleet_of_two: GatewayFleet) -> None:
    """A refusal by one worker's queue is no refusal to the client."""
    fleet_of_two.workers[0].worker.switches.refuse = True
    fleet_of_two.workers[1].worker.script = saying("here")
    for _ in range(2):
        answer = await ask(fleet_of_two)
        assert answer.json()["choices"][0]["message"]["content"] == "here"


async def test_all_workers_lost_before_the_first_token(fleet: GatewayFleet) -> None:
    """No replica left and nothing sent: a real status, retry-after, one closed event."""
    fleet.worker.switches.die_after_tokens = 0
    answer = await ask(fleet)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_replica"
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
    await fleet.settled()
    assert len(fleet.usage.closed_events()) == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_request_waits_for_a_model_that_is_back_in_a_moment(
    fleet_of_two: GatewayFleet, streaming: bool
) -> None:
    """All replicas restart at once: who comes meanwhile is answered, and asks the router twice."""
    fleet = fleet_of_two
    for worker_id in ("w0", "w1"):
        fleet.router.set_reachable(worker_id, False)
    asked = asyncio.create_task(ask(fleet, stream=streaming))
    await asyncio.sleep(0.5)
    assert not asked.done()
    fleet.router.set_reachable("w1", True)
    answer = await asked
    assert answer.status_code == 200
    assert answer.headers["x-headrace-replica"] == "w1"
    assert len(fleet.router.picks) <= 3
    await fleet.settled()


async def test_a_replica_that_is_listed_before_it_may_be_picked_is_asked_for_again(
    fleet_of_two: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's list and its choice need not change in the same moment."""
    fleet = fleet_of_two
    for worker_id in ("w0", "w1"):
        fleet.router.set_reachable(worker_id, False)
    asked = asyncio.create_task(ask(fleet))
    await eventually(lambda: fleet.router.picks)
    await asyncio.sleep(0.5)
    decide, refusals = fleet.router._decide, iter(range(3))

    def refuse_a_while(request: PickRequest) -> Decision:
        if next(refusals, None) is not None:
            raise NoReplica("Not yet.", retry_after_s=1.0)
        return decide(request)

    monkeypatch.setattr(fleet.router, "_decide", refuse_a_while)
    fleet.router.set_reachable("w1", True)
    assert (await asked).status_code == 200
    assert next(refusals, None) is None
    await fleet.settled()


async def test_a_model_that_does_not_come_back_is_refused_after_a_bound(
    fleet_parts: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real status and Retry-After; at once where it has been gone for long."""
    fleet_parts.settings = {"replica_wait_s": 0.6}
    await fleet_parts.start()
    try:
        fleet_parts.router.set_reachable("w0", False)
        absences = fleet_parts.gateway.directory.absences
        for is_lately in (True, False):
            if not is_lately:
                monkeypatch.setattr("headrace_gateway.absences._LATELY_S", 0.0)
                fleet_parts.gateway._flow.generator.__dict__["replica_wait_s"] = 60.0
            started_s = time.monotonic()
            async with asyncio.timeout(20.0):
                answer = await ask(fleet_parts, stream=True)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "no_replica"
            assert not is_lately or time.monotonic() - started_s >= 0.6
            assert not await absences.until_back("never-served", 60.0)
    finally:
        await fleet_parts.close()


async def test_stream_waits_for_a_replacement(fleet: GatewayFleet) -> None:
    """The only worker dies; one that comes up a moment later finishes the answer."""
    fleet.worker.script = saying("never lost")
    fleet.worker.switches.die_after_tokens = 4
    asked = asyncio.create_task(ask(fleet, stream=True))
    await eventually(lambda: len(fleet.router.picks) >= 2)
    await fleet.add_worker(FakeWorker(worker_id="w9", script=saying("never lost")))
    assert streamed_text(await asked) == "never lost"


@pytest.mark.parametrize("num_tokens", [0, 4])
@pytest.mark.parametrize("is_noticed", [True, False])
async def test_the_only_worker_is_asked_again_when_it_works_again(
    fleet: GatewayFleet, num_tokens: int, is_noticed: bool
) -> None:
    """It was frozen: who was lost there finds none but it, whether or not the router noticed."""
    fleet.worker.script = saying("frozen for a while")
    fleet.worker.switches.die_after_tokens = num_tokens
    asked = asyncio.create_task(ask(fleet, stream=True))
    await eventually(lambda: len(fleet.router.picks) >= 2)
    fleet.worker.switches.die_after_tokens = None
    if is_noticed:
        fleet.router.set_reachable("w0", False)
        await asyncio.sleep(0.5)
        assert not asked.done()
        fleet.router.set_reachable("w0", True)
    assert streamed_text(await asked) == "frozen for a while"
    await fleet.settled()


async def test_failure_after_the_first_token_is_an_error_event(fleet_parts: GatewayFleet) -> None:
    """Status 200 is out: the error comes as an event, then [DONE]; what was made is billed."""
    fleet_parts.settings = {"max_attempts": 1}
    await fleet_parts.start()
    try:
        fleet_parts.worker.switches.die_after_tokens = 3
        answer = await ask(fleet_parts, stream=True)
        *_, error, done, _ = answer.text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "no_replica"
        assert done == "data: [DONE]"
        assert finish_reasons(answer) == []
        (closed,) = fleet_parts.usage.closed_events()
        assert closed.ending == usage_pb2.ENDING_FAILED
        assert closed.usage.output_tokens == 3
    finally:
        await fleet_parts.close()


async def test_deadline(fleet_parts: GatewayFleet) -> None:
    """A request that outlives its time ends with 504 and is closed as such."""
    fleet_parts.settings = {"request_timeout_s": 1.0}
    await fleet_parts.start()
    try:
        fleet_parts.worker.switches.hang_after_tokens = 2
        answer = await ask(fleet_parts)
        assert answer.status_code == 504
        (closed,) = fleet_parts.usage.closed_events()
        assert closed.ending == usage_pb2.ENDING_DEADLINE
        await fleet_parts.settled()
    finally:
        await fleet_parts.close()

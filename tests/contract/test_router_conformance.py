"""The Router contract, against the real service with workers and against its fake."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import pytest

from headrace_common.blocks import chain, chain_key, join
from headrace_common.clock import SystemClock
from headrace_common.errors import InvalidRequest, ModelNotFound, NoReplica, NotFound
from headrace_common.rpc import call_stream, method_ref, open_channel
from headrace_common.session import SessionClient
from headrace_contracts.router.v1 import router_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.worker.v1.worker_pb2 import WORKER_STATE_DRAINING, DrainRequest
from headrace_router.app import RouterApp
from headrace_router.settings import RouterSettings
from headrace_testing.fake_router import DESCRIPTOR, FakeRouter, FakeRouterServer
from headrace_testing.fake_worker import MODEL, FakeWorker, FakeWorkerServer
from headrace_testing.waiting import eventually

PICK = method_ref(DESCRIPTOR, "Pick", pb.PickMessage, pb.Decision)
WATCH = method_ref(DESCRIPTOR, "WatchReplicas", pb.WatchReplicasRequest, pb.ReplicaList)
GET = method_ref(DESCRIPTOR, "GetDecision", pb.GetDecisionRequest, pb.Decision)


@dataclass
class Served:
    """A router with two workers, and the means to drain one."""

    client: SessionClient
    address: str
    drain: Callable[[str], Awaitable[None]]


@pytest.fixture(params=["real", "fake"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        workers = {}
        for name in ("w1", "w2"):
            server = FakeWorkerServer(FakeWorker(name))
            workers[name] = await stack.enter_async_context(server)
        if request.param == "fake":
            served = await serve_fake(workers, stack)
        else:
            served = await serve_real(workers, request.getfixturevalue("redis_db_url"), stack)
        stack.push_async_callback(served.client.close)
        yield served


async def serve_fake(workers: dict[str, FakeWorkerServer], stack: AsyncExitStack) -> Served:
    router = FakeRouter()
    for name, worker in workers.items():
        router.add_worker(name, worker.address, [worker.worker.card()])

    async def drain(name: str) -> None:
        router.set_state(name, WORKER_STATE_DRAINING)

    server = await stack.enter_async_context(FakeRouterServer(router))
    return Served(SessionClient(server.address), server.address, drain)


async def serve_real(
    workers: dict[str, FakeWorkerServer], url: str, stack: AsyncExitStack
) -> Served:
    addresses = ",".join(worker.address for worker in workers.values())
    app = RouterApp(RouterSettings(redis_url=url, workers=addresses), SystemClock())
    await app.start()
    stack.push_async_callback(app.stop, 0)

    async def drain(name: str) -> None:
        await workers[name].worker.Drain(DrainRequest(), None)

    await eventually(lambda: len(app.table.serving(MODEL)) == 2 and app.lifecycle.is_ready)
    address = f"127.0.0.1:{app.rpc.port}"
    return Served(SessionClient(address), address, drain)


def ask(request_id: str = "r", **fields: object) -> pb.PickMessage:
    known: dict[str, object] = {"request_id": request_id, "model": MODEL, "prompt_tokens": 32}
    return pb.PickMessage(pick=pb.PickRequest(**(known | fields)))


async def pick(served: Served, **fields: object) -> pb.Decision:
    """Pick and end the call."""
    async with await served.client.start(PICK, timeout_s=10) as call:
        call.send(ask(**fields))
        decision = await call.receive()
        assert decision is not None
        return decision


async def test_a_pick_names_a_replica_and_its_reasons(served: Served) -> None:
    """Where to go, by which policy, and every candidate."""
    decision = await pick(served)
    assert decision.request_id == "r"
    assert decision.replica.worker_id in {"w1", "w2"}
    assert decision.address
    assert decision.policy
    assert {one.replica.worker_id for one in decision.candidates} == {"w1", "w2"}
    assert all(not one.filtered_by for one in decision.candidates)


async def test_excluded_replicas_are_never_picked(served: Served) -> None:
    """They just failed this request; with all excluded there is no replica."""
    w1, w2 = (ReplicaRef(worker_id=name, incarnation=1) for name in ("w1", "w2"))
    for _ in range(5):
        decision = await pick(served, excluded=[w1])
        assert decision.replica == w2
    reasons = {one.replica.worker_id: one.filtered_by for one in decision.candidates}
    assert reasons == {"w1": "excluded", "w2": ""}
    with pytest.raises(NoReplica) as caught:
        await pick(served, excluded=[w1, w2])
    assert caught.value.retry_after_s


async def test_another_incarnation_is_not_excluded(served: Served) -> None:
    """A restarted worker is another replica."""
    former = [ReplicaRef(worker_id=name, incarnation=99) for name in ("w1", "w2")]
    assert (await pick(served, excluded=former)).replica.worker_id


async def test_a_draining_replica_is_not_picked(served: Served) -> None:
    """And the list says so."""
    await served.drain("w1")

    async def is_known() -> bool:
        reasons = {
            one.replica.worker_id: one.filtered_by for one in (await pick(served)).candidates
        }
        return reasons["w1"] == "draining"

    await eventually(is_known)
    assert {(await pick(served)).replica.worker_id for _ in range(5)} == {"w2"}


async def test_unknown_models_are_not_found(served: Served) -> None:
    """404, not 503."""
    with pytest.raises(ModelNotFound):
        await pick(served, model="no-such-model")


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": ""},
        {"model": ""},
        {"block_hashes": b"cut", "block_size_tokens": 16},
        {"block_hashes": b"x" * 16},
        {"block_hashes": b"x" * 160, "block_size_tokens": 16},
    ],
)
async def test_malformed_picks_are_refused(served: Served, fields: dict[str, object]) -> None:
    """No ids, cut hashes, hashes without size, more blocks than tokens."""
    with pytest.raises(InvalidRequest):
        await pick(served, **fields)


async def test_the_order_of_messages_is_checked(served: Served) -> None:
    """First the request, then progress only."""
    async with await served.client.start(PICK) as call:
        call.send(pb.PickMessage(progress=pb.PickProgress(first_token=True)))
        with pytest.raises(InvalidRequest):
            await call.receive()
    async with await served.client.start(PICK) as call:
        call.send(ask())
        await call.receive()
        call.send(ask())
        with pytest.raises(InvalidRequest):
            await call.receive()


async def load(served: Served) -> int:
    """Load of the whole fleet, as the candidates of a fresh pick tell it."""
    decision = await pick(served, request_id="probe")
    return sum(one.load_tokens for one in decision.candidates)


@pytest.mark.parametrize("ending", ["half_close", "cancel", "connection", "error"])
async def test_the_end_of_the_call_gives_the_load_back(served: Served, ending: str) -> None:
    """However it comes: regularly, by cancellation, by a lost connection, by a mistake."""
    client = SessionClient(served.address)
    call = await client.start(PICK)
    call.send(ask(prompt_tokens=32))
    assert await call.receive() is not None
    call.send(pb.PickMessage(progress=pb.PickProgress(first_token=True, output_tokens=1)))
    assert await load(served) >= 32
    if ending == "half_close":
        call.half_close()
        assert await call.receive() is None
    elif ending == "cancel":
        call.cancel()
    elif ending == "error":
        call.send(ask())
    if ending == "connection":
        await client.close()

    async def is_idle() -> bool:
        return await load(served) == 0

    await eventually(is_idle)
    await client.close()


async def test_load_spreads_over_the_replicas(served: Served) -> None:
    """Two picks at once go to two replicas."""
    async with await served.client.start(PICK) as one, await served.client.start(PICK) as two:
        one.send(ask("one", prompt_tokens=5000))
        first = await one.receive()
        two.send(ask("two", prompt_tokens=5000))
        second = await two.receive()
        assert first is not None
        assert second is not None
        assert first.replica != second.replica


async def test_a_decision_is_remembered(served: Served) -> None:
    """By request id; what is unknown is not found."""
    hashes = join(chain(chain_key("x"), list(range(32))))
    decision = await pick(served, request_id="mine", block_hashes=hashes, block_size_tokens=16)
    got = await served.client.unary(GET, pb.GetDecisionRequest(request_id="mine"), timeout_s=5)
    assert got == decision
    with pytest.raises(NotFound):
        await served.client.unary(GET, pb.GetDecisionRequest(request_id="other"), timeout_s=5)


async def test_the_replica_list_comes_at_once_and_at_each_change(served: Served) -> None:
    """With addresses, states and model cards: all that a gateway knows of workers."""
    channel = open_channel(served.address)
    stream = call_stream(channel, WATCH, pb.WatchReplicasRequest())
    async with aclosing(stream) as lists:
        first = await asyncio.wait_for(anext(lists), 30)
        by_id = {one.replica.worker_id: one for one in first.replicas}
        assert set(by_id) == {"w1", "w2"}
        assert all(one.reachable and one.address for one in by_id.values())
        assert by_id["w1"].models[0].model == MODEL
        assert by_id["w1"].models[0].HasField("recipe")
        await served.drain("w2")
        async with asyncio.timeout(30):
            async for after in lists:
                states = {one.replica.worker_id: one.state for one in after.replicas}
                if states["w2"] == WORKER_STATE_DRAINING:
                    break
        assert after.version > first.version
    await channel.close()

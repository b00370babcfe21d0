"""A prompt is computed by one worker and decoded by another, over real calls."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_common.errors import ReplicaLost
from headrace_common.metrics import RpcMetrics
from headrace_common.rpc import method_ref
from headrace_common.rpc_server import RpcServer
from headrace_common.session import SessionClient
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing.fake_worker import FakeWorker
from headrace_testing.tiny_model import TinyShape, write_hf_folder
from headrace_testing.waiting import free_port
from headrace_worker.app import WorkerApp
from headrace_worker.settings import WorkerSettings

SERVICE = pb.DESCRIPTOR.services_by_name["Worker"]
GENERATE = method_ref(SERVICE, "Generate", pb.GenerateRequest, pb.GenerateEvent)
PROMPT = [40 + (7 * i * i + i) % 150 for i in range(203)]
FULL_BLOCKS = 12


class Fleet:
    """Workers over one tiny model, each with a session."""

    def __init__(self, folder, stack: AsyncExitStack) -> None:
        self.folder, self.stack = folder, stack

    async def worker(self, name: str, **settings) -> WorkerApp:
        known = {
            "worker_id": name,
            "model_path": self.folder,
            "model_name": "tiny",
            "listen": f"127.0.0.1:{free_port()}",
            "kv_capacity_tokens": 4096,
            "drain_grace_s": 0,
            "check_invariants": True,
        }
        app = WorkerApp(WorkerSettings(**(known | settings)), SystemClock(), CollectorRegistry())
        self.stack.push_async_callback(app.stop)
        await app.start()
        return app

    async def ask(
        self, app: WorkerApp, source: int | None = None
    ) -> tuple[list[int], pb.GenerateEvent]:
        message = pb.GenerateRequest(
            request_id="r",
            model="tiny",
            prompt_token_ids=PROMPT,
            stopping=pb.Stopping(max_tokens=24, ignore_eos=True),
        )
        if source is not None:
            message.kv_source.address = f"127.0.0.1:{source}"
        session = SessionClient(f"127.0.0.1:{app.port}")
        try:
            events = [e async for e in session.stream(GENERATE, message, timeout_s=60)]
        finally:
            await session.close()
        return [t for e in events for d in e.deltas for t in d.token_ids], events[-1]


@pytest.fixture
async def fleet(tmp_path) -> AsyncIterator[Fleet]:
    write_hf_folder(tmp_path, TinyShape(context_tokens=1024))
    async with AsyncExitStack() as stack:
        yield Fleet(tmp_path, stack)


def prefilled(app: WorkerApp) -> float:
    return app.metrics.tokens.labels("prefill")._value.get()


def outcomes(app: WorkerApp) -> dict[str, float]:
    names = ("ok", "held", "partial", "no_room", "failed")
    found = {name: app.metrics.kv_transfers.labels(name)._value.get() for name in names}
    return {name: count for name, count in found.items() if count}


async def test_the_decode_worker_computes_no_more_than_the_last_block(fleet: Fleet) -> None:
    """Same tokens as from one worker alone, and what was computed for it is not called cached."""
    plain = await fleet.worker("plain")
    expected, alone = await fleet.ask(plain)
    prefill, decode = await fleet.worker("p", role="prefill"), await fleet.worker("d")
    tokens, last = await fleet.ask(decode, prefill.port)
    assert tokens == expected
    assert prefilled(decode) == len(PROMPT) - 16 * FULL_BLOCKS
    assert prefilled(prefill) == len(PROMPT)
    assert outcomes(decode) == {"ok": 1}
    assert last.usage == alone.usage
    # Again: all is held here, and that is reuse.
    again, last = await fleet.ask(decode, prefill.port)
    assert (again, outcomes(decode)) == (expected, {"ok": 1, "held": 1})
    assert last.usage.cached_gpu_tokens == 16 * FULL_BLOCKS
    # A prompt that the prefill worker had cached is a reuse for the next decode worker too.
    other = await fleet.worker("d2")
    again, last = await fleet.ask(other, prefill.port)
    assert (again, last.usage.cached_gpu_tokens) == (expected, 16 * FULL_BLOCKS)
    for app in (prefill, decode, other):
        assert app.state.served is not None
        assert app.state.served.engine.load.kv_used_tokens == 0


async def test_a_dead_prefill_worker_costs_only_time(fleet: Fleet) -> None:
    """The decode worker computes the prompt itself."""
    decode = await fleet.worker("d")
    tokens, last = await fleet.ask(decode, free_port())
    assert (len(tokens), last.usage.cached_gpu_tokens) == (24, 0)
    assert (prefilled(decode), outcomes(decode)) == (len(PROMPT), {"failed": 1})


class Relay(FakeWorker):
    """Passes a real worker's blocks on, as *change* says; it may fail in mid-transfer."""

    def __init__(self, real: WorkerApp, change: Callable[[int, pb.KvBlocks], None]) -> None:
        super().__init__("relay")
        self._real, self._change = real, change

    async def PrefillKv(self, message, _call):  # noqa: N802 - contract name
        transfer = self._real.state.served.transfer
        transfer._num_blocks_at_once = 4
        number = 0
        async for part in transfer.give(message, 10_000, lambda: None):
            self._change(number, part)
            number += 1
            yield part


def _dies(number: int, _part: pb.KvBlocks) -> None:
    if number == 2:
        raise ReplicaLost("killed")


def _flips_a_bit(number: int, part: pb.KvBlocks) -> None:
    if number == 2:
        part.data = part.data[:-1] + bytes([part.data[-1] ^ 1])


def _names_other_blocks(number: int, part: pb.KvBlocks) -> None:
    if number == 2:
        part.block_hashes = bytes(len(part.block_hashes))


@pytest.mark.parametrize("change", [_dies, _flips_a_bit, _names_other_blocks])
async def test_what_came_before_a_failure_is_kept_and_the_rest_computed(
    fleet: Fleet, change: Callable[[int, pb.KvBlocks], None]
) -> None:
    """Four of twelve blocks came; the answer is the same."""
    prefill, decode = await fleet.worker("p"), await fleet.worker("d")
    expected, _ = await fleet.ask(prefill)
    address = f"127.0.0.1:{free_port()}"
    relay = RpcServer(address, [(SERVICE, Relay(prefill, change))], RpcMetrics(CollectorRegistry()))
    await relay.start()
    try:
        tokens, _ = await fleet.ask(decode, relay.port)
    finally:
        await relay.stop(0)
    assert tokens == expected
    assert prefilled(decode) == len(PROMPT) - 4 * 16
    assert outcomes(decode) == {"failed": 1}


async def test_another_models_blocks_are_refused(fleet: Fleet, tmp_path) -> None:
    """Another fingerprint: the transfer ends before anything is computed there."""
    other = tmp_path / "other"
    write_hf_folder(other, TinyShape(context_tokens=1024), seed=1)
    prefill, decode = await fleet.worker("p", model_path=other), await fleet.worker("d")
    await fleet.ask(decode, prefill.port)
    assert (prefilled(prefill), outcomes(decode)) == (0, {"failed": 1})


async def test_a_full_pool_takes_nothing(fleet: Fleet) -> None:
    """Blocks that come in leave room for what runs."""
    prefill = await fleet.worker("p")
    decode = await fleet.worker("d", kv_capacity_tokens=16 * 20)
    tokens, _ = await fleet.ask(decode, prefill.port)
    assert len(tokens) == 24
    assert outcomes(decode) == {"no_room": 1}

"""A worker that fails every request, behind the real router and gateway: clients notice nothing."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from headrace_common.clock import SystemClock
from headrace_router.app import RouterApp
from headrace_router.settings import RouterSettings
from headrace_testing.fake_worker import MODEL, FakeWorker, FakeWorkerServer
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.waiting import eventually, free_port


async def test_a_failing_worker_is_left_alone_and_comes_back(tmp_path: Path) -> None:
    """Three failures open its breaker; later one probe looks, and its first token closes it."""
    async with AsyncExitStack() as stack:
        bad, good = FakeWorker("bad"), FakeWorker("good")
        servers = [
            await stack.enter_async_context(FakeWorkerServer(worker)) for worker in (bad, good)
        ]
        workers = ",".join(server.address for server in servers)
        nowhere = f"redis://127.0.0.1:{free_port()}/0"
        settings = RouterSettings.model_validate({"redis_url": nowhere, "workers": workers})
        router = RouterApp(settings, SystemClock())
        await router.start()
        stack.push_async_callback(router.stop, 0)
        await eventually(lambda: len(router.table.serving(MODEL)) == 2, within_s=5)
        fleet = GatewayFleet(tmp_path)
        fleet.settings["router_address"] = f"127.0.0.1:{router.rpc.port}"
        stack.push_async_callback(fleet.close)
        await fleet.start(num_workers=0)
        bad.switches.die_after_tokens = 0
        client = await stack.enter_async_context(fleet.http())

        async def ask(idx: int) -> None:
            # Differs from the first block on: a shared one would draw all to the good worker.
            body = chat_body(f"{idx:03} is the question")
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text

        for idx in range(60):
            await ask(idx)
            if router.breakers.num_open:
                break
        assert router.breakers.num_open == 1
        num_failed = len(bad.requests)
        assert num_failed == 3
        for idx in range(10):
            await ask(100 + idx)
        # At most one probe since: the breaker is open for a second.
        assert len(bad.requests) <= num_failed + 1
        bad.switches.die_after_tokens = None
        # Nobody else takes requests now: the next one is the probe, once the time is over.
        good.switches.refuse = True

        async def has_healed() -> bool:
            answer = await client.post("/v1/chat/completions", json=chat_body("well?"))
            return answer.status_code == 200 and router.breakers.num_open == 0

        await eventually(has_healed, within_s=10)

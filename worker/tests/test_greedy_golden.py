"""The whole worker over the real model says what the reference implementation says."""

import asyncio
import json
from pathlib import Path

import pytest

from headrace_common.clock import SystemClock
from headrace_common.metrics import new_registry
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.app import WorkerApp
from headrace_worker.settings import WorkerSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "greedy_smollm2.json"
GENERATE = method_ref(
    pb.DESCRIPTOR.services_by_name["Worker"], "Generate", pb.GenerateRequest, pb.GenerateEvent
)
NUM_CASES, AT_ONCE = 12, 8


async def generate(client, prompt, max_tokens):
    request = pb.GenerateRequest(
        request_id="golden",
        model="smollm2",
        prompt_token_ids=prompt,
        stopping=pb.Stopping(max_tokens=max_tokens),
    )
    events = [event async for event in client.stream(GENERATE, request)]
    tokens = [token_id for e in events for d in e.deltas for token_id in d.token_ids]
    return tokens, events[-1].usage.cached_gpu_tokens


async def test_eight_at_once_equal_the_reference_with_and_without_cache(smollm2_gguf):
    """Token by token; the second round reuses the first one's blocks and says the same."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    step = len(golden["cases"]) // NUM_CASES
    cases = golden["cases"][:: max(1, step)][:NUM_CASES]
    settings = WorkerSettings.load(
        model_path=smollm2_gguf, model_name="smollm2", kv_capacity_tokens=4096, drain_grace_s=0
    )
    app = WorkerApp(settings, SystemClock(), new_registry())
    places = asyncio.Semaphore(AT_ONCE)
    try:
        await app.start()
        client = SessionClient(f"127.0.0.1:{app.port}")

        async def check(case):
            async with places:
                prompt = case["prompt_token_ids"]
                made, cached = await generate(client, prompt, golden["max_new_tokens"])
                assert made == case["output_token_ids"], case["text"]
                return cached

        await asyncio.gather(*map(check, cases))
        cached = await asyncio.gather(*map(check, cases))
        assert sum(cached) > 0
        await client.close()
    finally:
        await app.stop()

"""Workers whose engine takes text: one suite for the fake and the adapter over a real server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.blocks import self_test
from headrace_common.clock import SystemClock
from headrace_common.errors import (
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    ReplicaDraining,
    Unimplemented,
)
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing.fake_openai import WORDS, FakeOpenAi
from headrace_testing.fake_text_worker import FakeTextWorker
from headrace_testing.fake_worker import FakeWorkerServer, saying
from headrace_testing.waiting import eventually
from headrace_worker.settings import UpstreamSettings
from headrace_worker.upstream.app import UpstreamApp

MODEL = "text-model"
SERVICE = pb.DESCRIPTOR.services_by_name["Worker"]
GENERATE = method_ref(SERVICE, "Generate", pb.GenerateRequest, pb.GenerateEvent)
DESCRIBE = method_ref(SERVICE, "Describe", pb.DescribeRequest, pb.DescribeResponse)
FETCH = method_ref(SERVICE, "FetchTokenizer", pb.FetchTokenizerRequest, pb.TokenizerChunk)
WATCH = method_ref(SERVICE, "WatchLoad", pb.WatchLoadRequest, pb.LoadReport)
DRAIN = method_ref(SERVICE, "Drain", pb.DrainRequest, pb.DrainResponse)
EMBED = method_ref(SERVICE, "Embed", pb.EmbedRequest, pb.EmbedResponse)
DELAY_S = 0.08


@contextlib.asynccontextmanager
async def fake() -> AsyncIterator[str]:
    worker = FakeTextWorker("w", model=MODEL, script=saying("".join(WORDS)))
    worker.switches.delay_per_token_s = DELAY_S / 8
    async with FakeWorkerServer(worker) as server:
        yield server.address


@contextlib.asynccontextmanager
async def adapter() -> AsyncIterator[str]:
    async with FakeOpenAi(delay_per_word_s=DELAY_S) as server:
        settings = UpstreamSettings(
            worker_id="w",
            url=server.url,
            model=server.model,
            model_name=MODEL,
            drain_grace_s=0.0,
            probe_interval_s=0.05,
        )
        app = UpstreamApp(settings, SystemClock(), CollectorRegistry())
        await app.start()
        try:
            await eventually(lambda: app.state.is_ready)
            yield app.address
            await eventually(lambda: server.num_running == 0)
        finally:
            await app.stop()


@pytest.fixture(params=[fake, adapter])
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[SessionClient]:
    async with request.param() as address:
        session = SessionClient(address)
        try:
            yield session
        finally:
            await session.close()


def asked(**fields: object) -> pb.GenerateRequest:
    text = pb.TextPrompt(messages_json='[{"role": "user", "content": "hi"}]', estimated_tokens=9)
    known: dict[str, object] = {"request_id": "r", "model": MODEL, "text": text}
    request = pb.GenerateRequest(**(known | fields))  # type: ignore[arg-type]
    request.stopping.max_tokens = 1000
    return request


async def test_the_card_says_what_it_is(worker: SessionClient) -> None:
    """Text, no tokenizer, no embeddings, and a recipe that holds; load is told at once."""
    said = await worker.unary(DESCRIBE, pb.DescribeRequest(), timeout_s=5)
    (card,) = said.models
    assert card.takes_text
    assert (card.model, said.state) == (MODEL, pb.WORKER_STATE_READY)
    assert card.context_tokens > 0
    recipe = card.recipe
    assert recipe.self_test == self_test(recipe.model_fingerprint, recipe.block_size_tokens)
    report = await anext(worker.stream(WATCH, pb.WatchLoadRequest(), timeout_s=5))
    assert report.state == pb.WORKER_STATE_READY
    with pytest.raises(NotFound):
        await anext(worker.stream(FETCH, pb.FetchTokenizerRequest(model=MODEL), timeout_s=5))
    with pytest.raises(Unimplemented):
        await worker.unary(EMBED, pb.EmbedRequest(model=MODEL), timeout_s=5)


async def test_an_answer_is_text_and_counts(worker: SessionClient) -> None:
    """No ids; counts that only grow until told; one end. For conversations and plain prompts."""
    plain = pb.TextPrompt(prompt="hi", estimated_tokens=2)
    for request in (asked(), asked(text=plain)):
        events = [event async for event in worker.stream(GENERATE, request, timeout_s=10)]
        deltas = [delta for event in events for delta in event.deltas]
        assert "".join(delta.text for delta in deltas) == "".join(WORDS)
        assert not any(delta.token_ids for delta in deltas)
        reasons = [delta.finish_reason for delta in deltas if delta.finish_reason]
        assert reasons == [pb.FINISH_REASON_STOP]
        assert events[0].started.replica.worker_id == "w"
        assert events[-1].usage.prompt_tokens > 0
        assert events[-1].usage.output_tokens >= len(WORDS)
        assert not events[-1].usage_is_estimate


async def test_what_needs_tokens_is_refused(worker: SessionClient) -> None:
    """Before anything begins."""
    wrong: list[tuple[dict[str, object], type[HeadraceError]]] = [
        ({"text": None, "prompt_token_ids": [1]}, InvalidRequest),
        ({"model": "other"}, ModelNotFound),
        ({"resume": [pb.ResumeChoice(output_token_ids=[1])]}, Unimplemented),
        ({"logprobs": pb.LogprobOptions(prompt=True)}, InvalidRequest),
    ]
    for fields, error in wrong:
        with pytest.raises(error):
            await anext(worker.stream(GENERATE, asked(**fields), timeout_s=5))


async def test_a_drain_ends_what_cannot_move(worker: SessionClient) -> None:
    """Its caller is told; nothing new is taken."""
    stream = worker.stream(GENERATE, asked(), timeout_s=10)
    await anext(stream)
    drained = await worker.unary(DRAIN, pb.DrainRequest(grace_ms=1), timeout_s=5)
    assert drained.num_moved == 1
    with pytest.raises(ReplicaDraining):
        async for _ in stream:
            pass
    with pytest.raises(ReplicaDraining):
        await anext(worker.stream(GENERATE, asked(), timeout_s=5))

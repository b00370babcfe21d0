"""The Worker contract: the same suite against the fake and against the real servicer.

The real one runs the whole worker over a tiny random Llama checkpoint. Nothing here knows what a
model will say; the rules hold for any text.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import re

import pytest
from tokenizers import Tokenizer

from headrace_common.blocks import BLOCK_SIZE_TOKENS, self_test
from headrace_common.clock import SystemClock
from headrace_common.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    ReplicaDraining,
)
from headrace_common.metrics import new_registry
from headrace_common.rpc import call_stream, call_unary, method_ref, open_channel
from headrace_common.session import SessionClient
from headrace_contracts.types.v1.types_pb2 import PRIORITY_HIGH
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing.fake_worker import FakeWorker, FakeWorkerServer
from headrace_testing.tiny_model import write_hf_folder
from headrace_testing.waiting import eventually
from headrace_worker.app import WorkerApp
from headrace_worker.settings import WorkerSettings

MODEL = "tiny"
SERVICE = pb.DESCRIPTOR.services_by_name["Worker"]
GENERATE = method_ref(SERVICE, "Generate", pb.GenerateRequest, pb.GenerateEvent)
DESCRIBE = method_ref(SERVICE, "Describe", pb.DescribeRequest, pb.DescribeResponse)
FETCH = method_ref(SERVICE, "FetchTokenizer", pb.FetchTokenizerRequest, pb.TokenizerChunk)
WATCH = method_ref(SERVICE, "WatchLoad", pb.WatchLoadRequest, pb.LoadReport)
DRAIN = method_ref(SERVICE, "Drain", pb.DrainRequest, pb.DrainResponse)
EMBED = method_ref(SERVICE, "Embed", pb.EmbedRequest, pb.EmbedResponse)


@contextlib.asynccontextmanager
async def fake():
    """The fake worker, slowed a little so that streams can be caught in the middle."""
    worker = FakeWorker("w1", incarnation=7, model=MODEL)
    worker.switches.delay_per_token_s = 0.002
    async with FakeWorkerServer(worker) as server:
        yield server.address


@contextlib.asynccontextmanager
async def real(folder):
    """The whole worker in this process."""
    settings = WorkerSettings.load(
        worker_id="w1",
        model_path=folder,
        model_name=MODEL,
        kv_capacity_tokens=4096,
        drain_grace_s=0,
        cache_dir=folder,
    )
    app = WorkerApp(settings, SystemClock(), new_registry())
    try:
        await app.start()
        yield f"127.0.0.1:{app.port}"
    finally:
        await app.stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_hf_folder(folder)
    return folder


@pytest.fixture(params=["fake", "real"])
async def worker(request, checkpoint):
    """A client of one implementation, with its model card."""
    server = fake() if request.param == "fake" else real(checkpoint)
    async with server as address:
        client = Client(address)
        client.card = (await client.unary(DESCRIBE, pb.DescribeRequest())).models[0]
        try:
            yield client
        finally:
            await client.session.close()


class Client:
    """What a gateway does with a worker."""

    def __init__(self, address):
        self.address = address
        self.session = SessionClient(address)
        self.card = pb.ModelCard()

    async def unary(self, method, message):
        return await self.session.unary(method, message, timeout_s=10)

    async def all(self, method, message):
        return [part async for part in self.session.stream(method, message, timeout_s=20)]

    async def generate(self, request):
        return Result(await self.all(GENERATE, request))

    async def tokenizer(self):
        chunks = await self.all(FETCH, pb.FetchTokenizerRequest(model=MODEL))
        return b"".join(chunk.data for chunk in chunks)


class Result:
    """The events of one request, added up."""

    def __init__(self, events):
        self.events = events

    @property
    def usage(self):
        return self.events[-1].usage

    def deltas(self, choice_idx=0):
        return [d for e in self.events for d in e.deltas if d.choice_idx == choice_idx]

    def tokens(self, choice_idx=0):
        return [token_id for delta in self.deltas(choice_idx) for token_id in delta.token_ids]

    def text(self, choice_idx=0):
        return "".join(delta.text for delta in self.deltas(choice_idx))

    def last(self, choice_idx=0):
        return self.deltas(choice_idx)[-1]


def a_request(prompt=range(40, 70), *, max_tokens=12, seed=3, temperature=1.0, **more):
    stopping = more.pop("stopping", None) or pb.Stopping(max_tokens=max_tokens)
    sampling = more.pop("sampling", None) or pb.Sampling(temperature=temperature)
    return pb.GenerateRequest(
        request_id="req_1",
        model=MODEL,
        prompt_token_ids=list(prompt),
        sampling=sampling,
        stopping=stopping,
        seed=seed,
        **more,
    )


def endless(**more):
    """A stream that is still running when the test acts."""
    return a_request(stopping=pb.Stopping(max_tokens=200, ignore_eos=True), **more)


async def _exhaust(stream):
    async for _ in stream:
        pass


async def decoded(worker, token_ids):
    tokenizer = Tokenizer.from_str((await worker.tokenizer()).decode())
    return tokenizer.decode(token_ids, skip_special_tokens=True)


async def test_describe_says_what_is_served(worker):
    """Card, recipe with its self-test, replica and state are complete."""
    described = await worker.unary(DESCRIBE, pb.DescribeRequest())
    (card,) = described.models
    assert described.state == pb.WORKER_STATE_READY
    assert described.replica.worker_id == "w1"
    assert described.replica.incarnation > 0
    assert described.load_progress_ratio == 1.0
    assert described.kv_capacity_tokens >= BLOCK_SIZE_TOKENS
    assert card.model == MODEL
    assert card.context_tokens > 0
    assert card.vocab_size > 0
    assert card.eos_token_ids
    assert card.recipe.self_test == self_test(card.fingerprint, BLOCK_SIZE_TOKENS)
    assert card.recipe.block_size_tokens == BLOCK_SIZE_TOKENS


async def test_the_tokenizer_is_the_one_on_the_card(worker):
    """The chunks joined have the card's hash and are a tokenizer."""
    data = await worker.tokenizer()
    assert hashlib.sha256(data).hexdigest() == worker.card.tokenizer_sha256
    assert json.loads(data)["model"]["type"] == "BPE"
    with pytest.raises(ModelNotFound):
        await worker.all(FETCH, pb.FetchTokenizerRequest(model="other"))


async def test_a_stream_starts_goes_on_and_ends(worker):
    """First event: started. Usage only grows. Last event: finish reason and timings."""
    result = await worker.generate(a_request())
    first, last = result.events[0], result.events[-1]
    assert first.started.replica.worker_id == "w1"
    assert first.usage.prompt_tokens == 30
    assert not any(event.HasField("started") for event in result.events[1:])
    counts = [event.usage.output_tokens for event in result.events]
    assert counts == sorted(counts)
    assert counts[-1] == len(result.tokens()) <= 12
    assert result.last().finish_reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
    assert last.HasField("timings")
    assert not any(event.HasField("timings") for event in result.events[:-1])


async def test_the_text_is_the_tokens_decoded(worker):
    """Joined text equals the tokenizer's own decoding of the tokens, end token left out."""
    result = await worker.generate(a_request(max_tokens=40))
    assert result.text() == await decoded(worker, result.tokens())


async def test_the_same_request_gives_the_same_answer(worker):
    """Output is a function of prompt, parameters and seed."""
    first, second = [await worker.generate(a_request(seed=9)) for _ in range(2)]
    assert first.tokens() == second.tokens()
    others = [await worker.generate(a_request(seed=seed)) for seed in range(4)]
    assert len({tuple(other.tokens()) for other in others}) > 1


@pytest.mark.parametrize("broken_at", [1, 5, 11])
async def test_a_resumed_stream_goes_on_token_for_token(worker, broken_at):
    """Prompt + output so far + seed give exactly the rest, in tokens and in text."""
    whole = await worker.generate(endless(seed=4, n=1))
    sent = whole.tokens()[:broken_at]
    request = endless(seed=4, resume=[pb.ResumeChoice(choice_idx=0, output_token_ids=sent)])
    rest = await worker.generate(request)
    assert rest.tokens() == whole.tokens()[broken_at:]
    assert rest.usage.prompt_tokens == whole.usage.prompt_tokens
    assert rest.usage.output_tokens == whole.usage.output_tokens
    sent_text = "".join(d.text for d in whole.deltas())
    assert sent_text.endswith(rest.text())


async def test_a_resumed_choice_that_had_ended_makes_nothing(worker):
    """A complete choice is only told again to have ended."""
    whole = await worker.generate(a_request(max_tokens=3))
    again = await worker.generate(
        a_request(max_tokens=3, resume=[pb.ResumeChoice(output_token_ids=whole.tokens())])
    )
    assert (again.tokens(), again.text()) == ([], "")
    assert again.last().finish_reason == whole.last().finish_reason
    assert again.usage.output_tokens == whole.usage.output_tokens


async def test_max_tokens_is_kept(worker):
    """Exactly that many tokens, and LENGTH."""
    result = await worker.generate(a_request(stopping=pb.Stopping(max_tokens=7, ignore_eos=True)))
    assert len(result.tokens()) == 7
    assert result.last().finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_stop_string_is_cut_out_and_named(worker):
    """Text ends where the first stop string begins."""
    whole = (await worker.generate(endless(seed=5))).text()
    stop = whole[6:9]
    stopping = pb.Stopping(max_tokens=200, ignore_eos=True, stop=["\x00never", stop])
    result = await worker.generate(a_request(seed=5, stopping=stopping))
    assert result.text() == whole[: whole.find(stop)]
    assert result.last().finish_reason == pb.FINISH_REASON_STOP
    assert result.last().stop_matched == stop


async def test_a_stop_token_ends_without_text(worker):
    """The token is in the tokens, its text is not in the text."""
    whole = await worker.generate(endless(seed=6))
    stop_id = whole.tokens()[5]
    upto = whole.tokens()[: whole.tokens().index(stop_id) + 1]
    stopping = pb.Stopping(max_tokens=200, ignore_eos=True, stop_token_ids=[stop_id])
    result = await worker.generate(a_request(seed=6, stopping=stopping))
    assert result.tokens() == upto
    assert result.last().finish_reason == pb.FINISH_REASON_STOP
    assert result.last().stop_matched == ""
    assert result.text() == await decoded(worker, upto[:-1])


async def test_choices_come_apart_by_index(worker):
    """n choices each end, the prompt counts once, outputs add up."""
    result = await worker.generate(a_request(n=3))
    lengths = [len(result.tokens(idx)) for idx in range(3)]
    assert all(0 < length <= 12 for length in lengths)
    assert all(result.last(idx).finish_reason for idx in range(3))
    assert result.usage.output_tokens == sum(lengths)
    assert result.usage.prompt_tokens == 30
    assert len({tuple(result.tokens(idx)) for idx in range(3)}) > 1


async def test_a_long_prefix_is_reused_within_a_tenant_only(worker):
    """Second time: all full blocks but the last token's. Another salt: nothing. Same output."""
    prompt = range(40, 40 + 2 * BLOCK_SIZE_TOKENS)
    salted = [
        await worker.generate(a_request(prompt, cache_salt=salt)) for salt in (b"a", b"a", b"b")
    ]
    cached = [result.usage.cached_gpu_tokens for result in salted]
    assert cached == [0, BLOCK_SIZE_TOKENS, 0]
    skipped = await worker.generate(a_request(prompt, cache_salt=b"a", skip_prefix_cache=True))
    assert skipped.usage.cached_gpu_tokens == 0
    assert len({tuple(result.tokens()) for result in [*salted, skipped]}) == 1


async def test_log_probabilities_come_when_asked(worker):
    """One per token, finite, with bytes and as many alternatives as asked for."""
    result = await worker.generate(a_request(logprobs=pb.LogprobOptions(output=True, top=2)))
    said = [logprob for delta in result.deltas() for logprob in delta.logprobs]
    assert [logprob.token_id for logprob in said] == result.tokens()
    assert all(-1e9 <= logprob.logprob <= 0 and len(logprob.top) == 2 for logprob in said)
    silent = await worker.generate(a_request())
    assert not any(delta.logprobs for delta in silent.deltas())


async def test_log_probabilities_of_the_prompt_come_once(worker):
    """One per prompt token, with the first tokens; the first has none, so 0 stands there."""
    options = pb.LogprobOptions(prompt=True, top=1)
    result = await worker.generate(a_request(logprobs=options))
    said = [event.prompt_logprobs for event in result.events if event.prompt_logprobs]
    assert [[logprob.token_id for logprob in part] for part in said] == [list(range(40, 70))]
    first, *rest = said[0]
    assert (first.logprob, len(first.top)) == (0.0, 0)
    assert all(logprob.logprob < 0 and len(logprob.top) == 1 for logprob in rest)


async def test_log_probabilities_of_the_prompt_come_for_every_length_and_number_of_choices(worker):
    """A prompt of one token has an entry too, and several choices do not lose them."""
    options = pb.LogprobOptions(prompt=True, top=1)
    for prompt, n in (([40], 1), ([40], 2), ([40, 41, 42], 3)):
        wanted = a_request(prompt, logprobs=options, n=n)
        result = await worker.generate(wanted)
        said = [event.prompt_logprobs for event in result.events if event.prompt_logprobs]
        assert [[logprob.token_id for logprob in part] for part in said] == [prompt]


CALLS = pb.ToolCallRules(
    functions=[pb.CallableFunction(name="f", arguments_schema='{"additionalProperties": false}')],
    required=True,
    max_calls=1,
    begin="<call>",
    end="</call>",
)

TEXT_CALLS = pb.ToolCallRules(
    functions=[pb.CallableFunction(name="f", regex="ab")],
    required=True,
    begin="<call>",
    end="</call>",
)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (pb.OutputConstraint(choice=pb.TextChoice(texts=["é!", "é!"])), "é!"),
        (
            pb.OutputConstraint(tool_calls=CALLS),
            r'<call>\n{"name": "f", "arguments": {\s*}}\n</call>',
        ),
        (pb.OutputConstraint(tool_calls=TEXT_CALLS), r'<call>\n{"name": "f", "arguments": ab'),
    ],
)
async def test_an_answer_obeys_its_constraint(worker, constraint, pattern):
    """Whatever the temperature and the choice, and it ends by itself."""
    result = await worker.generate(
        a_request(
            constraint=constraint,
            n=2,
            temperature=1.5,
            max_tokens=200,
        )
    )
    for choice_idx in (0, 1):
        assert re.fullmatch(pattern, result.text(choice_idx))
        assert result.last(choice_idx).finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, ModelNotFound),
        ({"adapter": "lora@1"}, ModelNotFound),
        ({"prompt_token_ids": []}, InvalidRequest),
        ({"prompt_token_ids": [10**6]}, InvalidRequest),
        ({"prompt_token_ids": [40] * 5000}, ContextTooLong),
        ({"stopping": pb.Stopping()}, InvalidRequest),
        ({"constraint": pb.OutputConstraint()}, InvalidRequest),
        ({"constraint": pb.OutputConstraint(json_schema="{")}, InvalidRequest),
        ({"constraint": pb.OutputConstraint(json_schema='{"type": "zap"}')}, InvalidRequest),
        ({"constraint": pb.OutputConstraint(regex="(")}, InvalidRequest),
        ({"constraint": pb.OutputConstraint(choice=pb.TextChoice())}, InvalidRequest),
        ({"constraint": pb.OutputConstraint(tool_calls=pb.ToolCallRules())}, InvalidRequest),
    ],
)
async def test_what_cannot_be_done_is_refused_before_the_first_event(worker, change, error):
    """The first thing that comes is the error."""
    fields = {"request_id": "r", "model": MODEL, "prompt_token_ids": [40, 41]}
    fields |= {"stopping": pb.Stopping(max_tokens=1)} | change
    with pytest.raises(error) as refusal:
        await anext(worker.session.stream(GENERATE, pb.GenerateRequest(**fields)))
    if isinstance(refusal.value, InvalidRequest):
        assert str(refusal.value.param).split(".")[0] in change


def an_embed_request(*inputs, **fields):
    sequences = [pb.TokenSequence(token_ids=ids) for ids in inputs]
    return pb.EmbedRequest(**({"request_id": "e", "model": MODEL, "inputs": sequences} | fields))


async def test_embeddings_are_unit_vectors_in_the_inputs_order(worker):
    """One vector per input, of length one, equal for equal inputs; tokens are counted."""
    first, second = [40, 41, 42], [50, 51]
    response = await worker.unary(EMBED, an_embed_request(first, second, first))
    vectors = [list(one.values) for one in response.embeddings]
    assert len(vectors) == 3
    assert vectors[0] == vectors[2] != vectors[1]
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1.0] * 3, abs=1e-5)
    assert (response.usage.prompt_tokens, response.usage.output_tokens) == (8, 0)


@pytest.mark.parametrize(
    ("message", "error", "param"),
    [
        (an_embed_request([40], model="other"), ModelNotFound, "model"),
        (an_embed_request(), InvalidRequest, "inputs"),
        (an_embed_request([40], []), InvalidRequest, "inputs"),
    ],
)
async def test_embeddings_refuse_what_is_wrong(worker, message, error, param):
    """The field at fault is named."""
    with pytest.raises(error) as refusal:
        await worker.unary(EMBED, message)
    assert refusal.value.param == param


async def test_plain_grpc_serves_the_same(worker):
    """Unary and server-streaming calls beside the session give the same answers."""
    via_session = await worker.generate(a_request(seed=1))
    async with open_channel(worker.address) as channel:
        described = await call_unary(channel, DESCRIBE, pb.DescribeRequest(), 5)
        events = [event async for event in call_stream(channel, GENERATE, a_request(seed=1), 10)]
    assert described.models[0] == worker.card
    assert Result(events).tokens() == via_session.tokens()


async def test_a_cancelled_stream_frees_the_worker(worker):
    """The caller leaves: soon nothing runs any more."""
    stream = worker.session.stream(GENERATE, endless(priority=PRIORITY_HIGH))
    await anext(stream)
    await stream.aclose()

    async def is_idle():
        watch = worker.session.stream(WATCH, pb.WatchLoadRequest(interval_ms=50))
        report = await anext(watch)
        await watch.aclose()
        return report.num_running == report.num_waiting == report.kv_used_tokens == 0

    await eventually(is_idle)


async def test_load_is_reported_at_once_and_at_each_change(worker):
    """A watcher sees the worker idle, then running, then idle, without asking again."""
    seen = []

    async def watch():
        wanted = pb.WatchLoadRequest(interval_ms=60_000)
        async for report in worker.session.stream(WATCH, wanted):
            seen.append(report)  # noqa: PERF401 - looked at while it grows

    watching = asyncio.create_task(watch())
    try:
        await eventually(lambda: seen)
        assert seen[0].state == pb.WORKER_STATE_READY
        assert seen[0].num_running == 0
        assert seen[0].max_requests > 0
        await worker.generate(endless())
        await eventually(lambda: any(report.num_running for report in seen))
        await eventually(lambda: seen[-1].num_running == 0)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_drain_lets_streams_finish_and_takes_no_more(worker):
    """Running streams end as ever; new ones are told to go elsewhere."""
    running = asyncio.create_task(worker.generate(a_request(seed=2)))
    await eventually(lambda: worker.unary(DESCRIBE, pb.DescribeRequest()))
    drained = await worker.unary(DRAIN, pb.DrainRequest(grace_ms=5000))
    assert drained.num_moved == 0
    assert (await running).last().finish_reason
    with pytest.raises(ReplicaDraining):
        await worker.generate(a_request())
    described = await worker.unary(DESCRIBE, pb.DescribeRequest())
    assert described.state == pb.WORKER_STATE_DRAINING


async def test_a_drain_moves_streams_when_the_grace_ends(worker):
    """What still runs then ends with REPLICA_DRAINING; the tokens so far are the caller's."""
    stream = worker.session.stream(GENERATE, endless(n=2))
    await anext(stream)
    drained = await worker.unary(DRAIN, pb.DrainRequest(grace_ms=0))
    assert drained.num_moved == 1
    with pytest.raises(ReplicaDraining):
        await _exhaust(stream)
    assert (await worker.unary(DRAIN, pb.DrainRequest(grace_ms=0))).num_moved == 0

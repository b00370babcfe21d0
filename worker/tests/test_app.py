"""The whole worker in this process: loading, load reports, slow readers, failures, leaving."""

import asyncio
import contextlib
import math
import socket
import threading
import urllib.request

import grpc
import pytest
from aiokafka import TopicPartition
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from headrace_common.clock import SystemClock
from headrace_common.errors import InvalidRequest, NotFound, ReplicaDraining, Unavailable
from headrace_common.kafka_client import WORKER_USAGE_TOPIC, consumer
from headrace_common.metrics import new_registry
from headrace_common.rpc import MethodRef, call_unary, method_ref, open_channel
from headrace_common.session import SessionClient
from headrace_contracts.usage.v1.usage_pb2 import WorkerUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing import byte_tokenizer
from headrace_testing.toy_model import toy_model
from headrace_testing.toy_runner import ToyRunner, continuation
from headrace_testing.waiting import eventually
from headrace_worker.app import WorkerApp
from headrace_worker.sampling import SampleSpec
from headrace_worker.settings import WorkerSettings

SERVICE = pb.DESCRIPTOR.services_by_name["Worker"]
GENERATE = method_ref(SERVICE, "Generate", pb.GenerateRequest, pb.GenerateEvent)
DESCRIBE = method_ref(SERVICE, "Describe", pb.DescribeRequest, pb.DescribeResponse)
FETCH = method_ref(SERVICE, "FetchTokenizer", pb.FetchTokenizerRequest, pb.TokenizerChunk)
EMBED = method_ref(SERVICE, "Embed", pb.EmbedRequest, pb.EmbedResponse)
WATCH = method_ref(SERVICE, "WatchLoad", pb.WatchLoadRequest, pb.LoadReport)
HEALTH = MethodRef(
    "grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
)
PROMPT = "the miller asks the water"


class Toy:
    """An app over the toy model whose loading and steps the test controls."""

    def __init__(self, tmp_path, **settings):
        self.runner = ToyRunner(256, may_end=False)
        self.may_load = threading.Event()
        self.may_load.set()
        base = {"model_path": tmp_path, "cache_dir": tmp_path, "model_name": "m"}
        base |= {"drain_grace_s": 0.0}
        self.registry = new_registry()
        self.app = WorkerApp(
            WorkerSettings.load(**(base | settings)), SystemClock(), self.registry, self.load
        )

    def load(self):
        self.may_load.wait(10)
        return toy_model(2000, 256, self.runner)

    async def __aenter__(self):
        self.starting = asyncio.create_task(self.app.start())
        await eventually(lambda: self.app.port)
        self.session = SessionClient(f"127.0.0.1:{self.app.port}")
        if self.may_load.is_set():
            await self.starting
        return self

    async def __aexit__(self, *exc_info):
        self.runner.go.set()
        self.may_load.set()
        await self.session.close()
        await self.app.stop()
        await asyncio.gather(self.starting, return_exceptions=True)

    def stream(self, max_tokens=20, prompt=PROMPT, request_id="r1"):
        return self.session.stream(
            GENERATE,
            pb.GenerateRequest(
                request_id=request_id,
                model="m",
                prompt_token_ids=byte_tokenizer.encode(prompt),
                stopping=pb.Stopping(max_tokens=max_tokens),
            ),
        )

    async def describe(self):
        return await self.session.unary(DESCRIBE, pb.DescribeRequest(), timeout_s=5)

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"headrace_worker_{name}", labels or None)


def tokens(events):
    return [token_id for e in events for d in e.deltas for token_id in d.token_ids]


async def test_says_what_computes(tmp_path):
    """The device of the settings, not always the CPU."""
    async with Toy(tmp_path, device="cuda") as toy:
        assert (await toy.describe()).device == "cuda"
    async with Toy(tmp_path) as toy:
        assert (await toy.describe()).device == "cpu"


async def test_card_tells_what_requests_that_name_nothing_are_sampled_with(tmp_path):
    """The operator's values over the model's; nothing said = nothing on the card."""
    async with Toy(tmp_path, sampling_defaults='{"temperature": 0, "top_k": 20}') as toy:
        (card,) = (await toy.describe()).models
    assert card.sampling_defaults == pb.SamplingValues(temperature=0, top_k=20)
    async with Toy(tmp_path) as toy:
        (card,) = (await toy.describe()).models
    assert not card.HasField("sampling_defaults")


async def test_answers_while_it_loads(tmp_path):
    """Describe says LOADING; the rest says come back; then everything works."""
    toy = Toy(tmp_path)
    toy.may_load.clear()
    async with toy:
        described = await toy.describe()
        assert described.state == pb.WORKER_STATE_LOADING
        assert not described.models
        with pytest.raises(NotFound):
            await anext(toy.session.stream(FETCH, pb.FetchTokenizerRequest(model="m")))
        with pytest.raises(Unavailable):
            await anext(toy.stream())
        report = await anext(toy.session.stream(WATCH, pb.WatchLoadRequest()))
        assert report.state == pb.WORKER_STATE_LOADING
        toy.may_load.set()
        await toy.starting
        assert (await toy.describe()).state == pb.WORKER_STATE_READY
        assert len(tokens([event async for event in toy.stream()])) == 20


async def test_a_slow_reader_gets_everything_in_fewer_events(tmp_path):
    """Steps that the reader did not take are merged: memory is bounded, nothing is lost."""
    async with Toy(tmp_path) as toy:
        stream = toy.stream(max_tokens=400)
        events = [await anext(stream)]
        await eventually(lambda: toy.app.state.served.engine.load.num_running == 0, within_s=20)
        events += [event async for event in stream]
        expected = continuation(byte_tokenizer.encode(PROMPT), 400, SampleSpec(), may_end=False)
        assert tokens(events) == expected
        assert "".join(d.text for e in events for d in e.deltas) == byte_tokenizer.decode(expected)
        assert len(events) < 200


async def test_a_reader_that_leaves_frees_the_blocks(tmp_path):
    """Cancellation reaches the engine; blocks and gauges are back to zero."""
    async with Toy(tmp_path) as toy:
        stream = toy.stream(max_tokens=1900)
        await anext(stream)
        assert toy.value("running_requests") == 1
        assert toy.value("kv_used_tokens") > 0
        await stream.aclose()
        await eventually(lambda: toy.value("kv_used_tokens") == 0)
        await eventually(lambda: toy.value("requests_total", outcome="abort") == 1)


async def test_a_frozen_engine_is_stuck_and_not_ready(tmp_path):
    """Work without a step makes the state STUCK, health says NOT_SERVING; it recovers."""
    async with Toy(tmp_path, stuck_after_s=0.1) as toy:
        address = f"127.0.0.1:{toy.app.port}"
        async with open_channel(address) as channel:

            async def health():
                answer = await call_unary(channel, HEALTH, health_pb2.HealthCheckRequest(), 2)
                return answer.status

            serving = health_pb2.HealthCheckResponse.SERVING
            await eventually(lambda: _equals(health, serving))
            toy.runner.go.clear()
            stream = toy.stream(max_tokens=3)
            reading = asyncio.create_task(_read(stream))
            await eventually(lambda: toy.app.state.value == pb.WORKER_STATE_STUCK)
            await eventually(lambda: _equals(health, health_pb2.HealthCheckResponse.NOT_SERVING))
            assert not toy.app.state.is_ready
            toy.runner.go.set()
            assert len(tokens(await reading)) == 3
            await eventually(lambda: _equals(health, serving))


async def test_a_failed_step_fails_the_call_and_nothing_else(tmp_path):
    """The caller gets an error without inside knowledge; the next request works."""
    async with Toy(tmp_path) as toy:
        toy.runner.poison_id = ord("!")
        with pytest.raises(Exception, match="had an error") as failure:
            await _read(toy.stream(prompt="boom!"))
        assert "poison" not in str(failure.value)
        assert len(tokens(await _read(toy.stream()))) == 20
        assert toy.value("step_failures_total") == 1
        assert toy.value("requests_total", outcome="failed") == 1


async def test_tools_find_the_contract_by_reflection(tmp_path):
    """Service and messages, without any file of ours."""
    async with Toy(tmp_path) as toy:

        def described():
            with grpc.insecure_channel(f"127.0.0.1:{toy.app.port}") as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                found = database.FindFileContainingSymbol("headrace.worker.v1.Worker")
                return {*database.get_services()}, {each.name for each in found.message_type}

        services, messages = await asyncio.to_thread(described)
        assert {"headrace.worker.v1.Worker", "grpc.health.v1.Health"} <= services
        assert {"GenerateRequest", "GenerateEvent"} <= messages


def request_of(request_id, prompt=PROMPT, **fields):
    return pb.GenerateRequest(
        request_id=request_id,
        model="m",
        prompt_token_ids=byte_tokenizer.encode(prompt),
        **({"stopping": pb.Stopping(max_tokens=8, ignore_eos=True)} | fields),
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
async def test_broken_logits_spoil_their_own_answer_only(tmp_path, bad):
    """Tokens in range, log probabilities that JSON can carry; the neighbour is right."""
    async with Toy(tmp_path) as toy:
        forward = toy.runner.forward

        def broken(rows):
            logits = forward(rows)
            ends = [row.num_logits for row in rows]
            for idx, row in enumerate(rows):
                past = [*toy.runner._kv[row.block_table[0]]]
                if past[0] == ord("?"):
                    logits[sum(ends[:idx]) : sum(ends[: idx + 1])] = bad
            return logits

        toy.runner.forward = broken
        logprobs = pb.LogprobOptions(output=True, prompt=True, top=5)
        sampling = pb.Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2)
        streams = [
            _read(toy.session.stream(GENERATE, request_of("bad", "?" * 20, logprobs=logprobs))),
            _read(
                toy.session.stream(
                    GENERATE, request_of("drawn", "?" * 9, logprobs=logprobs, sampling=sampling)
                )
            ),
            _read(toy.stream(8, request_id="good")),
        ]
        *spoilt, good = await asyncio.gather(*streams)
        expected = continuation(byte_tokenizer.encode(PROMPT), 8, SampleSpec(), may_end=False)
        assert tokens(good) == expected
        for events in spoilt:
            made = [d for event in events for d in event.deltas]
            assert len(tokens(events)) == 8
            said = [entry for d in made for entry in d.logprobs]
            said += [entry for event in events for entry in event.prompt_logprobs]
            assert len(said) > 8
            for entry in said:
                assert math.isfinite(entry.logprob)
                assert all(math.isfinite(top.logprob) for top in entry.top)
        assert toy.value("step_failures_total") == 0


async def test_sixty_four_choices_in_a_small_pool_all_end(tmp_path):
    """Far more than run at once or fit: they wait for one another; one more is refused."""
    async with Toy(tmp_path, max_running=4) as toy:
        many = request_of("many", n=64, sampling=pb.Sampling(temperature=1.0), seed=3)
        events = await _read(toy.session.stream(GENERATE, many))
        made = {}
        for event in events:
            for delta in event.deltas:
                made.setdefault(delta.choice_idx, []).extend(delta.token_ids)
        prompt = byte_tokenizer.encode(PROMPT)
        for idx in range(64):
            spec = SampleSpec(temperature=1.0, seed=3, choice_idx=idx)
            assert made[idx] == continuation(prompt, 8, spec, may_end=False)
        with pytest.raises(InvalidRequest) as refused:
            await _read(toy.session.stream(GENERATE, request_of("more", n=65)))
        assert refused.value.param == "n"
        await eventually(lambda: toy.value("kv_used_tokens") == 0)


async def test_min_tokens_holds_stop_tokens_back(tmp_path):
    """Every letter is a stop token: none comes before min_tokens, the first after ends it."""
    async with Toy(tmp_path) as toy:
        stops = pb.Stopping(max_tokens=12, min_tokens=5, stop_token_ids=range(97, 123))
        events = await _read(toy.session.stream(GENERATE, request_of("held", stopping=stops)))
        made = tokens(events)
        assert all(token not in range(97, 123) for token in made[:5])
        assert made[-1] in range(97, 123)
        assert 5 < len(made) <= 12


async def test_characters_are_never_cut(tmp_path):
    """Emoji come byte by byte from the model and whole to the reader."""
    async with Toy(tmp_path) as toy:
        wanted = "\N{GRINNING FACE}".encode()
        forward = toy.runner.forward

        def emoji(rows):
            logits = forward(rows)
            places = [end for row in rows for end in [row.start_pos + len(row.token_ids)]]
            for row, place in zip(logits, places, strict=True):
                row[wanted[(place - len(PROMPT)) % len(wanted)]] = 90.0
            return logits

        toy.runner.forward = emoji
        assert len(byte_tokenizer.encode(PROMPT)) == len(PROMPT)
        events = await _read(toy.stream(max_tokens=4 * len(wanted) + 2))
        texts = [d.text for event in events for d in event.deltas]
        # The end cuts the last one, which is then said to be broken.
        assert "".join(texts) == 4 * "\N{GRINNING FACE}" + "\N{REPLACEMENT CHARACTER}"
        assert all("\N{REPLACEMENT CHARACTER}" not in text for text in texts[:-1])


async def test_metrics_and_readiness_over_http(tmp_path):
    """/ready is 200 once the model serves; /metrics shows what happened."""
    async with Toy(tmp_path) as toy:
        await _read(toy.stream())
        port = toy.app._observability.port

        def get(path):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
                return answer.status, answer.read().decode()

        assert (await asyncio.to_thread(get, "/ready"))[0] == 200
        text = (await asyncio.to_thread(get, "/metrics"))[1]
        assert 'headrace_worker_tokens_total{kind="decode"} 19.0' in text
        assert "headrace_worker_ttft_seconds_count 1.0" in text
        for line in (
            'vllm:num_requests_running{model_name="m"} 0.0',
            'vllm:generation_tokens_total{model_name="m"} 20.0',
            'vllm:prompt_tokens_total{model_name="m"} 25.0',
            'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
            'vllm:kv_cache_usage_perc{model_name="m"}',
        ):
            assert line in text, line


async def test_leaving_moves_streams_and_refuses_new_ones(tmp_path):
    """After the grace running streams end with REPLICA_DRAINING."""
    async with Toy(tmp_path) as toy:
        stream = toy.stream(max_tokens=1900)
        await anext(stream)
        stopping = asyncio.create_task(toy.app.stop())
        with pytest.raises(ReplicaDraining):
            await _read(stream)
        await stopping


async def test_a_port_in_use_is_said(tmp_path):
    """Nothing is left running after a failed start."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name in ("listen", "metrics_listen"):
            toy = Toy(tmp_path, **{name: f"127.0.0.1:{port}"})
            with pytest.raises(OSError, match="in use"):
                await toy.app.start()
            await toy.app.stop()


async def test_a_missing_model_is_said(tmp_path):
    """The start fails with a sentence that names the path."""
    settings = WorkerSettings.load(
        model_path=tmp_path / "nothing.gguf", cache_dir=tmp_path, drain_grace_s=0
    )
    app = WorkerApp(settings, SystemClock(), new_registry())
    with pytest.raises(InvalidRequest, match=r"nothing\.gguf"):
        await app.start()
    await app.stop()


@pytest.mark.kafka
async def test_each_request_leaves_one_usage_record(tmp_path, own_kafka):
    """Finished and abandoned requests are both counted, once, with what was made."""
    bootstrap = f"127.0.0.1:{own_kafka.port}"
    async with Toy(tmp_path, kafka_bootstrap=bootstrap) as toy:
        await _read(toy.stream(request_id="done"))
        left = toy.stream(max_tokens=1900, request_id="left")
        await anext(left)
        await left.aclose()
        await eventually(lambda: toy.value("usage_records_sent_total") == 2)
    records = await _records(bootstrap)
    assert sorted(record.request_id for record in records) == ["done", "left"]
    done, gone = sorted(records, key=lambda record: record.request_id)
    assert done.usage.output_tokens == 20
    assert done.finish_reason == pb.FINISH_REASON_LENGTH
    assert gone.finish_reason == pb.FINISH_REASON_ABORT
    assert 0 < gone.usage.output_tokens < 1900


async def _records(bootstrap):
    reader = consumer(bootstrap, "test")
    await reader.start()
    try:
        ids = reader.partitions_for_topic(WORKER_USAGE_TOPIC) or ()
        partitions = [TopicPartition(WORKER_USAGE_TOPIC, idx) for idx in ids]
        reader.assign(partitions)
        await reader.seek_to_beginning(*partitions)
        got = await reader.getmany(timeout_ms=2000)
        return [WorkerUsage.FromString(m.value) for part in got.values() for m in part]
    finally:
        await reader.stop()


async def _read(stream):
    async with contextlib.aclosing(stream):
        return [event async for event in stream]


async def _equals(probe, expected):
    return await probe() == expected


async def test_a_caller_that_leaves_takes_its_embeddings_along(tmp_path):
    """A long list of inputs is a few in the engine at a time, and none once the caller is gone."""
    async with Toy(tmp_path) as toy:
        toy.runner.go.clear()
        inputs = [pb.TokenSequence(token_ids=[i % 200] * 40) for i in range(50)]
        message = pb.EmbedRequest(request_id="e", model="m", inputs=inputs)
        call = asyncio.create_task(toy.session.unary(EMBED, message, timeout_s=30))
        await eventually(lambda: toy.app._calls.num_served == 4)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        toy.runner.go.set()
        await eventually(lambda: toy.app._calls.num_served == 0)
        await eventually(lambda: toy.app.state.served.engine.load.kv_used_tokens == 0)
        short = pb.EmbedRequest(request_id="e", model="m", inputs=inputs[:6])
        assert len((await toy.session.unary(EMBED, short, timeout_s=10)).embeddings) == 6

"""A worker without a model: the whole contract, with scripted tokens and switches for failures.

Its answer is a pure function of (prompt, seed, choice, position), so a stream that is resumed on
another `FakeWorker` goes on exactly as it would have. The same conformance suite runs against it
and against the real servicer (tests/contract/test_worker_conformance.py).

    async with FakeWorkerServer(FakeWorker("w1")) as server:
        client = SessionClient(server.address)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from headrace_common.blocks import ALGORITHM, BLOCK_SIZE_TOKENS, chain, chain_key, self_test
from headrace_common.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    QueueFull,
    ReplicaDraining,
    ReplicaLost,
    Unavailable,
    Unimplemented,
)
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_contracts.types.v1.types_pb2 import HashRecipe, ReplicaRef, TokenUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing import byte_tokenizer
from headrace_testing.fake_constraints import check_constraint, obeying
from headrace_worker.kv_refusals import NoKv

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Worker"]
MODEL = "smollm2-135m-instruct"
EMBEDDING_SIZE = 16
FINGERPRINT = hashlib.sha256(b"headrace fake model 1").hexdigest()
_WORDS = ("the", "water", "turns", "a", "wheel", "and", "grain", "flows", "past", "café", "水車")
# Answer to (prompt ids, seed, choice): bytes; token i of the output is byte i, then the end token.
Script = Callable[[list[int], int, int], bytes]


def words(prompt: list[int], seed: int, choice_idx: int) -> bytes:
    """Default script: sixteen words drawn by a hash of prompt, seed and choice."""
    state = hashlib.blake2b(repr((prompt, seed, choice_idx)).encode(), digest_size=16).digest()
    return " ".join(_WORDS[byte % len(_WORDS)] for byte in state).encode()


def saying(text: str) -> Script:
    """Script that always answers *text*."""
    return lambda _prompt, _seed, _choice_idx: text.encode()


@dataclass
class Switches:
    """What goes wrong, and how fast things go. Change at any time; running streams see it."""

    # Time before each token.
    delay_per_token_s: float = 0.0
    # After this many tokens made by this worker for a request: the stream ends with ReplicaLost.
    die_after_tokens: int | None = None
    # After this many tokens: nothing comes any more, until `go_on` is set or the caller leaves.
    hang_after_tokens: int | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    # Generate and Embed say nothing at all, until the caller leaves.
    never_begin: bool = False
    # Generate and Embed are refused with QueueFull.
    refuse: bool = False
    # Describe and WatchLoad say LOADING, Generate is refused.
    loading: bool = False
    # WatchLoad and Describe say STUCK.
    stuck: bool = False


def _vector(token_ids: Iterable[int]) -> list[float]:
    counts = [0.0] * EMBEDDING_SIZE
    for token_id in token_ids:
        counts[token_id % EMBEDDING_SIZE] += 1.0
    length = math.hypot(*counts)
    return [count / length for count in counts]


@dataclass
class _Choice:
    """One choice under way: its script, what was made, what was sent."""

    idx: int
    script: bytes
    made: list[int]
    sent_chars: int = 0
    finish: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED


@dataclass
class FakeWorker(NoKv):
    """Worker servicer with scripted tokens.

    Args:
        worker_id: name in `ReplicaRef`.
        incarnation: life number in `ReplicaRef`.
        script: the answers.
        model: served name.
        context_tokens: prompt and output together.
        max_requests: above this many running ones `Generate` is refused.
        sampling_defaults: what its card recommends.
    """

    worker_id: str = "fake-1"
    incarnation: int = 1
    script: Script = words
    model: str = MODEL
    context_tokens: int = 4096
    max_requests: int = 64
    sampling_defaults: pb.SamplingValues | None = None
    switches: Switches = field(default_factory=Switches)
    # For tests to look at: every request taken, ids of running ones and of those cancelled.
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    cancelled: list[str] = field(default_factory=list)
    embed_requests: list[pb.EmbedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokenizer_json = byte_tokenizer.tokenizer_json()
        self._blocks: set[bytes] = set()
        self._is_draining = False
        self._moved = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Event()

    @property
    def replica(self) -> ReplicaRef:
        """This life of this worker."""
        return ReplicaRef(worker_id=self.worker_id, incarnation=self.incarnation)

    async def Generate(  # noqa: N802 - contract name
        self, request: pb.GenerateRequest, _call: Call
    ) -> AsyncIterator[pb.GenerateEvent]:
        """Stream the scripted answer, one token per choice and event."""
        self._admit(request)
        self.requests.append(request)
        self.running.add(request.request_id)
        self._idle.clear()
        self._changed.set()
        try:
            if self.switches.never_begin:
                await asyncio.Event().wait()
            async for event in self._events(request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)
            if not self.running:
                self._idle.set()
            self._changed.set()

    async def Embed(self, request: pb.EmbedRequest, _call: Call) -> pb.EmbedResponse:  # noqa: N802 - contract name
        """Return a vector that counts the tokens of each input modulo `EMBEDDING_SIZE`."""
        if request.model != self.model:
            raise ModelNotFound(f"Model {request.model!r} is not served here.", param="model")
        if not request.inputs or not all(one.token_ids for one in request.inputs):
            raise InvalidRequest(
                "inputs: at least one, each of at least one token.", param="inputs"
            )
        self.embed_requests.append(request)
        if self.switches.refuse:
            raise QueueFull("This worker's queue is full.", retry_after_s=1.0)
        if self.switches.never_begin:
            await asyncio.Event().wait()
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=_vector(one.token_ids)) for one in request.inputs],
            usage=TokenUsage(prompt_tokens=sum(len(one.token_ids) for one in request.inputs)),
        )

    async def Describe(self, _request: pb.DescribeRequest, _call: Call) -> pb.DescribeResponse:  # noqa: N802 - contract name
        """Say what this worker is."""
        return pb.DescribeResponse(
            replica=self.replica,
            state=self._state(),
            models=[] if self.switches.loading else [self.card()],
            kv_capacity_tokens=65536,
            load_progress_ratio=0.5 if self.switches.loading else 1.0,
            device="cpu",
        )

    async def FetchTokenizer(  # noqa: N802 - contract name
        self, request: pb.FetchTokenizerRequest, _call: Call
    ) -> AsyncIterator[pb.TokenizerChunk]:
        """Send tokenizer.json in two chunks."""
        if self.switches.loading:
            raise NotFound("The model is still loading.", retry_after_s=1.0)
        if request.model != self.model:
            raise ModelNotFound(f"Model {request.model!r} is not served here.", param="model")
        half = len(self._tokenizer_json) // 2
        for data in (self._tokenizer_json[:half], self._tokenizer_json[half:]):
            yield pb.TokenizerChunk(data=data)

    async def WatchLoad(  # noqa: N802 - contract name
        self, request: pb.WatchLoadRequest, _call: Call
    ) -> AsyncIterator[pb.LoadReport]:
        """Report at once, at each change and at least every interval."""
        while True:
            self._changed.clear()
            yield self._load()
            try:
                async with asyncio.timeout((request.interval_ms or 250) / 1000):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def Drain(self, request: pb.DrainRequest, _call: Call) -> pb.DrainResponse:  # noqa: N802 - contract name
        """Stop admitting; wait for the running streams, then move them."""
        before = len(self.running)
        self._is_draining = True
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.grace_ms / 1000):
                await self._idle.wait()
        moved = len(self.running)
        self._moved.set()
        return pb.DrainResponse(num_finished=before - moved, num_moved=moved)

    def card(self) -> pb.ModelCard:
        """The model card: byte tokenizer, ChatML template."""
        return pb.ModelCard(
            model=self.model,
            fingerprint=FINGERPRINT,
            context_tokens=self.context_tokens,
            vocab_size=byte_tokenizer.VOCAB_SIZE,
            chat_template=byte_tokenizer.CHAT_TEMPLATE,
            eos_token_ids=[byte_tokenizer.IM_END_ID, byte_tokenizer.END_OF_TEXT_ID],
            bos_token_id=byte_tokenizer.IM_START_ID,
            tokenizer_sha256=hashlib.sha256(self._tokenizer_json).hexdigest(),
            recipe=HashRecipe(
                algorithm=ALGORITHM,
                block_size_tokens=BLOCK_SIZE_TOKENS,
                model_fingerprint=FINGERPRINT,
                self_test=self_test(FINGERPRINT, BLOCK_SIZE_TOKENS),
            ),
            special_tokens=byte_tokenizer.SPECIAL_TOKENS,
            kv_bytes_per_token=1024,
            sampling_defaults=self.sampling_defaults,
        )

    def _admit(self, request: pb.GenerateRequest) -> None:
        if self._is_draining:
            raise ReplicaDraining("This worker is leaving and takes no new requests.")
        if self.switches.loading:
            raise Unavailable("The model is still loading.", retry_after_s=1.0)
        if self.switches.refuse or len(self.running) >= self.max_requests:
            raise QueueFull("This worker's queue is full.", retry_after_s=1.0)
        _validate(request, self.model, self.context_tokens)

    def _state(self) -> pb.WorkerState.ValueType:
        if self.switches.loading:
            return pb.WORKER_STATE_LOADING
        if self._is_draining:
            return pb.WORKER_STATE_DRAINING
        return pb.WORKER_STATE_STUCK if self.switches.stuck else pb.WORKER_STATE_READY

    def _load(self) -> pb.LoadReport:
        return pb.LoadReport(
            replica=self.replica,
            state=self._state(),
            num_running=len(self.running),
            kv_capacity_tokens=65536,
            max_requests=self.max_requests,
        )

    async def _events(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateEvent]:
        prompt = list(request.prompt_token_ids)
        usage = TokenUsage(prompt_tokens=len(prompt), cached_gpu_tokens=self._reuse(request))
        yield pb.GenerateEvent(started=pb.Started(replica=self.replica), usage=usage)
        resumed = {r.choice_idx: list(r.output_token_ids) for r in request.resume}
        choices = [
            _Choice(idx, self._script(request, prompt, idx), resumed.get(idx, []))
            for idx in range(request.n or 1)
        ]
        usage.output_tokens = sum(len(choice.made) for choice in choices)
        ended = [delta for c in choices if (delta := _replayed(c, request.stopping))]
        if ended:
            yield pb.GenerateEvent(deltas=ended, usage=usage)
        made_here = 0
        while live := [choice for choice in choices if not choice.finish]:
            await self._pace(made_here)
            deltas = [self._advance(choice, request) for choice in live]
            made_here += len(deltas)
            usage.output_tokens = sum(len(choice.made) for choice in choices)
            event = pb.GenerateEvent(deltas=deltas, usage=usage)
            if request.logprobs.prompt and made_here == len(deltas):
                event.prompt_logprobs.extend(_prompt_logprobs(prompt, request.logprobs))
            if all(choice.finish for choice in choices):
                event.timings.decode_s = 0.0
            yield event

    def _script(self, request: pb.GenerateRequest, prompt: list[int], idx: int) -> bytes:
        # A test's own script is taken to obey.
        own = obeying(request.constraint) if self.script is words else None
        return self.script(prompt, request.seed, idx) if own is None else own

    async def _pace(self, made: int) -> None:
        switches = self.switches
        await asyncio.sleep(switches.delay_per_token_s)
        if self._moved.is_set():
            raise ReplicaDraining("This worker is leaving.")
        if switches.die_after_tokens is not None and made >= switches.die_after_tokens:
            raise ReplicaLost("This worker died, as its test told it to.")
        if switches.hang_after_tokens is not None and made >= switches.hang_after_tokens:
            await switches.go_on.wait()

    def _advance(self, choice: _Choice, request: pb.GenerateRequest) -> pb.ChoiceDelta:
        stopping, position = request.stopping, len(choice.made)
        ended = position >= len(choice.script) and not stopping.ignore_eos
        if ended and position >= stopping.min_tokens:
            token_id = byte_tokenizer.IM_END_ID
        else:
            token_id = choice.script[position % len(choice.script)]
        choice.made.append(token_id)
        choice.finish, text, matched = _outcome(choice.made, stopping)
        delta = pb.ChoiceDelta(
            choice_idx=choice.idx,
            token_ids=[token_id],
            text=text[choice.sent_chars :],
            logprobs=_logprobs(token_id, request.logprobs),
            finish_reason=choice.finish,
            stop_matched=matched,
        )
        choice.sent_chars = max(choice.sent_chars, len(text))
        return delta

    def _reuse(self, request: pb.GenerateRequest) -> int:
        """Return cached prompt tokens and remember this prompt's blocks."""
        key = chain_key(FINGERPRINT, request.adapter, request.cache_salt)
        hashes = chain(key, list(request.prompt_token_ids))
        hits = 0
        while hits < len(hashes) and hashes[hits] in self._blocks:
            hits += 1
        self._blocks.update(hashes)
        if request.skip_prefix_cache:
            return 0
        last_full = (len(request.prompt_token_ids) - 1) // BLOCK_SIZE_TOKENS
        return min(hits, last_full) * BLOCK_SIZE_TOKENS


def _validate(request: pb.GenerateRequest, model: str, context_tokens: int) -> None:
    if request.model != model:
        raise ModelNotFound(f"Model {request.model!r} is not served here.", param="model")
    if request.adapter:
        raise ModelNotFound(f"Adapter {request.adapter!r} is not loaded.", param="adapter")
    if not request.prompt_token_ids:
        raise InvalidRequest("The prompt is empty.", param="prompt_token_ids")
    if request.stopping.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1.", param="stopping.max_tokens")
    if any(i >= byte_tokenizer.VOCAB_SIZE for i in request.prompt_token_ids):
        raise InvalidRequest("A token id is out of range.", param="prompt_token_ids")
    if request.HasField("constraint"):
        check_constraint(request.constraint)
    if request.HasField("kv_source"):
        raise Unimplemented("This worker does not take KV blocks from others.")
    if len(request.prompt_token_ids) >= context_tokens:
        raise ContextTooLong(
            f"The prompt has {len(request.prompt_token_ids)} tokens; "
            f"prompt and output together may have {context_tokens}.",
            param="prompt_token_ids",
        )


def _replayed(choice: _Choice, stopping: pb.Stopping) -> pb.ChoiceDelta | None:
    """Take in output made elsewhere; if the choice had ended there, say so again."""
    if not choice.made:
        return None
    choice.finish, text, matched = _outcome(choice.made, stopping)
    choice.sent_chars = len(text)
    if not choice.finish:
        return None
    return pb.ChoiceDelta(choice_idx=choice.idx, finish_reason=choice.finish, stop_matched=matched)


def _outcome(made: list[int], stopping: pb.Stopping) -> tuple[pb.FinishReason.ValueType, str, str]:
    """Judge a choice by all of its tokens: (finish reason, text to send, stop string)."""
    is_end = made[-1] in stopping.stop_token_ids or (
        made[-1] == byte_tokenizer.IM_END_ID and not stopping.ignore_eos
    )
    if is_end and len(made) > stopping.min_tokens:
        return pb.FINISH_REASON_STOP, _whole_text(made[:-1], "replace"), ""
    text, matched = _visible_text(made, stopping)
    if matched:
        return pb.FINISH_REASON_STOP, text, matched
    if len(made) >= stopping.max_tokens:
        # At the end what was held back goes out, a cut character as U+FFFD.
        return pb.FINISH_REASON_LENGTH, _whole_text(made, "replace"), ""
    return pb.FINISH_REASON_UNSPECIFIED, text, ""


def _visible_text(token_ids: list[int], stopping: pb.Stopping) -> tuple[str, str]:
    """Decode everything anew: (text that may go out, stop string found)."""
    text = _whole_text(token_ids)
    # Stop strings are looked for in what follows the first min_tokens tokens.
    begin = len(_whole_text(token_ids[: stopping.min_tokens]))
    # The one that ends first wins, so that it does not matter how text was cut into tokens.
    found = [
        (at + len(stop), at, stop) for stop in stopping.stop if (at := text.find(stop, begin)) >= 0
    ]
    if found:
        _, at, stop = min(found)
        return text[:at], stop
    for start in range(begin, len(text)):
        if any(stop.startswith(text[start:]) for stop in stopping.stop):
            return text[:start], ""
    return text, ""


def _whole_text(token_ids: list[int], errors: str = "ignore") -> str:
    raw = bytes(i for i in token_ids if i < byte_tokenizer.END_OF_TEXT_ID)
    return raw.decode("utf-8", errors=errors)


def _prompt_logprobs(prompt: list[int], wanted: pb.LogprobOptions) -> list[pb.TokenLogprob]:
    output = pb.LogprobOptions(output=True, top=wanted.top)
    first = pb.TokenLogprob(token_id=prompt[0], token=_token_bytes(prompt[0]))
    return [first, *(part for token_id in prompt[1:] for part in _logprobs(token_id, output))]


def _logprobs(token_id: int, wanted: pb.LogprobOptions) -> list[pb.TokenLogprob]:
    if not wanted.output:
        return []
    ranked = [token_id, *(i for i in range(32, 64) if i != token_id)][: wanted.top]
    top = [
        pb.TokenLogprob(token_id=i, token=_token_bytes(i), logprob=-0.5 - rank)
        for rank, i in enumerate(ranked)
    ]
    return [pb.TokenLogprob(token_id=token_id, token=_token_bytes(token_id), logprob=-0.5, top=top)]


def _token_bytes(token_id: int) -> bytes:
    if token_id < byte_tokenizer.END_OF_TEXT_ID:
        return bytes([token_id])
    return ("<|endoftext|>", "<|im_start|>", "<|im_end|>")[token_id - 256].encode()


class FakeWorkerServer:
    """A fake worker behind a real `RpcServer` on a free port. Use as an async context manager."""

    def __init__(self, worker: FakeWorker | None = None, address: str = "127.0.0.1:0") -> None:
        self.worker = worker or FakeWorker()
        self._server = RpcServer(address, [(DESCRIPTOR, self.worker)])

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._server.port}"

    async def kill(self) -> None:
        """Cut all connections at once, as a SIGKILL would."""
        self._server.cut()
        await self._server.stop(0)

    async def __aenter__(self) -> FakeWorkerServer:
        await self._server.start()
        await self._server.set_ready(True)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(0)

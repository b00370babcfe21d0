"""Everything behind a gateway, answering at once: router, worker, guard, limiter, billing.

A process of its own, so that its cost is not the gateway's. It speaks the contracts through the
session, with prepared messages, and does nothing besides. What the worker sends depends on words in
the prompt: "paced" = 20 ms to the first token, then one each 10 ms, all running streams in one
step; "slowfirst" = 5 s to the first token; "burst" = as many events as tokens, all at once; else
the whole answer in one event. Prints one line of JSON: the addresses and an API key.

``GET /stats`` on its HTTP port says how many generations were started, finished and aborted.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Callable

import uvloop

from headrace_common.blocks import ALGORITHM, BLOCK_SIZE_TOKENS, self_test
from headrace_common.frame_socket import FrameSocket
from headrace_common.rpc_front import RpcFront
from headrace_common.session_items import call_ref, message, signal
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.router.v1 import router_pb2
from headrace_contracts.session.v1.session_pb2 import Frame, Item
from headrace_contracts.types.v1.types_pb2 import HashRecipe, ReplicaRef, TokenUsage
from headrace_contracts.worker.v1 import worker_pb2
from headrace_testing import byte_tokenizer
from headrace_testing.fake_billing import FakeBilling, FakeBillingServer

MODELS = ("mock-fast", "mock-paced")
TTFT_S, STEP_S, SLOW_S = 0.020, 0.010, 5.0
NUM_TOKENS = 64
WHOLE_TEXT = "The quick brown fox jumps over the lazy dog. " * 3
WHOLE_TOKENS = 33
WORDS = (" the", " quick", " brown", " fox", " jumps", " over", " lazy", " dogs")
REPLICA = ReplicaRef(worker_id="instant-1", incarnation=1)
_PLENTY = 10**9
_LIMITS = ratelimit_pb2.Limits(
    requests_per_minute=_PLENTY,
    input_tokens_per_minute=_PLENTY,
    output_tokens_per_minute=_PLENTY,
    requests_per_day=_PLENTY,
    max_concurrent=_PLENTY,
    tokens_per_minute=_PLENTY,
)


class Worker:
    """Makes tokens by the clock; counts what became of each generation."""

    def __init__(self) -> None:
        self.started = self.finished = self.aborted = 0
        self._running: dict[tuple[int, int], _Generation] = {}

    def generate(self, stream: Stream, call_id: int, payload: bytes) -> None:
        """Begin to answer."""
        self.started += 1
        request = worker_pb2.GenerateRequest.FromString(payload)
        prompt = bytes(i for i in request.prompt_token_ids if i < 256)
        generation = _Generation(stream, call_id, len(request.prompt_token_ids))
        if b"paced" in prompt or b"slowfirst" in prompt:
            self._running[id(stream), call_id] = generation
            delay_s = SLOW_S if b"slowfirst" in prompt else TTFT_S
            asyncio.get_running_loop().call_later(delay_s, self._begin, generation)
        else:
            generation.begin()
            if b"burst" in prompt:
                while not generation.step():
                    pass
            else:
                generation.whole()
            self.finished += 1

    def cancel(self, stream: Stream, call_id: int) -> None:
        """Forget a generation that nobody wants any more."""
        generation = self._running.pop((id(stream), call_id), None)
        if generation is not None:
            generation.is_over = True
            self.aborted += 1

    def _begin(self, generation: _Generation) -> None:
        if not generation.is_over:
            generation.begin()
            generation.step()
            generation.is_decoding = True

    async def step_forever(self) -> None:
        """One token for every running stream, each step."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + STEP_S, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for key, generation in list(self._running.items()):
                if generation.is_decoding and generation.step():
                    del self._running[key]
                    self.finished += 1


class _Generation:
    """One answer under way."""

    def __init__(self, stream: Stream, call_id: int, prompt_tokens: int) -> None:
        self._stream, self._id, self._idx = stream, call_id, 0
        self._usage = TokenUsage(prompt_tokens=prompt_tokens, cached_gpu_tokens=16)
        self.is_over = self.is_decoding = False

    def begin(self) -> None:
        started = worker_pb2.Started(replica=REPLICA)
        self._send(worker_pb2.GenerateEvent(started=started, usage=self._usage))

    def step(self) -> bool:
        """Send one token; whether it was the last."""
        self._idx += 1
        is_last = self._idx == NUM_TOKENS
        self._delta(WORDS[self._idx & 7], [97], is_last)
        return is_last

    def whole(self) -> None:
        """Send everything."""
        self._idx = WHOLE_TOKENS
        self._delta(WHOLE_TEXT, [97] * WHOLE_TOKENS, True)

    def _delta(self, text: str, ids: list[int], is_last: bool) -> None:
        self._usage.output_tokens = self._idx
        delta = worker_pb2.ChoiceDelta(text=text, token_ids=ids)
        if is_last:
            delta.finish_reason = worker_pb2.FINISH_REASON_STOP
        self._send(worker_pb2.GenerateEvent(deltas=[delta], usage=self._usage))
        if is_last:
            self._stream.end(self._id)

    def _send(self, event: worker_pb2.GenerateEvent) -> None:
        self._stream.message(self._id, event.SerializeToString())


class Stream:
    """One gateway's session: items in, prepared answers out, in natural batches."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._methods: dict[int, str] = {}
        self._released: dict[int, int] = {}
        self.socket = FrameSocket(self._take_all, self.close)

    def message(self, call_id: int, payload: bytes) -> None:
        """Send one message of a call."""
        self._put(message(call_ref(call_id), payload))

    def only_message(self, call_id: int, payload: bytes) -> None:
        """Send the one answer of a call, which ends it."""
        self._methods.pop(call_id, None)
        self._put(message(call_ref(call_id), payload, is_last=True))

    def end(self, call_id: int) -> None:
        """End a call well."""
        self._methods.pop(call_id, None)
        self._put(signal(call_ref(call_id), Item.KIND_END))

    def _take_all(self, frame: Frame) -> None:
        for item in frame.items:
            self._take(item)

    def _take(self, item: Item) -> None:
        if item.kind == Item.KIND_OPEN:
            self._methods[item.call_id] = item.method.rpartition("/")[2]
        method = self._methods.get(item.call_id)
        if method is None:
            return
        if item.kind == Item.KIND_MESSAGE or item.has_message:
            self._fleet.handlers[method](self, item.call_id, item.payload)
        elif item.kind == Item.KIND_CANCEL:
            self._forget(item.call_id, method)
        elif item.kind == Item.KIND_HALF_CLOSE and method in ("CheckOutput", "Pick"):
            self._released.pop(item.call_id, None)
            self.end(item.call_id)

    def close(self) -> None:
        """The gateway left."""
        for call_id, method in list(self._methods.items()):
            self._forget(call_id, method)

    def check_output(self, call_id: int, payload: bytes) -> None:
        """Release text as it comes."""
        request = guard_pb2.CheckOutputRequest.FromString(payload)
        if not request.HasField("text"):
            self._released[call_id] = 0
            return
        self._released[call_id] += len(request.text.text)
        answer = guard_pb2.CheckOutputResponse(
            choice_idx=request.text.choice_idx,
            released=request.text.text,
            verdict=_CLEAN,
            last=request.text.last,
            scanned_chars=self._released[call_id],
            released_chars=self._released[call_id],
        )
        self.message(call_id, answer.SerializeToString())

    def _forget(self, call_id: int, method: str) -> None:
        self._methods.pop(call_id, None)
        self._released.pop(call_id, None)
        if method == "Generate":
            self._fleet.worker.cancel(self, call_id)

    def _put(self, item: bytes) -> None:
        self.socket.put(item)


_CLEAN = guard_pb2.Verdict(
    state=guard_pb2.VERDICT_STATE_CLEAN, action=guard_pb2.ACTION_ALLOW, policy_version="instant"
)


class Fleet:
    """The services behind one port."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.address = ""
        self._tokenizer = byte_tokenizer.tokenizer_json()
        # As the rate limiter answers a brief request: numbers, in the order of the key's limits.
        num_limits = len(_LIMITS.ListFields())
        self._admitted = ratelimit_pb2.AdmitResponse(
            outcome=1, remaining=[_PLENTY] * num_limits, reset_us=[0] * num_limits
        )
        clean = guard_pb2.CheckInputResponse(verdict=_CLEAN).SerializeToString()
        self._decision = b""
        self.handlers: dict[str, Callable[[Stream, int, bytes], None]] = {
            "WatchReplicas": self._replicas,
            "Pick": lambda stream, call_id, payload: self._pick(stream, call_id, payload),
            "FetchTokenizer": self._send_tokenizer,
            "Generate": self.worker.generate,
            "CheckInput": _answering(clean),
            "CheckOutput": Stream.check_output,
            "ReportSentMany": _answering(b""),
            "Exchange": self._limit,
        }

    def _pick(self, stream: Stream, call_id: int, payload: bytes) -> None:
        if router_pb2.PickMessage.FromString(payload).HasField("pick"):
            stream.message(call_id, self._decision)

    def _replicas(self, stream: Stream, call_id: int, _payload: bytes) -> None:
        decision = router_pb2.Decision(
            replica=REPLICA, address=self.address, policy="instant", predicted_ttft_s=0.02
        )
        self._decision = decision.SerializeToString()
        replica = router_pb2.Replica(
            replica=REPLICA,
            address=self.address,
            state=worker_pb2.WORKER_STATE_READY,
            reachable=True,
            models=[_card(model, self._tokenizer) for model in MODELS],
        )
        answer = router_pb2.ReplicaList(version=1, replicas=[replica])
        stream.message(call_id, answer.SerializeToString())

    def _send_tokenizer(self, stream: Stream, call_id: int, _payload: bytes) -> None:
        chunk = worker_pb2.TokenizerChunk(data=self._tokenizer)
        stream.message(call_id, chunk.SerializeToString())
        stream.end(call_id)

    def _limit(self, stream: Stream, call_id: int, payload: bytes) -> None:
        batch = ratelimit_pb2.CallBatch.FromString(payload)
        answers = ratelimit_pb2.AnswerBatch()
        for call in batch.calls:
            answer = answers.answers.add(call_id=call.call_id)
            if call.HasField("admit"):
                answer.admit.CopyFrom(self._admitted)
            elif call.HasField("settle"):
                answer.settle.settled = True
            else:
                answer.renew.SetInParent()
        stream.message(call_id, answers.SerializeToString())


def _answering(answer: bytes) -> Callable[[Stream, int, bytes], None]:
    def handle(stream: Stream, call_id: int, _payload: bytes) -> None:
        stream.only_message(call_id, answer)

    return handle


def _card(model: str, tokenizer: bytes) -> worker_pb2.ModelCard:
    fingerprint = hashlib.sha256(b"instant").hexdigest()
    return worker_pb2.ModelCard(
        model=model,
        fingerprint=fingerprint,
        context_tokens=65536,
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        chat_template=byte_tokenizer.CHAT_TEMPLATE,
        eos_token_ids=[byte_tokenizer.IM_END_ID, byte_tokenizer.END_OF_TEXT_ID],
        bos_token_id=byte_tokenizer.IM_START_ID,
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        recipe=HashRecipe(
            algorithm=ALGORITHM,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            model_fingerprint=fingerprint,
            self_test=self_test(fingerprint, BLOCK_SIZE_TOKENS),
        ),
        special_tokens=byte_tokenizer.SPECIAL_TOKENS,
        kv_bytes_per_token=1024,
    )


async def _serve_stats(worker: Worker) -> int:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        counts = {name: getattr(worker, name) for name in ("started", "finished", "aborted")}
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(counts).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _main(fail_open: bool) -> None:
    fleet = Fleet()
    # No gRPC behind it: the gateway needs none.
    front = RpcFront(lambda: Stream(fleet).socket, "unix-abstract:nobody", 0)
    fleet.address = f"127.0.0.1:{await front.listen('127.0.0.1', 0)}"
    billing = FakeBilling(beat_s=1.0)
    api_key, _key = billing.create_key(limits=_LIMITS, guard_fail_open=fail_open)
    async with FakeBillingServer(billing) as books:
        where = {
            "fleet": fleet.address,
            "billing": books.address,
            "stats_port": await _serve_stats(fleet.worker),
            "api_key": api_key,
        }
        sys.stdout.write(json.dumps(where) + "\n")
        sys.stdout.flush()
        await fleet.worker.step_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fail-open", action="store_true", help="of the key, without a guard")
    uvloop.run(_main(parser.parse_args().fail_open))

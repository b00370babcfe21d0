"""KV blocks from a prefill worker to a decode worker.

::

    decode worker                                   prefill worker
      what do I hold of the prompt?
      PrefillKv(prompt, skip what I hold) --------->  compute it, as a request of one token
      take a run of blocks  <-----------------------  send its blocks, 4 MiB at a time
      ...
      submit the request: it finds them cached

Blocks are named by the hash of everything before them, the model and the tenant; the receiver
computes these names itself and takes nothing under another one. Whatever goes wrong (no answer, a
dead worker, another model, no room, a broken message) ends the transfer, and the request computes
what is missing. Only a few transfers run at a time and each holds one message: memory is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from headrace_common.blocks import BLOCK_SIZE_TOKENS, chain, join
from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, InvalidRequest
from headrace_common.rpc import call_stream, method_ref, open_channel
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.calls import Calls
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.handover import BlockImport, export
from headrace_worker.engine.prefix_cache import PrefixCache
from headrace_worker.engine.request import Request
from headrace_worker.generate_request import RequestRules, parse
from headrace_worker.metrics import WorkerMetrics
from headrace_worker.model.kv_memory import BlockMemory

_log = logging.getLogger(__name__)
_PREFILL = method_ref(
    pb.DESCRIPTOR.services_by_name["Worker"], "PrefillKv", pb.PrefillKvRequest, pb.KvBlocks
)
_MESSAGE_BYTES = 4 << 20
_MAX_AT_ONCE = 4
# Blocks that an import leaves to what runs.
_RESERVE_BLOCKS = 32
T = TypeVar("T")


@dataclass(frozen=True)
class _Prompt:
    """A prompt's full blocks; the one with the last token is always computed."""

    hashes: list[bytes]

    @classmethod
    def of(cls, token_ids: Sequence[int], key: bytes) -> _Prompt:
        num_blocks = (len(token_ids) - 1) // BLOCK_SIZE_TOKENS
        tokens = list(token_ids[: num_blocks * BLOCK_SIZE_TOKENS])
        return cls(list(chain(key, tokens, BLOCK_SIZE_TOKENS)))


class KvTransfer:
    """Gives and takes blocks of one worker's pool.

    Args:
        engine: whose cache it is.
        memory: the pool's bytes.
        rules: what requests are checked against.
        calls: where prefills for others are kept.
        clock: time.
        metrics: what is counted.
        timeout_s: longest time of a transfer, the prefill included.
    """

    def __init__(
        self,
        engine: Engine,
        memory: BlockMemory,
        rules: RequestRules,
        calls: Calls,
        clock: Clock,
        metrics: WorkerMetrics,
        timeout_s: float,
    ) -> None:
        self._engine, self._memory, self._rules = engine, memory, rules
        self._calls, self._clock, self._metrics = calls, clock, metrics
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(_MAX_AT_ONCE)
        self._num_blocks_at_once = max(1, _MESSAGE_BYTES // memory.block_bytes)

    async def give(
        self, message: pb.PrefillKvRequest, key: int, on_change: Callable[[], None]
    ) -> AsyncGenerator[pb.KvBlocks, None]:
        """Compute a prompt and send its blocks.

        Args:
            message: whose prompt.
            key: number of the call in this process.
            on_change: told when the load changes.

        Raises:
            InvalidRequest: the caller's blocks are not like ours.
            HeadraceError: the prompt could not be computed.
        """
        if message.fingerprint != self._rules.fingerprint:
            raise InvalidRequest("The model here is another one.", param="fingerprint")
        if message.layout != self._memory.layout:
            raise InvalidRequest(f"Blocks here are {self._memory.layout}.", param="layout")
        request = parse(_as_generate(message), self._rules, key, self._clock.now_s())
        request.is_for_transfer = True
        await self._compute(request, on_change)
        hashes = _Prompt.of(request.prompt_token_ids, request.chain_key).hashes
        first, size = message.skip_blocks, self._num_blocks_at_once
        yield pb.KvBlocks(first_block_idx=first, cached_tokens=request.cached_tokens)
        for start in range(first, len(hashes), size):
            part = hashes[start : start + size]
            data = await self._between_steps(
                lambda cache, part=part: export(cache, self._memory, part)  # type: ignore[misc]  # bound at once
            )
            sent = part[: len(data) // self._memory.block_bytes]
            if sent:
                self._metrics.kv_sent_tokens.inc(len(sent) * BLOCK_SIZE_TOKENS)
                yield pb.KvBlocks(
                    first_block_idx=start,
                    block_hashes=join(sent),
                    data=data,
                    crc32=zlib.crc32(data),
                )
            if len(sent) < len(part):
                return

    async def take(self, address: str, message: pb.GenerateRequest, request: Request) -> None:
        """Fetch what is missing of a request's prompt; never raises for a failed transfer.

        Args:
            address: the prefill worker.
            message: what was asked for.
            request: the same, parsed; told what another worker computed for it.
        """
        started_s, outcome = self._clock.now_s(), "ok"
        incoming = BlockImport(self._memory, _RESERVE_BLOCKS)
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                outcome = await self._fetch(address, message, request, incoming)
        except (HeadraceError, ValueError, TimeoutError) as error:
            outcome = "failed"
            _log.warning("%s: no blocks from %s: %s", request.request_id, address, error)
        finally:
            self._engine.between_steps(lambda _cache: incoming.close())
        self._metrics.kv_transfers.labels(outcome).inc()
        self._metrics.kv_transfer_s.observe(self._clock.now_s() - started_s)

    async def _fetch(
        self, address: str, message: pb.GenerateRequest, request: Request, incoming: BlockImport
    ) -> str:
        hashes = _Prompt.of(request.prompt_token_ids, request.chain_key).hashes
        held = await self._between_steps(lambda cache: incoming.begin(cache, hashes))
        if held == len(hashes):
            return "held"
        ask = self._ask(message, held)
        place, cached_tokens = held, 0
        channel = open_channel(address)
        try:
            async with aclosing(call_stream(channel, _PREFILL, ask, self._timeout_s)) as messages:
                async for part in messages:
                    cached_tokens = max(cached_tokens, part.cached_tokens)
                    wanted = hashes[place : place + len(part.block_hashes) // len(hashes[0])]
                    _check(part, place, wanted)
                    if wanted and not await self._between_steps(
                        lambda cache, part=part, wanted=wanted: incoming.add(  # type: ignore[misc]  # bound at once
                            cache, wanted, part.data
                        )
                    ):
                        return "no_room"
                    place += len(wanted)
                    fresh = place * BLOCK_SIZE_TOKENS - max(held * BLOCK_SIZE_TOKENS, cached_tokens)
                    request.handed_tokens = max(0, fresh)
        finally:
            self._metrics.kv_taken_tokens.inc((place - held) * BLOCK_SIZE_TOKENS)
            await channel.close()
        return "ok" if place == len(hashes) else "partial"

    def _ask(self, message: pb.GenerateRequest, held: int) -> pb.PrefillKvRequest:
        return pb.PrefillKvRequest(
            request_id=message.request_id,
            model=message.model,
            adapter=message.adapter,
            prompt_token_ids=message.prompt_token_ids,
            cache_salt=message.cache_salt,
            priority=message.priority,
            skip_blocks=held,
            fingerprint=self._rules.fingerprint,
            layout=self._memory.layout,
        )

    async def _compute(self, request: Request, on_change: Callable[[], None]) -> None:
        call = self._calls.open(request)
        try:
            self._engine.submit(request)
            on_change()
            while True:
                output = await call.take()
                if output.error is not None:
                    raise output.error
                if output.is_last:
                    return
        finally:
            if self._calls.close(call):
                self._engine.abort(request.key)
            on_change()

    async def _between_steps(self, work: Callable[[PrefixCache], T]) -> T:
        """Run *work* on the engine's thread and return what it returns."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # None only if T is

        def run(cache: PrefixCache) -> None:
            result, error = None, None
            try:
                result = work(cache)
            except Exception as caught:  # noqa: BLE001 - edge of the thread: handed to the waiting side
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._engine.between_steps(run)
        return await done


def _as_generate(message: pb.PrefillKvRequest) -> pb.GenerateRequest:
    """Say the prefill as a request for one token, which nobody will see."""
    return pb.GenerateRequest(
        request_id=message.request_id,
        model=message.model,
        adapter=message.adapter,
        prompt_token_ids=message.prompt_token_ids,
        cache_salt=message.cache_salt,
        priority=message.priority,
        stopping=pb.Stopping(max_tokens=1, ignore_eos=True),
    )


def _check(part: pb.KvBlocks, place: int, wanted: Sequence[bytes]) -> None:
    """Refuse a message that is not the next run of this very prompt, or was damaged.

    Raises:
        ValueError: it is not.
    """
    if part.first_block_idx != place or part.block_hashes != join(list(wanted)):
        raise ValueError("these are not the blocks that were asked for")
    if part.data and zlib.crc32(part.data) != part.crc32:
        raise ValueError("the blocks were damaged on the way")

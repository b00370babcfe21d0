"""Dynamo's selection core, called from Python: the reference of `bench_decision.py`.

Its `KvRouter` wants a cluster; `SelectionService` is the same index, load book and cost rule
without one. Runs in an environment of its own that holds nothing of ours:
``python -m venv D && D/bin/pip install ai-dynamo-runtime pyzmq msgpack``. Workers' caches are told
the way vLLM tells them, by ZMQ; prompts are handed in as hashes, as to our router. Prints one JSON
object.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import zmq
from dynamo._core import (  # type: ignore[import-not-found]  # not in our environment
    SelectionService,
    compute_block_hash_for_seq,
)

_BLOCK_TOKENS, _PROMPT_BLOCKS, _HOLDERS = 16, 1000, 4
_ROUNDS, _IN_FLIGHT = 3000, 100
_WARM_UP_S = 1.0


class Core:
    """The service with its workers' event sockets.

    Args:
        num_workers: each with a socket of its own.
    """

    def __init__(self, num_workers: int) -> None:
        self.service = SelectionService(indexer_threads=1)
        self._context = zmq.Context()
        self._sockets = []
        self._ports = []
        for _ in range(num_workers):
            socket = self._context.socket(zmq.PUB)
            socket.setsockopt(zmq.SNDHWM, 0)
            self._ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
            self._sockets.append(socket)
        self._seqs = [0] * num_workers
        self._number = 0

    async def start(self) -> None:
        """Register the workers and wait until their sockets are connected."""
        for idx, port in enumerate(self._ports):
            await self.service.upsert_worker(
                {
                    "worker_id": idx,
                    "model_name": "m",
                    "block_size": _BLOCK_TOKENS,
                    "endpoint": "http://127.0.0.1:1",
                    "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                    "total_kv_blocks": 10_000_000,
                    "max_num_batched_tokens": 8192,
                }
            )
        await asyncio.sleep(_WARM_UP_S)

    def store(self, worker: int, tokens: list[int]) -> None:
        """Let a worker tell that it holds a prompt's blocks."""
        num_blocks = len(tokens) // _BLOCK_TOKENS
        hashes = list(range(self._number, self._number + num_blocks))
        self._number += num_blocks
        event = ["BlockStored", hashes, None, tokens, _BLOCK_TOKENS, None]
        payload = msgpack.packb([0.0, [event], 0])
        seq = self._seqs[worker].to_bytes(8, "big")
        self._seqs[worker] += 1
        self._sockets[worker].send_multipart([b"", seq, payload])

    async def until_held(self, worker: int, request: dict[str, Any], depth: int) -> None:
        """Wait until the index knows *depth* blocks of a prompt at a worker."""
        while True:
            told = await self.service.overlap_scores(request)
            if told["workers"][worker]["device_blocks"] >= depth:
                return
            await asyncio.sleep(0.05)


async def main() -> None:
    """Fill the index, then select."""
    num_workers, num_blocks = (int(word) for word in sys.argv[1:3])
    rng = random.Random(1)  # noqa: S311 - repeatable
    core = Core(num_workers)
    await core.start()
    requests: list[dict[str, Any]] = []
    held = 0
    last = (0, 0)
    while held < num_blocks:
        first = len(requests) * _PROMPT_BLOCKS * _BLOCK_TOKENS
        tokens = list(range(first, first + _PROMPT_BLOCKS * _BLOCK_TOKENS))
        local = [
            one - (1 << 64) if one >> 63 else one
            for one in compute_block_hash_for_seq(tokens, _BLOCK_TOKENS)
        ]
        requests.append(
            {
                "model_name": "m",
                "block_hashes": local,
                "sequence_hashes": local,
                "isl_tokens": len(tokens),
            }
        )
        depths = []
        for worker in rng.sample(range(num_workers), min(_HOLDERS, num_workers)):
            depths.append(rng.randrange(1, _PROMPT_BLOCKS + 1))
            core.store(worker, tokens[: depths[-1] * _BLOCK_TOKENS])
            last = (worker, depths[-1])
        held += max(depths)
        await core.until_held(last[0], requests[-1], last[1])
    for number in range(_IN_FLIGHT):
        one = rng.choice(requests)
        await core.service.select_and_reserve(one | {"selection_id": f"held-{number}"})
    result = await _measure("select", requests, rng, core.service.select)

    async def serve(request: dict[str, Any]) -> None:
        await core.service.select_and_reserve(request | {"selection_id": "one"})
        await core.service.free_reservation("one")

    result |= await _measure("serve", requests, rng, serve)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    # Its threads hold the process for a while otherwise.
    os._exit(0)


async def _measure(
    name: str,
    requests: list[dict[str, Any]],
    rng: random.Random,
    act: Callable[[dict[str, Any]], Awaitable[object]],
) -> dict[str, float]:
    times = []
    for _ in range(_ROUNDS):
        request = rng.choice(requests)
        started = time.perf_counter()
        await act(request)
        times.append(time.perf_counter() - started)
    times.sort()
    return {
        f"{name}_p50_us": times[len(times) // 2] * 1e6,
        f"{name}_p99_us": times[len(times) * 99 // 100] * 1e6,
    }


if __name__ == "__main__":
    asyncio.run(main())

"""An engine's side of the ZMQ KV events, as vLLM speaks it: PUB, replay ROUTER, msgpack records."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from headrace_common.lifecycle import cancel_and_wait
from headrace_testing.waiting import free_port

Form = Literal["arrays", "maps"]
_END = (1 << 64) - 1


def stored(
    hashes: list[int | bytes],
    token_ids: list[int],
    *,
    parent: int | bytes | None = None,
    block_size: int = 16,
    **fields: Any,
) -> dict[str, Any]:
    """Make a BlockStored record; *fields* are the format's later ones."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **fields,
    }


def removed(hashes: list[int | bytes], medium: str = "GPU", **fields: Any) -> dict[str, Any]:
    """Make a BlockRemoved record."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **fields}


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def encode(events: list[dict[str, Any]], form: Form = "maps") -> bytes:
    """Encode a batch, as older engines (arrays) or newer ones (maps) do."""
    if form == "arrays":
        return msgspec.msgpack.encode([1.5, [list(event.values()) for event in events], 0])
    return msgspec.msgpack.encode({"ts": 1.5, "events": events, "data_parallel_rank": 0})


class ZmqEngine:
    """Publishes batches on real sockets and answers replay requests. Use as a context manager.

    Args:
        num_kept: batches kept for replay.
        form: how records are written.
        topic: published before each batch.
    """

    def __init__(self, num_kept: int = 100, form: Form = "maps", topic: str = "kv") -> None:
        self._num_kept, self._form, self._topic = num_kept, form, topic.encode()
        self._ports = free_port(), free_port()
        self._kept: list[tuple[int, bytes]] = []
        self.next_number = 0
        self.num_replays = 0

    @property
    def events(self) -> str:
        """Endpoint of the PUB socket."""
        return f"tcp://127.0.0.1:{self._ports[0]}"

    @property
    def replay(self) -> str:
        """Endpoint of the replay socket."""
        return f"tcp://127.0.0.1:{self._ports[1]}"

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        """Publish one batch; *lost*: nobody gets it but by a replay."""
        payload = encode(list(events), self._form)
        if lost:
            self._keep(payload)
        else:
            await self.publish_raw(payload)

    async def publish_raw(self, payload: bytes) -> None:
        """Publish what may be no batch."""
        await self._send(self._keep(payload), payload)

    async def send_frames(self, *frames: bytes) -> None:
        """Publish what may be no message; it has no number."""
        await self._pub.send_multipart([self._topic, *frames])

    async def repeat(self, number: int) -> None:
        """Publish live what was lost, as if it had only been late."""
        await self._send(number, dict(self._kept)[number])

    def _keep(self, payload: bytes) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        self._kept = [*self._kept, (number, payload)][-self._num_kept :]
        return number

    def restart(self) -> None:
        """Begin a new life: numbers start over and nothing is kept."""
        self.next_number, self._kept = 0, []

    async def __aenter__(self) -> ZmqEngine:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(self.events)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay)
        self._serving = asyncio.create_task(self._serve_replays())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await cancel_and_wait(self._serving)
        self._context.destroy(linger=0)

    async def _send(self, number: int, payload: bytes) -> None:
        await self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def _serve_replays(self) -> None:
        while True:
            client, empty, first = await self._router.recv_multipart()
            self.num_replays += 1
            for number, payload in self._kept:
                if number >= int.from_bytes(first, "big"):
                    head = [client, empty, number.to_bytes(8, "big")]
                    await self._router.send_multipart([*head, payload])
            await self._router.send_multipart([client, empty, _END.to_bytes(8, "big"), b""])

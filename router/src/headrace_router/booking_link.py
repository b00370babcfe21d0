"""Carries bookings between routers over a Redis channel. Nothing waits for it but itself."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from headrace_common.clock import Clock
from headrace_common.lifecycle import cancel_and_wait, raise_if_cancelled
from headrace_contracts.router.v1.bookings_pb2 import BookingNews
from headrace_router.bookings import SILENCE_S, WHOLE_EVERY_S, BookingExchange
from headrace_router.load_guard import LoadBook
from headrace_router.metrics import RouterMetrics

_log = logging.getLogger(__name__)
# News of this long goes into one message. A herd needs more than that to gather.
_GATHER_S = 0.002


class BookingLink:
    """Publishes this router's bookings and listens for those of others.

    Args:
        redis: a client whose answers are bytes.
        channel: shared by all routers of the fleet.
        loads: this router's load book.
        clock: time.
        metrics: what is counted.
    """

    def __init__(
        self, redis: Redis, channel: str, loads: LoadBook, clock: Clock, metrics: RouterMetrics
    ) -> None:
        self._redis, self._channel, self._clock, self._metrics = redis, channel, clock, metrics
        self._fresh = asyncio.Event()
        self.exchange = BookingExchange(secrets.token_hex(8), loads, clock, self._fresh.set)

    async def run(self) -> None:
        """Exchange bookings until something fails; call again to go on.

        Raises:
            redis.exceptions.RedisError: Redis cannot be reached.
        """
        async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(self._channel)
            raise_if_cancelled()
            parts = [asyncio.create_task(part) for part in (self._tell(), self._listen(pubsub))]
            try:
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in parts:
                    if part.done():
                        part.result()
            finally:
                await cancel_and_wait(*parts)

    async def expire(self) -> None:
        """Forget silent routers, for ever; needs no Redis."""
        while True:
            self.exchange.expire()
            self._metrics.peer_routers.set(self.exchange.num_peers())
            self._metrics.peer_bookings.set(self.exchange.num_peer_bookings())
            await asyncio.sleep(SILENCE_S / 8)

    async def _tell(self) -> None:
        told_at_s = whole_at_s = float("-inf")
        while True:
            self._fresh.clear()
            now_s = self._clock.now_s()
            if now_s - whole_at_s >= self.exchange.whole_every_s():
                told_at_s = whole_at_s = now_s
                await self._publish(self.exchange.take_news())
                await self._publish(self.exchange.whole())
            elif now_s - told_at_s >= WHOLE_EVERY_S:
                told_at_s = now_s
                await self._publish(self.exchange.heartbeat())
            else:
                await self._publish(self.exchange.take_news())
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, told_at_s + WHOLE_EVERY_S - now_s)):
                    await self._fresh.wait()
            await asyncio.sleep(_GATHER_S)

    async def _publish(self, news: BookingNews | None) -> None:
        if news is not None:
            await self._redis.publish(self._channel, news.SerializeToString())
            raise_if_cancelled()

    async def _listen(self, pubsub: PubSub) -> None:
        while True:
            message = await pubsub.get_message(timeout=WHOLE_EVERY_S)
            raise_if_cancelled()
            if message is None:
                continue
            try:
                self.exchange.receive(BookingNews.FromString(message["data"]))
            except (DecodeError, ValueError) as error:
                _log.warning("bookings of another router cannot be read: %s", error)
                self._metrics.peer_failures.inc()

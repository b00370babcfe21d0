"""Redis clients with their timeouts set. For calls that requests wait for: `redis_pipeline`."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def background_client(url: str, *, timeout_s: float = 5.0, max_connections: int = 8) -> Redis:
    """Return a client for background work; blocking reads must be shorter than *timeout_s*."""
    return Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=2.0,
        max_connections=max_connections,
        retry=Retry(NoBackoff(), 0),
    )

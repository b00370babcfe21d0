"""Redis clients with their timeouts set."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

REQUEST_PATH_TIMEOUT_S = 0.05


def request_path_client(
    url: str, *, max_connections: int = 16, timeout_s: float = REQUEST_PATH_TIMEOUT_S
) -> Redis:
    """Return a client for calls that a request waits for: 50 ms, no retry.

    Callers own a breaker: see the rate limiter.
    """
    return Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        max_connections=max_connections,
        retry=Retry(NoBackoff(), 0),
    )


def background_client(url: str, *, timeout_s: float = 5.0, max_connections: int = 8) -> Redis:
    """Return a client for background work; blocking reads must be shorter than *timeout_s*."""
    return Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=2.0,
        max_connections=max_connections,
        retry=Retry(NoBackoff(), 0),
    )

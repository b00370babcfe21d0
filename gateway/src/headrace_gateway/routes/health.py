"""/health, /ready and /metrics of this process, on the public port too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse

# So long a rendering of the metrics stands alone: it stops every stream for as long as it takes.
_BETWEEN_S = 0.25


class _MetricsText:
    """The metrics for whoever asks, with a rendering for all who ask meanwhile. Never old."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._due_s = 0.0
        self._next: asyncio.Task[bytes] | None = None

    async def read(self) -> bytes:
        """Return the metrics as they stand now, or a moment later."""
        if self._next is None:
            self._next = asyncio.create_task(self._render())
        return await asyncio.shield(self._next)

    async def _render(self) -> bytes:
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
        # Who comes from here on gets another.
        self._next = None
        text = generate_latest(self._registry)
        self._due_s = time.monotonic() + _BETWEEN_S
        return text


def health_router(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["operations"])
    text = _MetricsText(registry)

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Say that the process lives. Looks at nothing else."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"description": "They would not."}})
    async def ready(response: Response) -> dict[str, str]:
        """Say whether requests would be served now."""
        is_ready_now = is_ready()
        response.status_code = 200 if is_ready_now else 503
        return {"status": "ready" if is_ready_now else "not ready"}

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Show this process's metrics."""
        return Response(await text.read(), media_type=CONTENT_TYPE_LATEST)

    return router

"""/health, /ready and /metrics of this process, on the public port too."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse


def health_router(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["operations"])

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
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router

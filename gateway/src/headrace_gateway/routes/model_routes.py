"""/v1/admin/model-routes: what is in force, and taking up a changed file at once."""

from __future__ import annotations

from fastapi import APIRouter, Request

from headrace_common.errors import ScopeMissing
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth
from headrace_gateway.model_routes.route_watch import ReloadResult, RouteWatch


def model_routes_router(auth: KeyAuth, watch: RouteWatch) -> APIRouter:
    """Return the routes; they take a key with the scope `admin`."""
    router = APIRouter(tags=["admin"])

    @router.get("/v1/admin/model-routes")
    async def show(request: Request) -> Json:
        """Tell what is in force, and what is wrong with the file if it is not what is in it."""
        await _check_admin(auth, request)
        return {**_told(watch.standing), "routes": list(watch.routes.names)}

    @router.post("/v1/admin/model-routes/reload")
    async def reload(request: Request) -> Json:
        """Read the file now; a bad one is refused with the reason and changes nothing."""
        await _check_admin(auth, request)
        return {**_told(watch.reload()), "routes": list(watch.routes.names)}

    return router


async def _check_admin(auth: KeyAuth, request: Request) -> None:
    principal = await auth.authenticate(request.headers.raw)
    # A key without scopes is for inference, not for this.
    if "admin" not in principal.scopes:
        raise ScopeMissing("This API key lacks the scope 'admin'.")


def _told(result: ReloadResult) -> Json:
    return {
        "outcome": result.outcome,
        "revision": result.revision or None,
        "error": result.error or None,
    }

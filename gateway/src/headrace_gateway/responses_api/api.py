"""Responses, wired together: what the gateway takes into its own."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from headrace_gateway.api_request import Endpoint
from headrace_gateway.asgi import CallRoute, HotRoute, RouteContext
from headrace_gateway.auth import KeyAuth
from headrace_gateway.http_exchange import AsgiApp
from headrace_gateway.openai_dialect import OpenAiErrors
from headrace_gateway.request_flow import RequestFlow
from headrace_gateway.responses_api.background import BackgroundResponses
from headrace_gateway.responses_api.dialect import ResponsesDialect
from headrace_gateway.responses_api.input_tokens import InputTokenCount
from headrace_gateway.responses_api.kept import KeptResponses
from headrace_gateway.responses_api.kept_events import KeptEvents
from headrace_gateway.responses_api.routes import responses_router
from headrace_gateway.responses_api.takeover import Takeover
from headrace_gateway.state.store import StateStore

PATH = "/v1/responses"


class ResponsesApi:
    """The parts, and the routes to them.

    Args:
        state: where responses are kept.
        ttl_s: how long.
        flow: serves them.
        auth: checks keys.
        may_take_over: whether what another process left could be answered now.
    """

    def __init__(
        self,
        state: StateStore,
        ttl_s: int,
        flow: RequestFlow,
        auth: KeyAuth,
        may_take_over: Callable[[], bool],
    ) -> None:
        self._flow, self._auth = flow, auth
        self.kept, events = KeptResponses(state, ttl_s), KeptEvents(state, ttl_s)
        self.background = BackgroundResponses(self.kept, events, flow)
        self._dialect = ResponsesDialect(self.kept, self.background, flow.names, flow.clock)
        self.takeover = Takeover(
            self.kept, events, self._dialect, self.background, auth, may_take_over
        )

    def posts(self, context: RouteContext) -> dict[str, AsgiApp]:
        """Return the routes that are not FastAPI's, by path."""
        flow = self._flow
        count = InputTokenCount(self.kept, flow.names, flow.intake, flow.admission)
        return {
            PATH: HotRoute(self._dialect, context, flow),
            f"{PATH}/input_tokens": CallRoute(OpenAiErrors(Endpoint.COUNT_TOKENS), context, count),
        }

    def router(self) -> APIRouter:
        """Return the other routes."""
        return responses_router(self._auth, self.kept, self.background)

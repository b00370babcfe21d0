"""/v1/requests/{id}: where a request's time went, what was reused, why this replica, the cost."""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter, Request

from headrace_common.errors import HeadraceError, NotFound
from headrace_contracts.billing.v1.billing_pb2 import (
    ListUsageRequest,
    ListUsageResponse,
    UsageRecord,
)
from headrace_contracts.router.v1.router_pb2 import Decision
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth
from headrace_gateway.state.store import Owner
from headrace_gateway.stories import Stories, event_story

# What the books don't know.
_UNBOOKED = ("timing", "client_request_id", "labels", "route", "guard")


class Books(Protocol):
    """What billing offers here."""

    async def list_usage(self, request: ListUsageRequest) -> ListUsageResponse:
        """Return usage by request."""
        ...


class Decisions(Protocol):
    """What the router offers here."""

    async def fetch_decision(self, request_id: str) -> Decision:
        """Return why a request went where it went."""
        ...


def requests_router(
    auth: KeyAuth, stories: Stories, books: Books, decisions: Decisions
) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["requests"])

    @router.get("/v1/requests/{request_id}")
    async def story(request_id: str, request: Request) -> Json:
        """Tell a request's story to its owner.

        What is not known (any more) is null. Amounts are whole nano-USD; `booked` is false until
        the ledger has the request.
        """
        owner = Owner.of(await auth.authenticate(request.headers.raw))
        # Billing or the state may be away; what the other knows can still be told.
        failure: HeadraceError = NotFound(
            f"Request {request_id[:100]!r} not found.", param="request_id"
        )
        record = told = None
        try:
            record = await _record(books, owner, request_id)
        except HeadraceError as error:
            failure = error
        try:
            told = await stories.find(owner, request_id)
        except HeadraceError as error:
            failure = error
        if told is None:
            if record is None:
                raise failure
            told = {**event_story(record.event), **dict.fromkeys(_UNBOOKED)}
        routing = await _routing(decisions, request_id)
        return {**told, "routing": routing, "cost": _cost(record)}

    return router


async def _record(books: Books, owner: Owner, request_id: str) -> UsageRecord | None:
    asked = ListUsageRequest(tenant_id=owner.tenant_id, request_id=request_id)
    found = await books.list_usage(asked)
    for record in found.records:
        event = record.event
        if (event.tenant_id, event.project_id) == (owner.tenant_id, owner.project_id):
            return record
    return None


async def _routing(decisions: Decisions, request_id: str) -> Json | None:
    try:
        decision = await decisions.fetch_decision(request_id)
    except HeadraceError:
        return None
    chosen = [it for it in decision.candidates if it.replica == decision.replica]
    return {
        "replica": decision.replica.worker_id,
        "prefill_replica": decision.prefill_replica.worker_id or None,
        "policy": decision.policy,
        "queue_s": decision.queue_s,
        "predicted_ttft_s": decision.predicted_ttft_s,
        "predicted_hit_blocks": decision.predicted_hit_blocks,
        "candidates": len(decision.candidates),
        "filtered": [it.filtered_by for it in decision.candidates if it.filtered_by],
        "scores": dict(chosen[0].scores) if chosen else {},
    }


def _cost(record: UsageRecord | None) -> Json | None:
    if record is None:
        return None
    event = record.event
    tier = usage_pb2.PriceTier.Name(event.price_tier).removeprefix("PRICE_TIER_").lower()
    return {
        "amount_nano_usd": record.amount_nano_usd,
        "booked": record.closed,
        "price_version": event.price_version,
        "price_tier": tier,
    }

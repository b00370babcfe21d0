"""/v1/usage: what was used, by day, as far as the key may see it.

A key sees its own requests; one with the scope `usage` sees those of its whole tenant.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Request

from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest
from headrace_contracts.billing.v1.billing_pb2 import SumUsageRequest, SumUsageResponse, UsageSum
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth

_DAY_S = 86_400
_DEFAULT_DAYS, _MAX_DAYS = 31, 400
_TIERS = {
    usage_pb2.PRICE_TIER_BATCH: "batch",
    usage_pb2.PRICE_TIER_PRIORITY: "priority",
}
_GROUPS = {"project_id": "project", "api_key_id": "key", "model": "model", "service_tier": "tier"}


class UsageSource(Protocol):
    """What billing offers here."""

    async def sum_usage(self, request: SumUsageRequest) -> SumUsageResponse:
        """Return sums of usage."""
        ...


def usage_router(auth: KeyAuth, source: UsageSource, clock: Clock) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["usage"])

    @router.get("/v1/usage")
    async def usage(
        request: Request,
        start_time: Annotated[int | None, Query(ge=0, le=253_402_300_799)] = None,
        end_time: Annotated[int | None, Query(ge=0, le=253_402_300_799)] = None,
        group_by: Annotated[str, Query(max_length=100)] = "model",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        page: Annotated[int, Query(ge=0, le=2**31)] = 0,
    ) -> Json:
        """Sum tokens and money by day (UTC) and by *group_by*.

        Times are Unix seconds, from *start_time* to before *end_time*, and are widened to whole
        days; without them the last 31 days.
        Amounts are whole nano-USD: 1,000,000,000 is one USD.
        """
        principal = await auth.authenticate(request.headers.raw)
        start, end = _bounds(start_time, end_time, int(clock.unix_s()))
        groups = [name for name in group_by.split(",") if name]
        if unknown := sorted(set(groups) - set(_GROUPS)):
            raise InvalidRequest(
                f"group_by knows {', '.join(_GROUPS)}, not {', '.join(unknown)}.", param="group_by"
            )
        sees_all = "usage" in principal.scopes or "admin" in principal.scopes
        answer = await source.sum_usage(
            SumUsageRequest(
                tenant_id=principal.tenant_id,
                key_id="" if sees_all else principal.key_id,
                from_unix_s=start,
                to_unix_s=end,
                group_by=["day", *(_GROUPS[name] for name in groups)],
                limit=limit,
                offset=page,
            )
        )
        return {
            "object": "page",
            "data": [_row(it, groups) for it in answer.sums],
            "has_more": answer.has_more,
            "next_page": page + limit if answer.has_more else None,
        }

    return router


def _bounds(start: int | None, end: int | None, now: int) -> tuple[int, int]:
    last = now if end is None else end
    # The first second of the day after, unless that is what was named.
    until = -(-last // _DAY_S) * _DAY_S
    first = max(0, until - _DEFAULT_DAYS * _DAY_S) if start is None else start // _DAY_S * _DAY_S
    is_turned = start is not None and end is not None and start >= end
    if is_turned or not 0 < until - first <= _MAX_DAYS * _DAY_S:
        raise InvalidRequest(
            f"start_time must lie before end_time, and not more than {_MAX_DAYS} days before it.",
            param="start_time",
        )
    return first, until


def _row(it: UsageSum, groups: list[str]) -> Json:
    begin = datetime.fromtimestamp(it.day_unix_s, UTC)
    named = {
        "project_id": it.project_id,
        "api_key_id": it.key_id,
        "model": it.model,
        "service_tier": _TIERS.get(it.tier, "default"),
    }
    amount = (
        it.input_nano_usd + it.cached_input_nano_usd + it.cache_write_nano_usd + it.output_nano_usd
    )
    return {
        "object": "usage",
        "start_time": it.day_unix_s,
        "end_time": int((begin + timedelta(days=1)).timestamp()),
        **{name: named[name] for name in groups},
        "num_requests": it.num_requests,
        "input_tokens": it.prompt_tokens,
        "input_cached_tokens": it.cached_tokens,
        "input_cache_write_tokens": it.cache_write_tokens,
        "output_tokens": it.output_tokens,
        "amount_nano_usd": amount,
    }

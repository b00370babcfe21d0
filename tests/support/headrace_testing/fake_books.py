"""Sums over a fake billing's bookings, counted one by one."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_billing.ledger import Booking, admitted_unix_s
from headrace_common.errors import InvalidRequest
from headrace_common.price_rows import cached_tokens, standard_tier
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

_DAY_S = 86_400
_GROUPS = ("day", "project", "key", "model", "tier")


def sum_usage(bookings: Iterable[Booking], request: pb.SumUsageRequest) -> pb.SumUsageResponse:
    """As `Ledger.SumUsage`."""
    if not request.tenant_id:
        raise InvalidRequest("Name a tenant_id.", param="tenant_id")
    if set(request.group_by) - set(_GROUPS):
        raise InvalidRequest("group_by is wrong.", param="group_by")
    if 0 < request.to_unix_s <= request.from_unix_s:
        raise InvalidRequest("from_unix_s must lie before to_unix_s.", param="from_unix_s")
    found: dict[tuple[int, str, str, str, int], pb.UsageSum] = {}
    for booking in bookings:
        event, day = booking.event, admitted_unix_s(booking.event) // _DAY_S * _DAY_S
        if booking.entry is None or not _matches(event, day, request):
            continue
        values = (day, event.project_id, event.key_id, event.model, standard_tier(event.price_tier))
        key = tuple(
            value if name in request.group_by else type(value)()
            for name, value in zip(_GROUPS, values, strict=True)
        )
        total = found.setdefault(key, pb.UsageSum())  # type: ignore[arg-type]  # of these types
        names = ("day_unix_s", "project_id", "key_id", "model", "tier")
        for name, value in zip(names, key, strict=True):
            setattr(total, name, value)
        _count(total, booking)
    rows = [found[key] for key in sorted(found)][request.offset :]
    limit = min(request.limit or 1000, 10_000)
    return pb.SumUsageResponse(sums=rows[:limit], has_more=len(rows) > limit)


def _matches(event: UsageEvent, day: int, request: pb.SumUsageRequest) -> bool:
    names = ("tenant_id", "key_id", "project_id", "model")
    return (
        all(getattr(request, name) in ("", getattr(event, name)) for name in names)
        and day >= request.from_unix_s // _DAY_S * _DAY_S
        and (not request.to_unix_s or day < request.to_unix_s)
    )


def _count(total: pb.UsageSum, booking: Booking) -> None:
    usage, amounts = booking.event.usage, booking.amounts
    total.num_requests += 1
    total.prompt_tokens += usage.prompt_tokens
    total.cached_tokens += cached_tokens(usage)
    total.cache_write_tokens += usage.cache_write_tokens
    total.output_tokens += usage.output_tokens
    total.input_nano_usd += amounts.input_nano_usd
    total.cached_input_nano_usd += amounts.cached_input_nano_usd
    total.cache_write_nano_usd += amounts.cache_write_nano_usd
    total.output_nano_usd += amounts.output_nano_usd

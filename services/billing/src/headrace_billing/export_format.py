"""Closed requests as events of metering services: pure.

Two dialects. CloudEvents 1.0 in JSON batches, as OpenMeter and most others take them: source and id
together name an event for ever. Stripe's meter events, one form-encoded POST for each class of
tokens, named by `identifier`. In both, the name comes from the request id alone, so that sending an
event again, from whichever process and however much later, adds nothing at the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any
from urllib.parse import urlencode

from headrace_billing.daily import CLASSES, counts_of
from headrace_billing.ledger import admitted_unix_s
from headrace_common.price_rows import standard_tier
from headrace_common.proto_json import enum_name
from headrace_contracts.usage.v1 import usage_pb2
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

CLOUD_EVENTS_BATCH = "application/cloudevents-batch+json"
FORM = "application/x-www-form-urlencoded"
TYPE = "headrace.request.closed"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIERS = usage_pb2.DESCRIPTOR.enum_types_by_name["PriceTier"]


class Dialect(StrEnum):
    """What the receiver speaks."""

    CLOUD_EVENTS = "cloudevents"
    STRIPE = "stripe"


def cloud_events(closed: Sequence[tuple[UsageEvent, int]], source: str) -> bytes:
    """Render a batch of closed requests, each with its amount in nano-USD."""
    return json.dumps([_cloud_event(event, amount, source) for event, amount in closed]).encode()


def stripe_forms(event: UsageEvent, amount_nano_usd: int, prefix: str) -> list[tuple[str, bytes]]:
    """Render one closed request as meter events: identifier and body of each.

    Meters are named ``<prefix>_<class>``; what was not used is not sent, nor what a correction
    takes back: meters only count up. The customer is the tenant.
    """
    forms = []
    for name, value in _counts(event, amount_nano_usd).items():
        if value <= 0:
            continue
        identifier = f"{event.request_id}.{name}"
        fields = {
            "event_name": f"{prefix}_{name}",
            "identifier": identifier,
            "timestamp": str(event.occurred_unix_us // 1_000_000),
            "payload[stripe_customer_id]": event.tenant_id,
            "payload[value]": str(value),
        }
        forms.append((identifier, urlencode(fields).encode()))
    return forms


def _cloud_event(event: UsageEvent, amount_nano_usd: int, source: str) -> dict[str, Any]:
    when = _EPOCH + timedelta(microseconds=event.occurred_unix_us)
    return {
        "specversion": "1.0",
        "id": event.request_id,
        "source": source,
        "type": TYPE,
        "subject": event.tenant_id,
        "time": when.isoformat().replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "data": {
            "project_id": event.project_id,
            "key_id": event.key_id,
            "model": event.model,
            "tier": enum_name(_TIERS, standard_tier(event.price_tier)),
            "admitted_unix_s": admitted_unix_s(event),
            **_counts(event, amount_nano_usd),
        },
    }


def _counts(event: UsageEvent, amount_nano_usd: int) -> dict[str, int]:
    return {
        **{f"{name}_tokens": n for name, n in zip(CLASSES, counts_of(event), strict=True)},
        "amount_nano_usd": amount_nano_usd,
    }

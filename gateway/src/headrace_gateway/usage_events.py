"""The two events of a request's life, and who keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_contracts.types.v1.types_pb2 import ReplicaRef, TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import (
    Ending,
    PriceTier,
    UsageEvent,
)
from headrace_gateway.pricing import Rates, amount_nano_usd
from headrace_gateway.principal import Principal


class UsageLog(Protocol):
    """Where usage events go."""

    @property
    def is_full(self) -> bool:
        """Whether no further request can be recorded."""
        ...

    async def start(self) -> None:
        """Take over what an earlier life left, begin."""
        ...

    async def close(self) -> None:
        """Write what is queued, stop."""
        ...

    def opened(self, event: UsageEvent) -> asyncio.Future[None]:
        """Append; done once durable."""
        ...

    async def until_recorded(self, recorded: asyncio.Future[None]) -> None:
        """Wait for what `opened` returned, hurried, well or badly ended."""
        ...

    def closed(self, event: UsageEvent) -> asyncio.Future[None]:
        """Append, whether anybody waits or not; done once durable."""
        ...


@dataclass(slots=True)
class Account:
    """What both events of one request share."""

    request_id: str
    principal: Principal
    model: str
    endpoint: str
    is_stream: bool
    rates: Rates
    # Fixes the price.
    admitted_unix_us: int
    price_version: int
    price_tier: PriceTier.ValueType

    def opened(self, now_us: int, hold_nano_usd: int, deadline_us: int) -> UsageEvent:
        """Return the event of an admitted request."""
        event = self._event(UsageEvent.KIND_OPENED, now_us)
        event.hold_nano_usd = hold_nano_usd
        event.deadline_unix_us = deadline_us
        return event

    def closed(
        self,
        now_us: int,
        usage: TokenUsage,
        ending: Ending.ValueType,
        replicas: Sequence[ReplicaRef],
        *,
        estimated: bool,
    ) -> UsageEvent:
        """Return the event of a request that is over; times are the caller's to set."""
        event = self._event(UsageEvent.KIND_CLOSED, now_us)
        event.usage.CopyFrom(usage)
        event.ending = ending
        event.estimated = estimated
        event.replicas.extend(replicas)
        event.amount_nano_usd = amount_nano_usd(self.rates, usage)
        return event

    def _event(self, kind: UsageEvent.Kind.ValueType, now_us: int) -> UsageEvent:
        return UsageEvent(
            kind=kind,
            request_id=self.request_id,
            tenant_id=self.principal.tenant_id,
            project_id=self.principal.project_id,
            key_id=self.principal.key_id,
            model=self.model,
            price_version=self.price_version,
            price_tier=self.price_tier,
            occurred_unix_us=now_us,
            admitted_unix_us=self.admitted_unix_us,
            endpoint=self.endpoint,
            streaming=self.is_stream,
        )

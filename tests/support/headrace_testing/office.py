"""A billing service with its database, and an administrator's way in."""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx

from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.deliveries import Delivery
from headrace_billing.key_rules import hash_api_key
from headrace_billing.key_store import find_by_hash
from headrace_billing.server import BillingServer
from headrace_billing.store import Database
from headrace_billing.verify import verify
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_testing.clock import FakeClock
from headrace_testing.usage_events import ADMITTED_UNIX_US

NOW_UNIX_S = ADMITTED_UNIX_US // 1_000_000  # 2027-01-15


class Administered(NamedTuple):
    """A billing service and an administrator's key to it."""

    server: BillingServer
    api_key: str


class Office:
    """A billing service and an administrator's way in."""

    def __init__(self, database: Database, http: httpx.AsyncClient, clock: FakeClock) -> None:
        self.database, self.http, self.clock = database, http, clock

    async def ask(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        answer = await self.http.request(method, "/admin/v1" + path, **options)
        assert answer.status_code == status, answer.text
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    async def book(self, *events: UsageEvent) -> None:
        batch = [Delivery("usage", 0, i, it.SerializeToString()) for i, it in enumerate(events)]
        await self.database.write(lambda it: Bookkeeper("workers").book_batch(it, batch, 1))

    async def principal(self, api_key: str) -> Any:
        digest = hash_api_key(api_key)
        now = self.clock.unix_s()
        return await self.database.read(lambda it: find_by_hash(it, digest, now))

    async def check_books(self) -> None:
        found = await self.database.read(verify)
        assert found.ok, found.problems
        assert found.postings_sum_nano_usd == 0

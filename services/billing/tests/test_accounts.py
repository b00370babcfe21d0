"""Plans, credits, invoices and the admin API over HTTP, from the outside."""

import asyncio
import csv
import io
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select, text

import headrace_launcher.accounts
from headrace_billing import desk, schema
from headrace_billing.admin_routes import ROUTES
from headrace_billing.audit import Stamp
from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.credit_expiry import CreditExpiry
from headrace_billing.deliveries import Delivery
from headrace_billing.key_rules import hash_api_key, principal
from headrace_billing.key_store import create_key, find_by_hash
from headrace_billing.server import BillingServer
from headrace_billing.settings import BillingSettings
from headrace_billing.store import Database
from headrace_billing.verify import verify
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT, UsageEvent
from headrace_testing.clock import FakeClock
from headrace_testing.usage_events import (
    ADMITTED_UNIX_US,
    AMOUNT_NANO_USD,
    USAGE,
    closed,
    opened,
)
from headrace_testing.waiting import eventually, free_port

NOW_UNIX_S = ADMITTED_UNIX_US // 1_000_000  # 2027-01-15
# For services: the outbox's comparison and rebuilt budgets.
INTERNAL = {"FindMissing", "GetSpend"}
# (method, path, body, what the audit calls it), in an order in which each is possible.
CHANGES: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", "/tenants", {"tenant_id": "acme"}, "create_tenant"),
    ("PATCH", "/tenants/{tenant_id}", {"name": "Acme"}, "update_tenant"),
    ("PUT", "/tenants/{tenant_id}/projects/{project_id}", {"name": "one"}, "put_project"),
    ("PUT", "/plans/{plan_id}", {"key_limits": {"requests_per_minute": 7}}, "put_plan"),
    ("POST", "/keys", {"tenant_id": "acme"}, "create_key"),
    ("PATCH", "/keys/{key_id}", {"name": "later"}, "update_key"),
    ("POST", "/keys/{key_id}/rotate", {"overlap_s": 60}, "rotate_key"),
    (
        "PUT",
        "/limits",
        {"level": "key", "scope_id": "{key_id}", "limits": {"max_concurrent": 3}},
        "update_key",
    ),
    ("POST", "/prices", {"model": "m", "input_nano_usd": 5}, "set_price"),
    (
        "POST",
        "/tenants/{tenant_id}/credits",
        {"credit_id": "pay-1", "amount_nano_usd": 50_000, "kind": "payment"},
        "book_credit",
    ),
    ("POST", "/tenants/{tenant_id}/invoices", {"period": "2027-01-15"}, "issue_invoice"),
    (
        "POST",
        "/invoices/{invoice_id}/corrections",
        {"correction_id": "c-1", "amount_nano_usd": 10, "reason": "goodwill"},
        "issue_invoice",
    ),
    ("DELETE", "/keys/{key_id}", {}, "revoke_key"),
]


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


@pytest.fixture
async def office(database_url: str, clock: FakeClock) -> AsyncIterator[Office]:
    clock.advance(NOW_UNIX_S - clock.unix_s())
    settings = BillingSettings(
        database_url=database_url, kafka_bootstrap=f"127.0.0.1:{free_port()}"
    )
    server = BillingServer(settings, CollectorRegistry(), clock)
    await server.start()
    await eventually(lambda: server.is_ready, within_s=30)
    database = Database(database_url)
    wanted = pb.Key(tenant_id="ops", name="admin", scopes=["admin"])
    made = await database.write(lambda it: create_key(it, wanted, Stamp(1)))
    headers = {"authorization": f"Bearer {made.api_key}"}
    url = f"http://127.0.0.1:{server.admin_port}"
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        yield Office(database, http, clock)
    await database.close()
    await server.stop(0)


async def test_only_an_administrators_key_opens_the_admin_api(office: Office) -> None:
    """401 without a live key, 403 without the scope; OpenAPI names every call."""
    made = await office.ask("POST", "/keys", json={"tenant_id": "acme", "name": "app"})
    assert made["api_key"].startswith("sk-hr-")
    for key, status in (("x", 401), ("sk-hr-wrong", 401), (made["api_key"], 403)):
        answer = await office.http.get(
            "/admin/v1/tenants", headers={"authorization": f"Bearer {key}"}
        )
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    described = (await office.http.get("/openapi.json")).json()
    assert "/admin/v1/tenants/{tenant_id}/invoices" in described["paths"]
    create = described["paths"]["/admin/v1/keys"]["post"]
    assert "limits" in create["requestBody"]["content"]["application/json"]["schema"]["properties"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", b"", 404, "unknown_url"),
        ("GET", "/keys/", b"", 404, "unknown_url"),
        ("PUT", "/keys", b"", 405, "method_not_allowed"),
        ("POST", "/keys", b"[" * 100_000, 400, "invalid_request"),
        ("POST", "/keys", b"{" + b" " * 1024 * 1024, 400, "invalid_request"),
    ],
)
async def test_what_the_admin_api_does_not_do_has_the_usual_shape(
    office: Office, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    """No redirect, no body of the framework's own, and a mistake of the caller's is no 500."""
    answer = await office.http.request(method, "/admin/v1" + path, content=body)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    if status == 405:
        assert answer.headers["allow"] == "GET, POST"


async def test_a_write_with_an_idempotency_key_is_done_once(office: Office) -> None:
    """The answer is given again, without the secret; another request under the key is refused."""
    headers, wanted = {"idempotency-key": "k1"}, {"tenant_id": "acme", "name": "app"}
    first = await office.ask("POST", "/keys", json=wanted, headers=headers)
    again = await office.ask("POST", "/keys", json=wanted, headers=headers)
    assert again["key"] == first["key"]
    assert again["api_key"] == ""
    other = {"tenant_id": "acme", "name": "other"}
    await office.ask("POST", "/keys", 400, json=other, headers=headers)
    keys = (await office.ask("GET", "/keys", params={"tenant_id": "acme"}))["keys"]
    assert len(keys) == 1


async def test_writes_are_forgotten_after_a_while(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that comes deletes some of the oldest, so that none of them has much to do."""
    monkeypatch.setattr(desk, "_MAX_FORGOTTEN_AT_ONCE", 2)

    async def put(number: int) -> None:
        headers = {"idempotency-key": f"k{number}"}
        await office.ask("PUT", "/plans/p", json={"name": f"{number}"}, headers=headers)

    async def kept() -> int:
        query = select(func.count()).select_from(schema.idempotent_writes)
        return await office.database.read(lambda it: it.execute(query).scalar_one())

    for number in range(5):
        await put(number)
    office.clock.advance(90 * 86_400 - 10)
    await put(5)
    assert await kept() == 6
    await put(0)
    office.clock.advance(11)
    for number, left in ((6, 5), (7, 4), (8, 4)):
        await put(number)
        assert await kept() == left
    # A write of before is a new one now; one of since is still known.
    await put(0)
    plans = await office.ask("GET", "/plans")
    assert [it["name"] for it in plans["plans"]] == ["0"]
    await put(5)
    plans = await office.ask("GET", "/plans")
    assert [it["name"] for it in plans["plans"]] == ["0"]


async def test_mistakes_are_refused_by_name(office: Office) -> None:
    """Unknown fields, wrong types, unknown scopes and plans, things that do not exist."""
    for path, body in (
        ("/keys", {"tenant_id": "acme", "colour": "red"}),
        ("/keys", {"tenant_id": "acme", "scopes": ["root"]}),
        ("/keys", {"tenant_id": "acme", "limits": {"requests_per_minute": -1}}),
        ("/keys", []),
        ("/prices", {"model": "m", "window_from_minute": 2000}),
    ):
        answer = await office.ask("POST", path, 400, json=body)
        assert answer["error"]["type"] == "invalid_request_error"
    await office.ask("POST", "/tenants", json={"tenant_id": "acme"})
    await office.ask("PATCH", "/tenants/acme", 400, json={"plan_id": "nope"})
    await office.ask("PATCH", "/tenants/nope", 404, json={"name": "x"})
    await office.ask("GET", "/tenants/nope/balance", 404)
    await office.ask("GET", "/invoices/nope-000001", 404)
    await office.ask("GET", "/tenants", 400, params={"colour": "red"})


async def test_a_patch_that_names_nothing_changes_nothing(office: Office) -> None:
    """An empty body must not take a key's limits and blocked words away."""
    wanted = {"tenant_id": "acme", "guard_blocklist": ["x"], "limits": {"requests_per_minute": 5}}
    made = (await office.ask("POST", "/keys", json=wanted))["key"]
    for options in ({"json": {}}, {}):
        await office.ask("PATCH", f"/keys/{made['key_id']}", 400, **options)
        await office.ask("PATCH", "/tenants/acme", 400, **options)
    assert (await office.ask("GET", "/keys", params={"tenant_id": "acme"}))["keys"] == [made]


async def test_an_administrator_who_sends_no_more_does_not_hold_up_the_end(
    database_url: str, clock: FakeClock
) -> None:
    """A body that never comes is waited for as long as the grace, not for ever."""
    broker = f"127.0.0.1:{free_port()}"
    settings = BillingSettings(database_url=database_url, kafka_bootstrap=broker)
    server = BillingServer(settings, CollectorRegistry(), clock)
    await server.start()
    await eventually(lambda: server.is_ready, within_s=30)
    database = Database(database_url)
    wanted = pb.Key(tenant_id="ops", name="admin", scopes=["admin"])
    made = await database.write(lambda it: create_key(it, wanted, Stamp(1)))
    await database.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.admin_port)
    head = f"POST /admin/v1/tenants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {made.api_key}\r\n"
    writer.write(f"{head}content-length: 100\r\nexpect: 100-continue\r\n\r\n".encode())
    # Asked for once the key has been looked at: the request waits for its body.
    assert b"100" in await asyncio.wait_for(reader.readline(), 10)
    try:
        await asyncio.wait_for(server.stop(0.5), 15)
    finally:
        writer.close()


async def test_a_plan_reaches_the_keys_of_its_tenants(office: Office) -> None:
    """A tenant's and a key's own limits win; a change takes the next revision of the keys."""
    plan = {
        "name": "Starter",
        "tenant_limits": {"requests_per_minute": 100, "max_concurrent": 9},
        "key_limits": {"requests_per_minute": 10},
        "model_limits": [{"model": "big", "limits": {"requests_per_day": 5}}],
        "priority": "batch",
    }
    await office.ask("PUT", "/plans/starter", json=plan)
    made = await office.ask("POST", "/keys", json={"tenant_id": "acme"})
    settings = {"plan_id": "starter", "limits": {"max_concurrent": 3}}
    await office.ask("PATCH", "/tenants/acme", json=settings)
    known = await office.principal(made["api_key"])
    found = principal(known.key, known.owner, known.revision)
    key, tenant = found.limits
    assert key.limits.requests_per_minute == 10
    assert (tenant.limits.requests_per_minute, tenant.limits.max_concurrent) == (100, 3)
    assert [(it.model, it.limits.requests_per_day) for it in found.model_limits] == [("big", 5)]
    assert found.priority == 1
    await office.ask("PUT", "/plans/starter", json={"key_limits": {"requests_per_minute": 7}})
    after = await office.principal(made["api_key"])
    assert after.revision > known.revision
    assert after.owner.plan.key_limits.requests_per_minute == 7
    assert [it["plan_id"] for it in (await office.ask("GET", "/plans"))["plans"]] == ["starter"]


async def test_a_rotated_key_opens_the_door_with_both_secrets_until_the_overlap_ends(
    office: Office,
) -> None:
    """The old one says when it ends, so that caches end it too."""
    old = await office.ask("POST", "/keys", json={"tenant_id": "acme"})
    path = f"/keys/{old['key']['key_id']}/rotate"
    new = await office.ask("POST", path, json={"overlap_s": 60})
    assert new["key"]["key_id"] == old["key"]["key_id"]
    known = await office.principal(old["api_key"])
    assert known.key.expires_unix_s == int(office.clock.unix_s()) + 60
    assert (await office.principal(new["api_key"])).key.expires_unix_s == 0
    office.clock.advance(61)
    assert await office.principal(old["api_key"]) is None
    assert await office.principal(new["api_key"]) is not None
    last = await office.ask("POST", path, json={})
    assert await office.principal(new["api_key"]) is None
    assert await office.principal(last["api_key"]) is not None
    await office.ask("DELETE", f"/keys/{old['key']['key_id']}")
    await office.ask("POST", path, 400, json={})


async def test_a_prepaid_tenants_budget_is_its_credit(office: Office) -> None:
    """A credit is booked once; the balance is credits less spent less held."""
    made = await office.ask("POST", "/keys", json={"tenant_id": "acme"})
    await office.ask("PATCH", "/tenants/acme", json={"prepaid": True})
    known = await office.principal(made["api_key"])
    (scope,) = principal(known.key, known.owner, 1).limits
    assert scope.limits.HasField("total_budget_nano_usd")
    assert scope.limits.total_budget_nano_usd == 0
    grant = {"credit_id": "pay-1", "amount_nano_usd": 50_000, "kind": "payment"}
    for _ in range(2):
        await office.ask("POST", "/tenants/acme/credits", json=grant)
    changed = {**grant, "amount_nano_usd": 1}
    await office.ask("POST", "/tenants/acme/credits", 400, json=changed)
    await office.book(closed(), opened("req_2"))
    known = await office.principal(made["api_key"])
    (scope,) = principal(known.key, known.owner, 1).limits
    assert scope.limits.total_budget_nano_usd == 50_000
    balance = await office.ask("GET", "/tenants/acme/balance")
    assert balance["available_nano_usd"] == 50_000 - AMOUNT_NANO_USD - 10_000
    assert balance["prepaid"]
    await office.check_books()


async def test_what_is_left_of_a_credit_ends_with_it(office: Office) -> None:
    """Money that ends first is used first; each end is booked once, and the books stay right."""
    await office.ask("POST", "/tenants", json={"tenant_id": "acme"})
    now_s = int(office.clock.unix_s())
    for name, amount, days in (("late", 1000, 20), ("soon", 4000, 10), ("lasting", 500, 0)):
        grant = {
            "credit_id": name,
            "amount_nano_usd": amount,
            "kind": "promotion",
            "expires_unix_s": now_s + days * 86_400 if days else 0,
        }
        await office.ask("POST", "/tenants/acme/credits", json=grant)
    past = {"credit_id": "past", "amount_nano_usd": 1, "expires_unix_s": now_s}
    await office.ask("POST", "/tenants/acme/credits", 400, json=past)
    await office.book(closed())
    expiry = CreditExpiry(office.database, office.clock)
    assert await expiry.expire() == 0
    office.clock.advance(10 * 86_400)
    assert [await expiry.expire(), await expiry.expire()] == [1, 0]
    balance = await office.ask("GET", "/tenants/acme/balance")
    assert balance["available_nano_usd"] == 1000 + 500
    office.clock.advance(10 * 86_400)
    assert await expiry.expire() == 1
    balance = await office.ask("GET", "/tenants/acme/balance")
    assert balance["available_nano_usd"] == 500
    listed = (await office.ask("GET", "/tenants/acme/credits"))["credits"]
    ended = {it["credit_id"]: it["amount_nano_usd"] for it in listed if it["kind"] == "expiry"}
    assert ended == {"soon.expiry": 4000 - AMOUNT_NANO_USD, "late.expiry": 1000}
    await office.check_books()


async def test_invoices_together_are_the_ledger(office: Office) -> None:
    """Issued once, late bookings on the next, rounding carried, corrected by counter-entry."""
    await office.ask("POST", "/tenants", json={"tenant_id": "acme"})
    await office.book(*(closed(f"req_{i}") for i in range(2000)))
    await office.ask("POST", "/tenants/acme/invoices", 400, json={"period": "2027-01"})
    await office.ask("POST", "/tenants/acme/invoices", 400, json={"period": "January"})
    first = await office.ask("POST", "/tenants/acme/invoices", json={"period": "2027-01-15"})
    assert first["total_nano_usd"] == 2000 * AMOUNT_NANO_USD
    assert (first["num_requests"], first["due_cents"]) == (2000, 1)
    assert first["carried_out_nano_usd"] == 2000 * AMOUNT_NANO_USD - 10_000_000
    await office.book(closed("req_late"))
    again = await office.ask("POST", "/tenants/acme/invoices", json={"period": "2027-01-15"})
    assert again == first
    office.clock.advance(20 * 86_400)
    second = await office.ask("POST", "/tenants/acme/invoices", json={"period": "2027-01"})
    assert second["total_nano_usd"] == AMOUNT_NANO_USD
    assert second["carried_in_nano_usd"] == first["carried_out_nano_usd"]
    path = f"/invoices/{first['invoice_id']}/corrections"
    give_back = {"correction_id": "c1", "amount_nano_usd": 1000, "reason": "outage"}
    note = await office.ask("POST", path, json=give_back)
    assert await office.ask("POST", path, json=give_back) == note
    assert (note["total_nano_usd"], note["corrects_invoice_id"]) == (-1000, first["invoice_id"])
    too_much = {"correction_id": "c2", "amount_nano_usd": first["total_nano_usd"]}
    await office.ask("POST", path, 400, json=too_much)
    listed = (await office.ask("GET", "/tenants/acme/invoices"))["invoices"]
    assert [it["number"] for it in listed] == [1, 2, 3]
    balance = await office.ask("GET", "/tenants/acme/balance")
    assert balance["credits_nano_usd"] == 1000
    lines = await office.ask("GET", f"/invoices/{first['invoice_id']}/lines.csv")
    rows = list(csv.DictReader(io.StringIO(lines)))
    assert sum(int(row["amount_nano_usd"]) for row in rows) == first["total_nano_usd"]
    await office.check_books()
    for statement in ("UPDATE invoices SET number = 9", "DELETE FROM invoices"):
        with pytest.raises(Exception, match="append-only"):
            await office.database.write(lambda it, sql=statement: it.execute(text(sql)))


async def test_what_a_late_close_takes_back_is_on_the_next_invoice(office: Office) -> None:
    """Billed by the worker's count, then the gateway's own close came and says less."""
    await office.ask("POST", "/tenants", json={"tenant_id": "acme"})
    counted = TokenUsage(prompt_tokens=USAGE.prompt_tokens, output_tokens=USAGE.output_tokens + 50)
    await office.book(closed("req_1", ending=ENDING_SWEPT, usage=counted))
    first = await office.ask("POST", "/tenants/acme/invoices", json={"period": "2027-01-15"})
    await office.book(closed("req_1"))
    office.clock.advance(20 * 86_400)
    second = await office.ask("POST", "/tenants/acme/invoices", json={"period": "2027-01"})
    assert second["total_nano_usd"] < 0
    assert first["total_nano_usd"] + second["total_nano_usd"] == AMOUNT_NANO_USD
    returned = {it["token_class"]: it["tokens"] for it in second["lines"] if it["is_returned"]}
    assert returned["output"] == 50
    balance = await office.ask("GET", "/tenants/acme/balance")
    assert balance["spent_nano_usd"] == AMOUNT_NANO_USD
    used = await office.ask("GET", "/tenants/acme/usage", params={"group_by": "day"})
    assert [it["num_requests"] for it in used["sums"]] == [1]
    await office.check_books()


async def test_usage_and_audit_can_be_read(office: Office) -> None:
    """Usage as JSON and CSV; the audit says who did what, and holds no secret."""
    made = await office.ask("POST", "/keys", json={"tenant_id": "acme", "name": "=cmd"})
    await office.book(closed("req_1"), closed("req_2"))
    used = await office.ask("GET", "/tenants/acme/usage", params={"group_by": "day,model"})
    assert used["sums"][0]["num_requests"] == 2
    table = await office.ask("GET", "/tenants/acme/usage.csv", params={"group_by": "model"})
    (row,) = csv.DictReader(io.StringIO(table))
    assert row["output_tokens"] == "60"
    records = (await office.ask("GET", "/audit"))["records"]
    created = [it for it in records if it["subject"] == made["key"]["key_id"]]
    assert [it["action"] for it in created] == ["create_key"]
    assert created[0]["actor"].startswith("key_")
    assert made["api_key"] not in str(records)


async def test_a_suspended_tenant_has_no_live_key(office: Office) -> None:
    """And it is back when the suspension ends."""
    made = await office.ask("POST", "/keys", json={"tenant_id": "acme", "scopes": ["admin"]})
    headers = {"authorization": f"Bearer {made['api_key']}"}
    for suspended, status in ((False, 200), (True, 401), (False, 200)):
        await office.ask("PATCH", "/tenants/acme", json={"suspended": suspended})
        answer = await office.http.get("/admin/v1/tenants", headers=headers)
        assert answer.status_code == status


async def test_a_replay_gives_the_same_books(office: Office) -> None:
    """Whatever is booked, credits and corrections included; and damage shows."""
    await office.ask("POST", "/tenants", json={"tenant_id": "acme"})
    grant = {"credit_id": "pay-1", "amount_nano_usd": 5, "kind": "promotion"}
    await office.ask("POST", "/tenants/acme/credits", json=grant)
    await office.book(*(make(f"req_{i}") for i in range(30) for make in (opened, closed)))
    found = await office.ask("POST", "/ledger/replay", json={})
    assert found["ok"], found
    assert (found["num_events"], found["books_sha256"]) == (60, found["replay_sha256"])
    damage = "UPDATE balances SET amount_nano_usd = 1 WHERE account = 'promotions'"
    await office.database.write(lambda it: it.execute(text(damage)))
    found = await office.ask("POST", "/ledger/replay", json={})
    assert not found["ok"]


@pytest.mark.parametrize("service", ["Admin", "Accounts", "Books", "Ledger"])
def test_every_call_has_a_path_and_a_command(service: str) -> None:
    """A method that is added to the contract needs both before it can be released."""
    calls = {it.name for it in pb.DESCRIPTOR.services_by_name[service].methods} - INTERNAL
    assert calls - {it.call for it in ROUTES if it.service == service.lower()} == set()
    folder = Path(headrace_launcher.accounts.__file__).parent
    commands = "".join(it.read_text() for it in folder.glob("*.py"))
    assert {call for call in calls if f'"{call}"' not in commands} == set()


async def test_administrators_at_two_processes_at_once_do_everything_once(
    office: Office, database_url: str
) -> None:
    """The same write, sent to both at the same moment, with and without a key of its own."""
    other = BillingServer(
        BillingSettings(database_url=database_url, kafka_bootstrap=f"127.0.0.1:{free_port()}"),
        CollectorRegistry(),
        office.clock,
    )
    await other.start()
    await eventually(lambda: other.is_ready, within_s=30)
    url = f"http://127.0.0.1:{other.admin_port}"
    await office.ask("POST", "/tenants", json={"tenant_id": "acme"})
    await office.book(closed())
    office.clock.advance(86_400)
    credit = {"amount_nano_usd": 50_000, "kind": "payment"}
    writes: list[tuple[str, dict[str, Any], str]] = [
        ("/tenants/acme/credits", {"credit_id": f"pay-{n}", **credit}, key)
        for n, key in enumerate(("", "once-1", "once-2"))
    ]
    writes += [("/tenants/acme/invoices", {"period": "2027-01-15"}, "")]
    writes += [("/keys", {"tenant_id": "acme", "name": "one"}, "once-3")]
    async with httpx.AsyncClient(base_url=url, headers=office.http.headers) as second:
        for path, body, key in writes:
            headers = {"idempotency-key": key} if key else {}
            answers = await asyncio.gather(
                *(
                    http.post("/admin/v1" + path, json=body, headers=headers)
                    for _ in range(4)
                    for http in (office.http, second)
                )
            )
            assert {it.status_code for it in answers} == {200}, [it.text for it in answers]
    await other.stop(0)
    assert len((await office.ask("GET", "/tenants/acme/credits"))["credits"]) == 3
    assert len((await office.ask("GET", "/tenants/acme/invoices"))["invoices"]) == 1
    keys = (await office.ask("GET", "/keys", params={"tenant_id": "acme"}))["keys"]
    assert [it["name"] for it in keys] == ["one"]
    await office.check_books()


# Of each type, values that are right and values that have no business there.
NUMBERS = [0, 1, -1, 7, 1.5, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, "5", "x", None]
TEXTS = [
    "",
    "acme",
    "a" * 5000,
    "\x00",
    "\ud800",
    "{x}",
    "../..",
    "2027-01",
    "9999-12",
    5,
    None,
    [],
]
ANYTHING = [None, True, "text", 3, [], {}, [[]], {"x": {}}, float("inf")]
# Not: what reads the whole log, or books all again.
SLOW = {"Reconcile", "Replay"}
IDS = ["acme", "p1", "starter", "none", "a" * 300, "%00", "%ff", "{x}", "..", "acme-000001"]


def _guess(descriptor: Any, chosen: random.Random, depth: int = 0) -> Any:
    """Make up a message's JSON, mostly of the right shape."""
    if chosen.random() < 0.03:
        return chosen.choice(ANYTHING)
    body = {}
    for field in descriptor.fields:
        if chosen.random() < (0.4 if depth else 0.7):
            body[field.name] = _guess_field(field, chosen, depth)
    return body


def _guess_field(field: Any, chosen: random.Random, depth: int) -> Any:
    def one() -> Any:
        if field.message_type is not None:
            return _guess(field.message_type, chosen, depth + 1)
        if field.enum_type is not None:
            return chosen.choice(["unspecified", "standard", "payment", "key", "model", 99, "?"])
        pool = TEXTS if field.type in (field.TYPE_STRING, field.TYPE_BYTES) else NUMBERS
        return chosen.choice([*pool, True])

    return [one() for _ in range(chosen.randint(0, 3))] if field.is_repeated else one()


async def test_nonsense_is_refused_and_never_breaks_anything(office: Office) -> None:
    """Whatever is sent to any path: an answer or a refusal, no failure, and the books are right."""
    chosen = random.Random(1)
    for method, path, body, _ in CHANGES[:2]:
        await office.ask(method, path.format(tenant_id="acme"), json=body)
    seen = set()
    for _ in range(90):
        route = chosen.choice([it for it in ROUTES if it.call not in SLOW])
        path = re.sub(r"{\w+}", lambda _: chosen.choice(IDS), route.path)
        descriptor = route.request.DESCRIPTOR
        if route.body:
            descriptor = descriptor.fields_by_name[route.body].message_type
        guess = _guess(descriptor, chosen)
        options: dict[str, Any] = {"content": json.dumps(guess)}
        if route.method == "GET" and isinstance(guess, dict):
            texts = {k: v for k, v in guess.items() if isinstance(v, str | int) and v != "\ud800"}
            options = {"params": texts}
        answer = await office.http.request(route.method, "/admin/v1" + path, **options)
        assert answer.status_code < 500, (route.call, path, guess, answer.text)
        seen.add((route.call, answer.status_code == 200))
    assert len({call for call, is_done in seen if is_done}) > 6, "nearly all is refused"
    await office.check_books()


def test_every_changing_path_is_tried_here() -> None:
    """What is not a question changes something; the books' proofs change nothing."""
    changing = {
        (it.method, it.path)
        for it in ROUTES
        if it.method != "GET" and not it.path.startswith("/ledger")
    }
    assert changing == {(method, path) for method, path, _, _ in CHANGES}


async def test_everything_an_administrator_does_is_in_the_audit(office: Office) -> None:
    """Each change adds a line that names what was done and the key that did it."""
    names = {"tenant_id": "acme", "project_id": "p1", "plan_id": "starter"}
    seen = 0
    for method, path, body, action in CHANGES:
        if path.endswith("/invoices"):
            await office.book(closed())
            office.clock.advance(86_400)
        body = {
            name: value.format(**names) if isinstance(value, str) else value
            for name, value in body.items()
        }
        answer = await office.ask(method, path.format(**names), json=body)
        if path == "/keys":
            names["key_id"] = answer["key"]["key_id"]
        if path.endswith("/invoices"):
            names["invoice_id"] = answer["invoice_id"]
        records = (await office.ask("GET", "/audit", params={"after_audit_id": seen}))["records"]
        mine = [it for it in records if it["actor"].startswith("key_")]
        assert action in {it["action"] for it in mine}, path
        seen = int(records[-1]["audit_id"])

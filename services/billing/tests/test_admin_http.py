"""The admin API over HTTP: who may, what is refused, and that each write is done once."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select

import headrace_launcher.accounts
from headrace_billing import desk, schema
from headrace_billing.admin_routes import ROUTES
from headrace_billing.server import BillingServer
from headrace_billing.settings import BillingSettings
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_testing.office import Administered, Office
from headrace_testing.usage_events import closed
from headrace_testing.waiting import eventually, free_port

# For services: the outbox's comparison and rebuilt budgets.
INTERNAL = {"FindMissing", "GetSpend"}


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


async def test_a_write_goes_where_its_address_says_or_nowhere(office: Office) -> None:
    """A body copied from another tenant's, or an option that is none, is told."""
    credit = {"credit_id": "c1", "amount_nano_usd": "5"}
    await office.ask("POST", "/tenants", json={"tenant_id": "acme", "name": "Acme"})
    told = await office.ask(
        "POST", "/tenants/acme/credits", 400, json={**credit, "tenant_id": "rival"}
    )
    assert told["error"]["param"] == "tenant_id"
    told = await office.ask("POST", "/tenants/acme/credits?dry_run=1", 400, json=credit)
    assert told["error"]["param"] == "dry_run"
    assert (await office.ask("GET", "/tenants/acme/credits")).get("credits", []) == []
    for again in ({"tenant_id": "acme"}, {"tenant_id": None}, {}):
        await office.ask("POST", "/tenants/acme/credits", json={**credit, **again})


async def test_a_patch_that_names_nothing_changes_nothing(office: Office) -> None:
    """An empty body must not take a key's limits and blocked words away."""
    wanted = {"tenant_id": "acme", "guard_blocklist": ["x"], "limits": {"requests_per_minute": 5}}
    made = (await office.ask("POST", "/keys", json=wanted))["key"]
    for options in ({"json": {}}, {}):
        await office.ask("PATCH", f"/keys/{made['key_id']}", 400, **options)
        await office.ask("PATCH", "/tenants/acme", 400, **options)
    assert (await office.ask("GET", "/keys", params={"tenant_id": "acme"}))["keys"] == [made]


async def test_an_administrator_who_sends_no_more_does_not_hold_up_the_end(
    administered: Administered,
) -> None:
    """A body that never comes is waited for as long as the grace, not for ever."""
    server, api_key = administered
    reader, writer = await asyncio.open_connection("127.0.0.1", server.admin_port)
    head = f"POST /admin/v1/tenants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {api_key}\r\n"
    writer.write(f"{head}content-length: 100\r\nexpect: 100-continue\r\n\r\n".encode())
    # Asked for once the key has been looked at: the request waits for its body.
    assert b"100" in await asyncio.wait_for(reader.readline(), 10)
    try:
        await asyncio.wait_for(server.stop(0.5), 15)
    finally:
        writer.close()


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

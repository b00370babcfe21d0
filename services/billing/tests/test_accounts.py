"""Tenants, plans, keys, credits and invoices, by the admin API over HTTP."""

import csv
import io

import pytest
from sqlalchemy import text

from headrace_billing import usage_sums
from headrace_billing.credit_expiry import CreditExpiry
from headrace_billing.key_rules import principal
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT
from headrace_testing.office import Office
from headrace_testing.usage_events import AMOUNT_NANO_USD, USAGE, closed, opened


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


async def test_a_table_of_usage_is_whole(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spreadsheet cannot turn pages, nor see that one is missing."""
    monkeypatch.setattr(usage_sums, "DEFAULT_SUMS", 1)
    await office.book(*(closed(f"req_{n}", key_id=f"key_{n}") for n in range(3)))
    path, query = "/tenants/acme/usage.csv", {"group_by": "key"}
    rows = list(csv.DictReader(io.StringIO(await office.ask("GET", path, params=query))))
    assert [it["key_id"] for it in rows] == ["key_0", "key_1", "key_2"]
    table = await office.ask("GET", path, params={**query, "limit": 2, "offset": 1})
    assert [it["key_id"] for it in csv.DictReader(io.StringIO(table))] == ["key_1", "key_2"]


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

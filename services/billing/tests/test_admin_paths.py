"""Every path of the admin API: nonsense breaks none, and each change is in the audit."""

import json
import random
import re
from typing import Any

from headrace_billing.admin_routes import ROUTES
from headrace_testing.office import Office
from headrace_testing.usage_events import closed

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

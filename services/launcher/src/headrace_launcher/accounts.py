"""Commands about tenants, plans, money and the books: one call of billing each.

What billing answers is printed as JSON, or as lines where it is a list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.money import usd_text
from headrace_common.proto_json import from_json, to_json
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_launcher.admin import PRIORITIES, limits_of, with_billing
from headrace_launcher.answer_text import moment_text, show
from headrace_launcher.billing_client import BillingClient
from headrace_launcher.exit_codes import EXIT_FAILED, EXIT_OK
from headrace_launcher.guard_client import check_policy_name
from headrace_launcher.text import table_text

_LEVELS = {
    "key": ratelimit_pb2.LEVEL_KEY,
    "project": ratelimit_pb2.LEVEL_PROJECT,
    "tenant": ratelimit_pb2.LEVEL_TENANT,
    "model": ratelimit_pb2.LEVEL_MODEL,
}
_PAGE_RECORDS = 1000
# Changed by `keys update`, by name of the option; limits come on top.
_KEY_FIELDS = (
    "name",
    "allowed_models",
    "guard_policy",
    "guard_blocklist",
    "guard_fail_open",
    "scopes",
    "priority",
    "prepaid",
    "counts_cached_input",
    "expires_unix_s",
)


def _merged(now: ratelimit_pb2.Limits, args: Namespace) -> ratelimit_pb2.Limits | None:
    """Return limits with those of the options in place of what they were; None: no option."""
    wanted = limits_of(args)
    if not wanted.ListFields():
        return None
    result = ratelimit_pb2.Limits()
    result.CopyFrom(now)
    result.MergeFrom(wanted)
    return result


@with_billing
async def create_tenant(client: BillingClient, args: Namespace) -> int:
    """``headrace tenants create``; one that is there is changed."""
    tenant = await client.call("Admin", "CreateTenant", tenant_id=args.tenant, name=args.name or "")
    return await _change_tenant(client, args, tenant)


@with_billing
async def update_tenant(client: BillingClient, args: Namespace) -> int:
    """``headrace tenants update``; a name that no tenant has is a mistake of typing."""
    known = (await client.call("Admin", "ListTenants")).tenants
    found = [it for it in known if it.tenant_id == args.tenant]
    if not found:
        raise NotFound(f"There is no tenant {args.tenant!r}; see `headrace tenants list`.")
    return await _change_tenant(client, args, found[0])


async def _change_tenant(client: BillingClient, args: Namespace, tenant: pb.Tenant) -> int:
    wanted: dict[str, Any] = {
        name: value
        for name in ("name", "plan_id", "prepaid", "suspended")
        if (value := getattr(args, name)) is not None
    }
    if (limits := _merged(tenant.limits, args)) is not None:
        wanted["limits"] = to_json(limits)
    if wanted:
        body = {**wanted, "tenant_id": args.tenant}
        tenant = await client.call(
            "Accounts",
            "UpdateTenant",
            tenant=from_json(pb.Tenant, body),
            fields=sorted(wanted),
        )
    return show(args, tenant)


@with_billing
async def list_tenants(client: BillingClient, args: Namespace) -> int:
    """``headrace tenants list``."""
    answer = await client.call("Admin", "ListTenants")
    return show(args, answer, answer.tenants, ("tenant_id", "name", "plan_id", "prepaid"))


@with_billing
async def show_balance(client: BillingClient, args: Namespace) -> int:
    """``headrace tenants balance``."""
    return show(args, await client.call("Accounts", "GetBalance", tenant_id=args.tenant))


@with_billing
async def put_project(client: BillingClient, args: Namespace) -> int:
    """``headrace projects put``."""
    known = await client.call("Accounts", "ListProjects", tenant_id=args.tenant)
    found = [it for it in known.projects if it.project_id == args.project]
    before = found[0] if found else pb.Project()
    project = pb.Project(
        tenant_id=args.tenant,
        project_id=args.project,
        name=before.name if args.name is None else args.name,
        limits=_merged(before.limits, args) or before.limits,
    )
    return show(args, await client.call("Accounts", "PutProject", project=project))


@with_billing
async def list_projects(client: BillingClient, args: Namespace) -> int:
    """``headrace projects list``."""
    answer = await client.call("Accounts", "ListProjects", tenant_id=args.tenant)
    return show(args, answer, answer.projects, ("project_id", "name"))


@with_billing
async def put_plan(client: BillingClient, args: Namespace) -> int:
    """``headrace plans put``: the plan as JSON, from a file or standard input."""
    try:
        body = json.loads(sys.stdin.read() if args.file == "-" else _read(args.file))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"The plan cannot be read: {error}.") from error
    if not isinstance(body, dict):
        raise InvalidRequest("A plan is a JSON object.")
    plan = from_json(pb.Plan, {**body, "plan_id": args.plan})
    return show(args, await client.call("Accounts", "PutPlan", plan=plan))


@with_billing
async def list_plans(client: BillingClient, args: Namespace) -> int:
    """``headrace plans list``."""
    answer = await client.call("Accounts", "ListPlans")
    return show(args, answer, answer.plans, ("plan_id", "name", "prepaid"))


@with_billing
async def grant_credit(client: BillingClient, args: Namespace) -> int:
    """``headrace credits grant``."""
    request = from_json(
        pb.GrantCreditRequest,
        {
            "tenant_id": args.tenant,
            "credit_id": args.id,
            "amount_nano_usd": args.usd,
            "kind": args.kind,
            "note": args.note,
            "expires_unix_s": args.expires,
        },
    )
    return show(args, await client.send("Accounts", "GrantCredit", request))


@with_billing
async def list_credits(client: BillingClient, args: Namespace) -> int:
    """``headrace credits list``."""
    answer = await client.call("Accounts", "ListCredits", tenant_id=args.tenant)
    return show(args, answer, answer.credits, ("credit_id", "kind", "amount_nano_usd", "note"))


@with_billing
async def issue_invoice(client: BillingClient, args: Namespace) -> int:
    """``headrace invoices issue``."""
    answer = await client.call(
        "Accounts", "IssueInvoice", tenant_id=args.tenant, period=args.period
    )
    return _show_invoice(args, answer)


@with_billing
async def correct_invoice(client: BillingClient, args: Namespace) -> int:
    """``headrace invoices correct``."""
    answer = await client.call(
        "Accounts",
        "CorrectInvoice",
        invoice_id=args.invoice,
        correction_id=args.id,
        amount_nano_usd=args.usd,
        reason=args.reason,
    )
    return _show_invoice(args, answer)


@with_billing
async def list_invoices(client: BillingClient, args: Namespace) -> int:
    """``headrace invoices list``."""
    answer = await client.call("Accounts", "ListInvoices", tenant_id=args.tenant)
    return show(args, answer, answer.invoices, ("invoice_id", "period", "due_cents"))


@with_billing
async def show_invoice(client: BillingClient, args: Namespace) -> int:
    """``headrace invoices show``."""
    return _show_invoice(args, await client.call("Accounts", "GetInvoice", invoice_id=args.invoice))


@with_billing
async def set_limits(client: BillingClient, args: Namespace) -> int:
    """``headrace limits set``: replaces all limits of a key, project, tenant or model."""
    answer = await client.call(
        "Admin",
        "SetLimits",
        level=_LEVELS[args.level],
        tenant_id=args.tenant or "",
        scope_id=args.id or "",
        limits=limits_of(args),
    )
    return show(args, answer)


@with_billing
async def update_key(client: BillingClient, args: Namespace) -> int:
    """``headrace keys update``: only what is named changes."""
    await check_policy_name(args.guard_address, args.guard_policy or "")
    known = {it.key_id: it for it in await client.list_keys()}
    if args.key_id not in known:
        raise NotFound(f"There is no key {args.key_id!r}.")
    key = pb.Key(key_id=args.key_id)
    fields = []
    args.priority = PRIORITIES.get(args.priority)
    for name in _KEY_FIELDS:
        # Any: as the field has it.
        value: Any = getattr(args, name)
        if value is not None:
            key.MergeFrom(pb.Key(**{name: value}))
            fields.append(name)
    if (limits := _merged(known[args.key_id].limits, args)) is not None:
        key.limits.CopyFrom(limits)
        fields.append("limits")
    return show(args, await client.call("Admin", "UpdateKey", key=key, fields=fields))


@with_billing
async def rotate_key(client: BillingClient, args: Namespace) -> int:
    """``headrace keys rotate``."""
    answer = await client.call(
        "Accounts", "RotateKey", key_id=args.key_id, overlap_s=args.overlap_s
    )
    return show(args, answer)


@with_billing
async def list_audit(client: BillingClient, args: Namespace) -> int:
    """``headrace audit``."""
    answer, has_more = pb.ListAuditResponse(), True
    while has_more:
        after = answer.records[-1].audit_id if answer.records else 0
        page = await client.call(
            "Accounts",
            "ListAudit",
            subject=args.subject or "",
            after_audit_id=after,
            limit=_PAGE_RECORDS,
        )
        answer.records.extend(page.records)
        has_more = len(page.records) == _PAGE_RECORDS
    if args.json:
        return show(args, answer)
    columns = ("audit_id", "at", "actor", "action", "subject", "detail")
    rows = [
        (it.audit_id, moment_text(it.at_unix_s), it.actor, it.action, it.subject, it.detail)
        for it in answer.records
    ]
    print(table_text(columns, rows))
    return EXIT_OK


@with_billing
async def replay_ledger(client: BillingClient, args: Namespace) -> int:
    """``headrace ledger replay``: exit code 0 only if an empty database comes out the same."""
    answer = await client.call("Books", "Replay")
    show(args, answer)
    return EXIT_OK if answer.ok else EXIT_FAILED


@with_billing
async def reconcile_ledger(client: BillingClient, args: Namespace) -> int:
    """``headrace ledger reconcile``: outboxes, log and workers' counts against the books."""
    answer = await client.call("Books", "Reconcile")
    body = to_json(answer)
    body["outbox"] = await _compare_outboxes(client, args.outbox_dirs or args.own_outboxes)
    is_ok = answer.ok and not body["outbox"]["missing"]
    body["ok"] = is_ok
    print(json.dumps(body, indent=2))
    return EXIT_OK if is_ok else EXIT_FAILED


@with_billing
async def list_dead_letters(client: BillingClient, args: Namespace) -> int:
    """``headrace ledger dead-letters``."""
    answer = await client.call("Books", "ListDeadLetters", limit=args.limit)
    columns = ("topic", "partition", "offset", "request_id", "error")
    return show(args, answer, answer.dead_letters, columns)


async def _compare_outboxes(client: BillingClient, folders: Iterable[str]) -> dict[str, Any]:
    events = [event for folder in folders for event in _outbox_events(folder)]
    missing = []
    for start in range(0, len(events), 5000):
        ids = [pb.EventId(**event) for event in events[start : start + 5000]]
        answer = await client.call("Ledger", "FindMissing", events=ids)
        missing += [to_json(it) for it in answer.missing]
    return {"events": len(events), "missing": missing}


def _outbox_events(folder: str) -> list[dict[str, Any]]:
    """Let the gateway read its own files; it knows what they hold.

    Where its code is not, such as in another container, it was run there: "-" reads what it said.
    """
    if folder == "-":
        return [json.loads(line) for line in sys.stdin]
    command = [sys.executable, "-m", "headrace_gateway.outbox_list", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise NotFound(f"The outbox {folder} cannot be read: {done.stderr.strip()[-300:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _show_invoice(args: Namespace, invoice: pb.Invoice) -> int:
    if args.json:
        return show(args, invoice)
    print(f"{invoice.invoice_id}  {invoice.tenant_id}  {invoice.period}")
    for line in invoice.lines:
        amount = usd_text(line.amount_nano_usd)
        tokens = -line.tokens if line.is_returned else line.tokens
        print(f"  {line.description:<60} {tokens:>12}  {amount:>16} USD")
    print(f"  carried in {usd_text(invoice.carried_in_nano_usd)} USD")
    due, carried = usd_text(invoice.due_cents * 10_000_000), invoice.carried_out_nano_usd
    print(f"  due {due} USD, carried on {usd_text(carried)} USD")
    return EXIT_OK

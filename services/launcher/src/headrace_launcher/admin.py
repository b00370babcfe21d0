"""``headrace keys``, ``usage`` and ``ledger``: they ask the billing service of a running fleet."""

from __future__ import annotations

import csv
import json
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from headrace_common.clock import SystemClock
from headrace_common.errors import HeadraceError, InvalidRequest, NotFound
from headrace_common.money import usd_text
from headrace_common.price_rows import cached_tokens
from headrace_common.proto_json import to_json
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.types.v1 import types_pb2
from headrace_contracts.usage.v1 import usage_pb2
from headrace_launcher.billing_client import BillingClient, open_billing
from headrace_launcher.exit_codes import EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK
from headrace_launcher.fleet import run_until_done
from headrace_launcher.guard_client import check_policy_name
from headrace_launcher.peer import PeerError
from headrace_launcher.settings import LauncherSettings
from headrace_launcher.state_dir import StateDir
from headrace_launcher.text import say, table_text

Command = Callable[[BillingClient, Namespace], Awaitable[int]]

_ENDING_STATUS = {
    usage_pb2.ENDING_COMPLETED: "completed",
    usage_pb2.ENDING_CLIENT_GONE: "cancelled",
    usage_pb2.ENDING_OUTPUT_BLOCKED: "blocked",
    usage_pb2.ENDING_FAILED: "failed",
    usage_pb2.ENDING_DEADLINE: "failed",
    usage_pb2.ENDING_SWEPT: "swept",
}
LIMITS = tuple(field.name for field in ratelimit_pb2.Limits.DESCRIPTOR.fields)
PRIORITIES = {
    "batch": types_pb2.PRIORITY_BATCH,
    "standard": types_pb2.PRIORITY_STANDARD,
    "high": types_pb2.PRIORITY_HIGH,
}


def with_billing(command: Command) -> Callable[[LauncherSettings, Namespace], int]:
    """Wrap a command so that it gets billing's client, and its errors become sentences."""

    def run(settings: LauncherSettings, args: Namespace) -> int:
        try:
            address = settings.billing_address or billing_address(StateDir(settings.state_dir))
        except LookupError as error:
            say(str(error))
            return EXIT_NOT_RUNNING
        args.guard_address = settings.guard_address or running_address(
            StateDir(settings.state_dir), "guard"
        )
        # One per gateway that there ever was.
        outboxes = sorted(StateDir(settings.state_dir).path.glob("outbox*"))
        args.own_outboxes = [str(folder) for folder in outboxes if folder.is_dir()]
        return run_until_done(_call(command, address, args))

    return run


async def _call(command: Command, address: str, args: Namespace) -> int:
    async with open_billing(address) as client:
        try:
            return await command(client, args)
        except (PeerError, HeadraceError) as error:  # the latter: found here, nobody was asked
            say(str(error))
            return EXIT_FAILED
        except ValueError as error:
            # A number that no field holds, such as one below zero.
            say(f"an option is wrong: {error}")
            return EXIT_FAILED


def running_address(state_dir: StateDir, service: str) -> str:
    """Return where a service of the running fleet listens; "" if none runs there."""
    try:
        view = state_dir.running_view()
    except ValueError:
        return ""
    child = view.child(service) if view is not None else None
    return child.address if child is not None else ""


def billing_address(state_dir: StateDir) -> str:
    """Find billing in the running fleet of a state directory.

    Raises:
        LookupError: none runs; the message says what to do.
    """
    try:
        view = state_dir.running_view()
    except ValueError as error:
        raise LookupError(f"{state_dir.fleet_json}: {error}") from error
    billing = view.child("billing") if view is not None else None
    if billing is None:
        raise LookupError(
            f"no fleet runs with state directory {state_dir.path}. "
            f"Start one with `headrace up`, or name another directory with --state-dir"
        )
    return billing.address


@with_billing
async def create_key(client: BillingClient, args: Namespace) -> int:
    """``headrace keys create``."""
    await check_policy_name(args.guard_address, args.guard_policy)
    answer = await client.create_key(key_from_arguments(args))
    if args.json:
        print(json.dumps({"api_key": answer.api_key, "key_id": answer.key.key_id}))
    else:
        print(f"{answer.api_key}\n(key id {answer.key.key_id}; the key is not shown again)")
    return EXIT_OK


def limits_of(args: Namespace) -> ratelimit_pb2.Limits:
    """Build limits from options; what was not given stays absent."""
    given = {name: value for name in LIMITS if (value := getattr(args, name, None)) is not None}
    return ratelimit_pb2.Limits(**given)


def key_from_arguments(args: Namespace) -> pb.Key:
    """Build the wanted key; limits that were not given stay absent."""
    return pb.Key(
        tenant_id=args.tenant,
        name=args.name,
        allowed_models=args.models,
        limits=limits_of(args),
        priority=PRIORITIES.get(args.priority, types_pb2.PRIORITY_UNSPECIFIED),
        prepaid=bool(args.prepaid),
        counts_cached_input=bool(args.counts_cached_input),
        guard_fail_open=bool(args.guard_fail_open),
        project_id=args.project,
        scopes=args.scopes,
        expires_unix_s=args.expires,
        guard_policy=args.guard_policy,
        guard_blocklist=args.guard_block,
    )


@with_billing
async def list_keys(client: BillingClient, args: Namespace) -> int:
    """``headrace keys list``."""
    keys = await client.list_keys(args.tenant or "")
    if args.json:
        print(json.dumps({"keys": [key_json(key) for key in keys]}, indent=2))
        return EXIT_OK
    rows = [(key.key_id, key.tenant_id, key.name, key.prefix, _state_of(key)) for key in keys]
    print(table_text(("key id", "tenant", "name", "begins with", "state"), rows))
    return EXIT_OK


def _state_of(key: pb.Key) -> str:
    if key.revoked_unix_s:
        return "revoked"
    return "expired" if 0 < key.expires_unix_s <= SystemClock().unix_s() else "live"


@with_billing
async def revoke_key(client: BillingClient, args: Namespace) -> int:
    """``headrace keys revoke``."""
    key = await client.revoke_key(args.key_id)
    if args.json:
        print(json.dumps(key_json(key), indent=2))
        return EXIT_OK
    print(f"revoked {key.key_id} ({key.tenant_id}/{key.name})")
    return EXIT_OK


@with_billing
async def usage(client: BillingClient, args: Namespace) -> int:
    """``headrace usage``."""
    _check_usage_options(args)
    if args.tenant:
        return await _usage_of_tenant(client, args)
    records = [record_json(record) for record in await client.usage(args.key)]
    if not records and args.key not in {key.key_id for key in await client.list_keys()}:
        raise NotFound(f"There is no key {args.key!r}; see `headrace keys list`.")
    total = sum(record["amount_nano_usd"] for record in records)
    if args.json:
        body = {"records": records, "total_nano_usd": total, "total_usd": usd_text(total)}
        print(json.dumps(body, indent=2))
        return EXIT_OK
    counts = [f"{kind}_tokens" for kind in ("prompt", "cached", "completion")]
    names = ("request_id", "status", *counts, "amount_usd")
    rows = ([record[name] for name in names] for record in records)
    print(table_text(("request", "status", "prompt", "cached", "output", "USD"), rows))
    print(f"{len(records)} requests, {usd_text(total)} USD")
    return EXIT_OK


def _check_usage_options(args: Namespace) -> None:
    if 0 < args.to_unix_s <= args.from_unix_s:
        raise InvalidRequest("--from must lie before --to, whose day is left out.")
    summing = {"by": args.by, "from": args.from_unix_s, "to": args.to_unix_s, "csv": args.csv}
    if args.key and (given := [f"--{name}" for name, value in summing.items() if value]):
        raise InvalidRequest(f"{', '.join(given)}: only with --tenant; --key shows all requests.")


async def _usage_of_tenant(client: BillingClient, args: Namespace) -> int:
    sums: list[pb.UsageSum] = []
    by = ["day", "model"] if args.by is None else args.by
    has_more = True
    while has_more:
        page = await client.call(
            "Ledger",
            "SumUsage",
            tenant_id=args.tenant,
            from_unix_s=args.from_unix_s,
            to_unix_s=args.to_unix_s,
            group_by=by,
            offset=len(sums),
        )
        sums += page.sums
        has_more = page.has_more
    rows = [to_json(it) for it in sums]
    if args.json:
        print(json.dumps({"sums": rows}, indent=2))
        return EXIT_OK
    if not args.csv:
        print(_sums_text(by, sums))
        return EXIT_OK
    names = [field.name for field in pb.UsageSum.DESCRIPTOR.fields]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row[name] for name in names] for row in rows)
    return EXIT_OK


def _sums_text(by: Sequence[str], sums: Sequence[pb.UsageSum]) -> str:
    """Lay out sums for people: what they are by, then counts and what they cost together."""
    rows = []
    for it in sums:
        places = {
            "day": f"{datetime.fromtimestamp(it.day_unix_s, UTC):%Y-%m-%d}",
            "project": it.project_id,
            "key": it.key_id,
            "model": it.model,
            "tier": to_json(it)["tier"],
        }
        counts = (it.num_requests, it.prompt_tokens, it.cached_tokens, it.output_tokens)
        cost = it.input_nano_usd + it.cached_input_nano_usd + it.cache_write_nano_usd
        cost += it.output_nano_usd
        rows.append([*(places[name] for name in by), *counts, usd_text(cost)])
    return table_text([*by, "requests", "prompt", "cached", "output", "USD"], rows)


@with_billing
async def verify_ledger(client: BillingClient, args: Namespace) -> int:
    """``headrace ledger verify``: exit code 0 only if the books are right."""
    answer = await client.verify()
    if args.json:
        print(json.dumps(verify_json(answer), indent=2))
    else:
        print(
            f"{'right' if answer.ok else 'WRONG'}: {answer.num_events} events, "
            f"{answer.num_entries} entries, {answer.num_open} open, "
            f"{answer.num_dead_letters} dead letters, postings sum to "
            f"{answer.postings_sum_nano_usd} nano-USD"
        )
        for problem in answer.problems:
            print(f"  {problem}")
    return EXIT_OK if answer.ok else EXIT_FAILED


def key_json(key: pb.Key) -> dict[str, Any]:  # Any: JSON values
    """Render a key for ``--json``; times as ISO 8601, null where there is none."""
    limits = {descriptor.name: value for descriptor, value in key.limits.ListFields()}
    return {
        "key_id": key.key_id,
        "tenant": key.tenant_id,
        "project": key.project_id,
        "name": key.name,
        "prefix": key.prefix,
        "models": list(key.allowed_models),
        "limits": limits,
        "guard_policy": key.guard_policy,
        "guard_block": list(key.guard_blocklist),
        "created": _iso(key.created_unix_s),
        "expires": _iso(key.expires_unix_s),
        "revoked": _iso(key.revoked_unix_s),
    }


def record_json(record: pb.UsageRecord) -> dict[str, Any]:  # Any: JSON values
    """Render one request's usage for ``--json``; the names in it are stable."""
    event, tokens = record.event, record.event.usage
    status = _ENDING_STATUS.get(event.ending, "failed") if record.closed else "open"
    return {
        "request_id": event.request_id,
        "tenant": event.tenant_id,
        "key_id": event.key_id,
        "model": event.model,
        "endpoint": event.endpoint,
        "streaming": event.streaming,
        "status": status,
        "prompt_tokens": tokens.prompt_tokens,
        "cached_tokens": cached_tokens(tokens),
        "completion_tokens": tokens.output_tokens,
        "estimated": event.estimated,
        "amount_nano_usd": record.amount_nano_usd,
        "amount_usd": usd_text(record.amount_nano_usd),
        "price_version": event.price_version,
        "occurred": _iso(event.occurred_unix_us / 1e6),
        "ttft_s": event.ttft_s,
        "duration_s": event.duration_s,
        "replicas": [replica.worker_id for replica in event.replicas],
    }


def verify_json(answer: pb.VerifyResponse) -> dict[str, Any]:  # Any: JSON values
    """Render billing's verdict on its books for ``--json``."""
    return {
        "ok": answer.ok,
        "num_events": answer.num_events,
        "num_entries": answer.num_entries,
        "num_open": answer.num_open,
        "num_dead_letters": answer.num_dead_letters,
        "postings_sum_nano_usd": answer.postings_sum_nano_usd,
        "problems": list(answer.problems),
    }


def _iso(unix_s: float) -> str | None:
    return datetime.fromtimestamp(unix_s, UTC).isoformat() if unix_s else None

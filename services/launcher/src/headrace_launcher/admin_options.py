"""The command line of everything that asks billing: keys, tenants, prices, money, the books."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from headrace_common.clock import SystemClock
from headrace_common.money import nano_usd_from_text

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[ArgumentParser]"

# Adds a command: its group, name, help text and handler.
AddCommand = Callable[["Commands", str, str, str], ArgumentParser]
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
# What fits in the contract's fields.
_MAX_INT64 = 2**63 - 1


def add_admin_commands(commands: Commands, add: AddCommand) -> None:
    """Add all of them."""
    _add_keys(_group(commands, "keys", "API keys"), add)
    _add_tenants(_group(commands, "tenants", "tenants and their balance"), add)
    _add_projects(_group(commands, "projects", "projects of a tenant"), add)
    _add_plans(_group(commands, "plans", "plans: limits for many tenants"), add)
    _add_prices(_group(commands, "prices", "prices"), add)
    _add_money(commands, add)
    _add_ledger(_group(commands, "ledger", "the books"), add)
    limits = _group(commands, "limits", "limits of a key, project, tenant or model")
    put = _json(add(limits, "set", "replace all limits of one of them", "accounts:set_limits"))
    put.add_argument("level", choices=("key", "project", "tenant", "model"))
    put.add_argument("--tenant", help="not needed for a key")
    put.add_argument("--id", help="key id, project or model")
    add_limits(put)
    audit = _json(add(commands, "audit", "who changed what", "accounts:list_audit"))
    audit.add_argument("--subject", help="of this key, tenant, plan or invoice only")


def add_limits(parser: ArgumentParser) -> None:
    """Add one option for each limit."""
    for name in ("requests-per-minute", "tokens-per-minute", "max-concurrent"):
        parser.add_argument(f"--{name}", type=limit)
    for name in ("input-tokens-per-minute", "output-tokens-per-minute", "requests-per-day"):
        parser.add_argument(f"--{name}", type=limit)
    for window in ("day", "month", "total"):
        parser.add_argument(
            f"--{window}-budget-usd", dest=f"{window}_budget_nano_usd", type=usd, metavar="USD"
        )


def words(text: str) -> list[str]:
    """Split a list at commas; an empty text is an empty list."""
    found = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(found):
        raise argparse.ArgumentTypeError(f"nothing stands before or behind a comma: {text!r}")
    return found


def _some_words(text: str) -> list[str]:
    """Split a list that may not be empty: where that is the default, it means "everything"."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; leave the option out for the default")
    return words(text)


def limit(text: str) -> int:
    """Read a limit: at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1; leave the option out for no limit")
    return _bounded(value)


def usd(text: str) -> int:
    """Read an amount in USD as nano-USD."""
    try:
        return _bounded(nano_usd_from_text(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def moment(text: str) -> int:
    """Read a moment such as 2027-01-31 or 2027-01-31T12:00, UTC, as Unix seconds."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"not a moment such as 2027-01-31 or 2027-01-31T12:00 (UTC): {text!r}"
        ) from error
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())


def _moment_ahead(text: str) -> int:
    found = moment(text)
    if found <= SystemClock().unix_s():
        raise argparse.ArgumentTypeError(f"must lie ahead: {text!r}")
    return found


def _bounded(value: int) -> int:
    if value > _MAX_INT64:
        raise argparse.ArgumentTypeError("is too large; leave the option out for no limit")
    return value


def _minute(text: str) -> int:
    hours, _, minutes = text.partition(":")
    try:
        return int(hours) * 60 + int(minutes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a time such as 22:30: {text!r}") from error


def _weekdays(text: str) -> int:
    try:
        return sum(1 << WEEKDAYS.index(word) for word in set(words(text.lower())))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"days are {', '.join(WEEKDAYS)}") from error


def _group(commands: Commands, name: str, text: str) -> Commands:
    return commands.add_parser(name, help=text).add_subparsers(required=True, metavar="COMMAND")


def _json(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--json", action="store_true", help="for scripts")
    return parser


def _add_keys(keys: Commands, add: AddCommand) -> None:
    _add_key_create(keys, add)
    show = _json(add(keys, "list", "list API keys", "admin:list_keys"))
    show.add_argument("--tenant", help="of this tenant only")
    revoke = _json(add(keys, "revoke", "revoke an API key", "admin:revoke_key"))
    revoke.add_argument("key_id", metavar="KEY_ID")
    update = _json(add(keys, "update", "change what is named", "accounts:update_key"))
    update.add_argument("key_id", metavar="KEY_ID")
    update.add_argument("--name")
    update.add_argument("--models", dest="allowed_models", type=words, metavar="M,...")
    update.add_argument("--scopes", type=words, metavar="S,...", help="inference, usage, admin")
    update.add_argument("--guard-policy", metavar="P")
    update.add_argument("--guard-block", dest="guard_blocklist", type=words, metavar="WORD,...")
    update.add_argument("--expires", dest="expires_unix_s", type=moment, metavar="DATE")
    _add_key_choices(update)
    add_limits(update)
    rotate = _json(add(keys, "rotate", "a new secret for a key", "accounts:rotate_key"))
    rotate.add_argument("key_id", metavar="KEY_ID")
    rotate.add_argument(
        "--overlap-s", type=int, default=0, help="the old secret works for so long. Seconds"
    )


def _add_key_create(keys: Commands, add: AddCommand) -> None:
    create = _json(add(keys, "create", "create an API key", "admin:create_key"))
    create.add_argument("--tenant", required=True, help="made if it does not exist")
    create.add_argument("--name", required=True)
    create.add_argument("--project", default="", help="made if it does not exist")
    add_limits(create)
    create.add_argument(
        "--budget-usd", dest="month_budget_nano_usd", type=usd, metavar="USD",
        help="as --month-budget-usd, e.g. 12.50",
    )  # fmt: skip
    _add_key_choices(create)
    create.add_argument(
        "--models", type=_some_words, default=[], metavar="M,...", help="default: all"
    )
    create.add_argument(
        "--scopes", type=_some_words, default=[], metavar="S,...", help="inference, usage, admin"
    )
    create.add_argument("--expires", type=_moment_ahead, default=0, metavar="DATE", help="UTC")
    create.add_argument(
        "--guard-block", type=_some_words, default=[], metavar="WORD,...", help="words to block"
    )
    create.add_argument("--guard-policy", default="", metavar="P", help="name of a guard policy")


def _add_key_choices(parser: ArgumentParser) -> None:
    parser.add_argument("--priority", choices=("batch", "standard", "high"))
    flags = {
        "prepaid": "refused when its budget cannot be checked",
        "counts-cached-input": "input limits count what came from the cache, too",
        "guard-fail-open": "served although the guard is away",
    }
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)


def _add_tenants(tenants: Commands, add: AddCommand) -> None:
    kinds = {
        "create": ("make a tenant, or change what is named", "accounts:create_tenant"),
        "update": ("change what is named", "accounts:update_tenant"),
    }
    for name, (text, handler) in kinds.items():
        put = _json(add(tenants, name, text, handler))
        put.add_argument("tenant", metavar="TENANT")
        put.add_argument("--name")
        put.add_argument("--plan", dest="plan_id", metavar="PLAN")
        for flag in ("prepaid", "suspended"):
            put.add_argument(f"--{flag}", action=argparse.BooleanOptionalAction)
        add_limits(put)
    _json(add(tenants, "list", "list tenants", "accounts:list_tenants"))
    balance = _json(add(tenants, "balance", "credits, spent, held", "accounts:show_balance"))
    balance.add_argument("tenant", metavar="TENANT")


def _add_projects(projects: Commands, add: AddCommand) -> None:
    text = "make a project, or change what is named"
    put = _json(add(projects, "put", text, "accounts:put_project"))
    put.add_argument("project", metavar="PROJECT")
    put.add_argument("--tenant", required=True)
    put.add_argument("--name")
    add_limits(put)
    show = _json(add(projects, "list", "list projects", "accounts:list_projects"))
    show.add_argument("--tenant", required=True)


def _add_plans(plans: Commands, add: AddCommand) -> None:
    put = _json(add(plans, "put", "make or replace a plan", "accounts:put_plan"))
    put.add_argument("plan", metavar="PLAN")
    put.add_argument("--file", default="-", help="the plan as JSON; - = standard input")
    _json(add(plans, "list", "list plans", "accounts:list_plans"))


def _add_prices(prices: Commands, add: AddCommand) -> None:
    put = _json(add(prices, "set", "add a price; nano-USD per token", "prices:set_price"))
    put.add_argument("model", metavar="MODEL", help="or 'default'")
    for name in ("input", "cached-input", "cache-write", "output"):
        put.add_argument(
            f"--{name}", dest=f"{name.replace('-', '_')}_nano_usd", type=int, metavar="N",
            help="0 = free; needed, except with --withdrawn",
        )  # fmt: skip
    put.add_argument("--tier", choices=("standard", "batch", "priority"))
    put.add_argument("--from", dest="effective_from_unix_s", type=moment, metavar="DATE")
    put.add_argument("--to", dest="effective_to_unix_s", type=moment, metavar="DATE")
    put.add_argument("--from-prompt-tokens", type=int, metavar="N", help="context tier")
    put.add_argument("--window-from", dest="window_from_minute", type=_minute, metavar="HH:MM")
    put.add_argument("--window-to", dest="window_to_minute", type=_minute, metavar="HH:MM")
    put.add_argument("--weekdays", dest="window_weekdays", type=_weekdays, metavar="mon,...")
    put.add_argument("--withdrawn", action="store_true", default=None, help="no price any more")
    _json(add(prices, "list", "all prices, past and coming", "prices:list_prices"))


def _add_money(commands: Commands, add: AddCommand) -> None:
    credits = _group(commands, "credits", "money put onto accounts")
    grant = _json(add(credits, "grant", "book a credit, once per id", "accounts:grant_credit"))
    grant.add_argument("tenant", metavar="TENANT")
    grant.add_argument("--id", required=True, help="of your choice; repeats change nothing")
    grant.add_argument("--usd", type=usd, required=True)
    grant.add_argument("--kind", choices=("payment", "promotion"), default="payment")
    grant.add_argument("--note", default="")
    grant.add_argument(
        "--expires", type=moment, default=0, metavar="DATE", help="UTC; what is left then ends"
    )
    show = _json(add(credits, "list", "list a tenant's credits", "accounts:list_credits"))
    show.add_argument("tenant", metavar="TENANT")
    invoices = _group(commands, "invoices", "invoices")
    issue = _json(add(invoices, "issue", "bill what is not billed", "accounts:issue_invoice"))
    issue.add_argument("tenant", metavar="TENANT")
    issue.add_argument("period", metavar="PERIOD", help="2026-10, or 2026-10-17 to bill until then")
    show = _json(add(invoices, "list", "list a tenant's invoices", "accounts:list_invoices"))
    show.add_argument("tenant", metavar="TENANT")
    show = _json(add(invoices, "show", "show an invoice", "accounts:show_invoice"))
    show.add_argument("invoice", metavar="INVOICE")
    correct = _json(add(invoices, "correct", "a credit note", "accounts:correct_invoice"))
    correct.add_argument("invoice", metavar="INVOICE")
    correct.add_argument("--id", required=True, help="of your choice; repeats change nothing")
    correct.add_argument("--usd", type=usd, required=True)
    correct.add_argument("--reason", default="")


def _add_ledger(ledger: Commands, add: AddCommand) -> None:
    _json(add(ledger, "verify", "recount the books", "admin:verify_ledger"))
    _json(add(ledger, "replay", "book all again elsewhere", "accounts:replay_ledger"))
    compare = add(ledger, "reconcile", "outboxes, log, workers", "accounts:reconcile_ledger")
    _json(compare).add_argument(
        "--outbox", dest="outbox_dirs", action="append", default=[], metavar="DIR",
        help="of a gateway; the running fleet's by itself; - = what headrace_gateway.outbox_list "
        "says, from standard input",
    )  # fmt: skip
    letters = add(ledger, "dead-letters", "what cannot be booked", "accounts:list_dead_letters")
    _json(letters).add_argument("--limit", type=int, default=100)

"""``headrace prices``: what a token of each class costs, and when."""

from __future__ import annotations

from argparse import Namespace

from headrace_common.errors import InvalidRequest
from headrace_common.proto_json import from_json, to_json
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_launcher.admin import with_billing
from headrace_launcher.admin_options import WEEKDAYS
from headrace_launcher.answer_text import moment_text, show
from headrace_launcher.billing_client import BillingClient
from headrace_launcher.exit_codes import EXIT_OK
from headrace_launcher.text import table_text

_CLASSES = ("input", "cached_input", "cache_write", "output")


@with_billing
async def set_price(client: BillingClient, args: Namespace) -> int:
    """``headrace prices set``."""
    left_out = [name for name in _CLASSES if getattr(args, f"{name}_nano_usd") is None]
    if left_out and not args.withdrawn:
        # What no option names would be given away.
        options = ", ".join(f"--{name.replace('_', '-')}" for name in left_out)
        raise InvalidRequest(f"A price names {options} too; 0 = free.")
    names = [field.name for field in pb.Price.DESCRIPTOR.fields]
    body = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    answer = await client.call("Admin", "SetPrice", price=from_json(pb.Price, body))
    newest = [price for price in answer.prices if price.version == answer.version]
    return show(args, newest[0])


@with_billing
async def list_prices(client: BillingClient, args: Namespace) -> int:
    """``headrace prices list``."""
    answer = await client.call("Keys", "GetPriceTable")
    if args.json:
        return show(args, answer)
    columns = ("version", "model", "tier", *(f"{name}_nano_usd" for name in _CLASSES), "holds")
    print(table_text(columns, map(_cells, answer.prices)))
    return EXIT_OK


def _cells(price: pb.Price) -> list[str]:
    row = to_json(price)
    amounts = [str(row[f"{name}_nano_usd"]) for name in _CLASSES]
    if price.withdrawn:
        amounts = ["none"] * len(_CLASSES)
    return [str(price.version), price.model, row["tier"], *amounts, _holds(price)]


def _holds(price: pb.Price) -> str:
    """Say when and for which prompts; "always" if nothing is named."""
    parts = []
    if price.effective_from_unix_s:
        parts.append(f"from {moment_text(price.effective_from_unix_s)}")
    if price.effective_to_unix_s:
        parts.append(f"to {moment_text(price.effective_to_unix_s)}")
    if price.from_prompt_tokens:
        parts.append(f"prompts of {price.from_prompt_tokens} tokens or more")
    if price.window_weekdays:
        days = [day for bit, day in enumerate(WEEKDAYS) if price.window_weekdays >> bit & 1]
        parts.append(",".join(days))
    if price.window_from_minute or price.window_to_minute:
        parts.append(f"{_clock(price.window_from_minute)}-{_clock(price.window_to_minute)}")
    return ", ".join(parts) or "always"


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"

"""The seed of the price table: a TOML file, checked as a whole before anything uses it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from headrace_billing.price_rules import check_price, place_of
from headrace_common.errors import InvalidRequest
from headrace_common.settings import SettingsError
from headrace_contracts.billing.v1.billing_pb2 import Price
from headrace_contracts.usage.v1.usage_pb2 import PriceTier

PACKAGED = Path(__file__).parent / "data" / "prices.toml"
_REQUIRED = (
    "model",
    "input_nano_usd",
    "cached_input_nano_usd",
    "cache_write_nano_usd",
    "output_nano_usd",
)
_OPTIONAL = (
    "tier",
    "effective_from_unix_s",
    "effective_to_unix_s",
    "from_prompt_tokens",
    "window_from_minute",
    "window_to_minute",
    "window_weekdays",
)
_TIERS = {"standard": 1, "batch": 2, "priority": 3}


class PriceFileError(SettingsError):
    """The price file is wrong; the message says where."""


def load_prices(path: Path) -> list[Price]:
    """Read and check a price file.

    Raises:
        PriceFileError: it cannot be read or breaks a rule.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PriceFileError(f"{path}: {error}") from error
    rows = content.get("price")
    if set(content) != {"price"} or not isinstance(rows, list):
        raise PriceFileError(f"{path}: must hold [[price]] tables and nothing else")
    prices: list[Price] = []
    for number, row in enumerate(rows, start=1):
        try:
            prices.append(_price(row))
        except (InvalidRequest, ValueError, TypeError) as error:
            raise PriceFileError(f"{path}: price {number}: {error}") from error
    names = [place_of(price) for price in prices]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PriceFileError(f"{path}: given twice: {sorted(twice)}")
    if not any(price.model == "default" and price.tier == _TIERS["standard"] for price in prices):
        raise PriceFileError(f"{path}: a standard price of model 'default' is missing")
    return prices


def _price(row: dict[str, Any]) -> Price:  # Any: TOML values, checked here
    if missing := [name for name in _REQUIRED if name not in row]:
        raise ValueError(f"lacks {', '.join(missing)}")
    if unknown := sorted(set(row) - {*_REQUIRED, *_OPTIONAL}):
        raise ValueError(f"unknown: {', '.join(unknown)}")
    for name, value in row.items():
        wanted = str if name in ("model", "tier") else int
        if type(value) is not wanted:
            raise ValueError(f"{name} must be a whole {wanted.__name__}, not {value!r}")
    tier = row.get("tier", "standard")
    if tier not in _TIERS:
        raise ValueError(f"tier must be one of {', '.join(_TIERS)}")
    price = Price(**{**row, "tier": PriceTier.ValueType(_TIERS[tier])})
    check_price(price)
    return price

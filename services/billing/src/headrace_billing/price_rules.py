"""Rules of price rows, without storage."""

from __future__ import annotations

from headrace_billing.key_rules import MAX_UNIX_S, is_clean_text
from headrace_billing.prices import MAX_NANO_USD_PER_TOKEN
from headrace_common.errors import InvalidRequest
from headrace_common.price_rows import standard_tier
from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.usage.v1 import usage_pb2

MINUTES_PER_DAY = 1440
_ALL_WEEKDAYS = 0b111_1111


def check_price(price: billing_pb2.Price) -> None:
    """Check a new price.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    if not price.model:
        raise InvalidRequest("model must name a model, or be 'default'.", param="price.model")
    if not is_clean_text(price.model, 128):
        raise InvalidRequest("model must be short and printable.", param="price.model")
    if price.tier not in usage_pb2.PriceTier.values():
        raise InvalidRequest("This price tier is not known.", param="price.tier")
    for name in ("effective_from_unix_s", "effective_to_unix_s"):
        if getattr(price, name) > MAX_UNIX_S:
            raise InvalidRequest(f"{name} lies after the year 9999.", param=f"price.{name}")
    _check_place(price)
    if 0 < price.effective_to_unix_s <= price.effective_from_unix_s:
        raise InvalidRequest(
            "effective_to_unix_s must be later than effective_from_unix_s.",
            param="price.effective_to_unix_s",
        )
    for name in ("input", "cached_input", "cache_write", "output"):
        if getattr(price, f"{name}_nano_usd") > MAX_NANO_USD_PER_TOKEN:
            raise InvalidRequest(
                f"{name}_nano_usd must not exceed {MAX_NANO_USD_PER_TOKEN} (1 USD per token).",
                param=f"price.{name}_nano_usd",
            )


def normalised_price(price: billing_pb2.Price, version: int) -> billing_pb2.Price:
    """Return a copy of *price* with its tier spelt out and the version that brings it."""
    result = billing_pb2.Price()
    result.CopyFrom(price)
    result.tier = usage_pb2.PriceTier.ValueType(standard_tier(price.tier))
    result.version = version
    return result


def place_of(price: billing_pb2.Price) -> tuple[str, int, int, int, int, int, int]:
    """Return what two rows of one version must not share."""
    return (
        price.model,
        standard_tier(price.tier),
        price.effective_from_unix_s,
        price.from_prompt_tokens,
        price.window_from_minute,
        price.window_to_minute,
        price.window_weekdays,
    )


def _check_place(price: billing_pb2.Price) -> None:
    for name in ("window_from_minute", "window_to_minute"):
        if getattr(price, name) > MINUTES_PER_DAY:
            raise InvalidRequest(
                f"{name} must not exceed {MINUTES_PER_DAY}.", param=f"price.{name}"
            )
    if price.window_from_minute and price.window_from_minute == price.window_to_minute:
        raise InvalidRequest("The window of the day is empty.", param="price.window_to_minute")
    if price.window_weekdays > _ALL_WEEKDAYS:
        raise InvalidRequest(
            f"window_weekdays must not exceed {_ALL_WEEKDAYS}.", param="price.window_weekdays"
        )

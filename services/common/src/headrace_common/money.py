"""Money as whole nano-USD. No floats, no rounding before an invoice line.

1 USD = 10**9 nano-USD, and a price of 1 USD per million tokens is 1,000 nano-USD per token, so even
0.003 USD per million (3 nano-USD) stays exact.
"""

from __future__ import annotations

from decimal import Context, Decimal, InvalidOperation, localcontext

NANO_PER_USD = 1_000_000_000
# Before the point: more than any currency's, and few enough for whole numbers to stay cheap.
_MAX_DIGITS = 20


def nano_usd_from_text(text: str) -> int:
    """Parse a decimal USD amount such as ``"12.50"`` exactly.

    Raises:
        ValueError: not a number, negative, or finer than one nano-USD.
    """
    try:
        amount = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"not an amount in USD: {text!r}") from error
    if not amount.is_finite():
        raise ValueError(f"not an amount in USD: {text!r}")
    if amount.adjusted() >= _MAX_DIGITS:
        raise ValueError(f"no such sum of money: {text[:40]!r}")
    with localcontext(Context(prec=len(text) + 2 * _MAX_DIGITS)):
        nano = amount * NANO_PER_USD
    if nano < 0 or nano != nano.to_integral_value():
        raise ValueError(f"an amount in USD must be >= 0 and whole in nano-USD: {text!r}")
    return int(nano)


def usd_text(nano_usd: int) -> str:
    """Render nano-USD as a plain decimal USD amount without loss, at least two digits long."""
    sign, nano = ("-", -nano_usd) if nano_usd < 0 else ("", nano_usd)
    whole, fraction = divmod(nano, NANO_PER_USD)
    digits = f"{fraction:09d}".rstrip("0").ljust(2, "0")
    return f"{sign}{whole}.{digits}"

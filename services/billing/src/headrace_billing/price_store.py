"""The price table in SQL: rows are added, never changed."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, insert, select

from headrace_billing import schema
from headrace_billing.audit import Stamp, write_audit
from headrace_billing.price_rules import check_price, normalised_price
from headrace_billing.prices import PriceBook
from headrace_billing.revisions import bump_revision
from headrace_common.price_rows import PriceRow
from headrace_contracts.billing.v1.billing_pb2 import Price


def load_price_book(connection: Connection) -> PriceBook:
    """Read all prices."""
    columns = [column for column in schema.prices.c if column.name != "version"]
    query = select(*columns, schema.prices.c.version)
    rows = connection.execute(query.order_by("version", "model", "tier")).mappings()
    return PriceBook(PriceRow(**row) for row in rows)


def newest_version(connection: Connection) -> int:
    """Return the table's version; 0 = empty."""
    return connection.execute(select(func.max(schema.prices.c.version))).scalar() or 0


def seed_prices(connection: Connection, prices: Sequence[Price], by: Stamp) -> bool:
    """Fill an empty price table; False = it was not empty."""
    if newest_version(connection):
        return False
    revision = bump_revision(connection, also="prices")
    connection.execute(insert(schema.prices), [_row(normalised_price(it, 1)) for it in prices])
    write_audit(connection, by, "seed_prices", f"revision {revision}", f"{len(prices)} rows")
    return True


def add_price(connection: Connection, price: Price, by: Stamp) -> None:
    """Add a price under a new version of the table.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_price(price)
    # The revision's row lock makes writers take turns, so that versions are unique and in order.
    bump_revision(connection, also="prices")
    new = normalised_price(price, newest_version(connection) + 1)
    connection.execute(insert(schema.prices), [_row(new)])
    detail = ", ".join(f"{name} {value}" for name, value in _row(new).items())
    write_audit(connection, by, "set_price", price.model, detail)


def _row(price: Price) -> dict[str, str | int | bool]:
    return {column.name: getattr(price, column.name) for column in schema.prices.c}

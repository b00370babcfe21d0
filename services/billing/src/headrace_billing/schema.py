"""The tables, as the migrations leave them (a test compares the two).

Times are whole Unix seconds or microseconds, money is whole nano-USD, contracts are kept as their
own bytes. `APPEND_ONLY` tables take new rows only: triggers refuse anything else.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()
APPEND_ONLY = (
    "usage_events",
    "entries",
    "postings",
    "prices",
    "audit",
    "journal",
    "journal_postings",
    "invoices",
)
# SQLite numbers rows by itself only in a column of type INTEGER.
_RowId = BigInteger().with_variant(Integer, "sqlite")

# Counters that must survive: see key_store.
meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("cache_salt", LargeBinary, nullable=False),
    # ratelimit.v1.Limits as JSON.
    Column("limits", Text, nullable=False),
    Column("created_unix_s", BigInteger, nullable=False),
    Column("plan_id", Text, nullable=False, server_default=""),
    # billing.v1.Tenant as JSON, but for what has a column here.
    Column("record", Text, nullable=False, server_default="{}"),
)

plans = Table(
    "plans",
    metadata,
    Column("plan_id", Text, primary_key=True),
    # billing.v1.Plan as JSON.
    Column("record", Text, nullable=False),
    Column("created_unix_s", BigInteger, nullable=False),
)

projects = Table(
    "projects",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("project_id", Text, primary_key=True),
    Column("limits", Text, nullable=False),
    Column("created_unix_s", BigInteger, nullable=False),
    Column("name", Text, nullable=False, server_default=""),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("key_sha256", LargeBinary, nullable=False, unique=True),
    Column("tenant_id", Text, ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    Column("project_id", Text, nullable=False),
    # billing.v1.Key as JSON, but for what has a column here.
    Column("record", Text, nullable=False),
    Column("created_unix_s", BigInteger, nullable=False),
    Column("revoked_unix_s", BigInteger, nullable=False),
    Column("last_used_unix_s", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
    # The secret before the last rotation, and until when it opens the door.
    Column("old_key_sha256", LargeBinary, nullable=True, unique=True, index=True),
    Column("overlap_until_unix_s", BigInteger, nullable=False, server_default="0"),
)

prices = Table(
    "prices",
    metadata,
    Column("version", BigInteger, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("tier", Integer, primary_key=True),
    Column("effective_from_unix_s", BigInteger, primary_key=True),
    # Context tier, and window of the day: see prices.py.
    Column("from_prompt_tokens", BigInteger, primary_key=True),
    Column("window_from_minute", Integer, primary_key=True),
    Column("window_to_minute", Integer, primary_key=True),
    Column("window_weekdays", Integer, primary_key=True),
    Column("effective_to_unix_s", BigInteger, nullable=False),
    Column("input_nano_usd", BigInteger, nullable=False),
    Column("cached_input_nano_usd", BigInteger, nullable=False),
    Column("cache_write_nano_usd", BigInteger, nullable=False),
    Column("output_nano_usd", BigInteger, nullable=False),
    Column("withdrawn", Boolean, nullable=False),
)

# Who changed what.
audit = Table(
    "audit",
    metadata,
    Column("audit_id", _RowId, primary_key=True),
    Column("at_unix_s", BigInteger, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False),
    # "operator" for calls from inside the fleet, else the id of the admin's key.
    Column("actor", Text, nullable=False, server_default="operator"),
)

# Answers to writes that named an idempotency key, without secrets.
idempotent_writes = Table(
    "idempotent_writes",
    metadata,
    # SHA-256 over actor and idempotency key.
    Column("write_sha256", LargeBinary, primary_key=True),
    # SHA-256 over action and request: the same key for something else is refused.
    Column("request_sha256", LargeBinary, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Column("at_unix_s", BigInteger, nullable=False, index=True),
)

usage_events = Table(
    "usage_events",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("kind", Integer, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    # "log" or "sweeper".
    Column("source", Text, nullable=False),
    Column("amount_nano_usd", BigInteger, nullable=False),
    # usage.v1.UsageEvent as booked.
    Column("payload", LargeBinary, nullable=False),
    Index("usage_events_by_tenant", "tenant_id", "request_id"),
    Index("usage_events_by_key", "key_id", "request_id"),
)

# Derived: OPENED without CLOSED.
open_requests = Table(
    "open_requests",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("deadline_unix_us", BigInteger, nullable=False, index=True),
    Column("tenant_id", Text, nullable=False, index=True),
    Column("project_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("hold_nano_usd", BigInteger, nullable=False),
    Column("opened_unix_us", BigInteger, nullable=False),
)

# The primary key is the promise: one terminal entry per request.
entries = Table(
    "entries",
    metadata,
    Column("request_id", Text, primary_key=True),
    # "captured", "voided", or of a correction "corrected".
    Column("kind", Text, nullable=False),
    Column("amount_nano_usd", BigInteger, nullable=False),
)

postings = Table(
    "postings",
    metadata,
    Column("request_id", Text, ForeignKey("entries.request_id"), primary_key=True),
    Column("account", Text, primary_key=True),
    Column("amount_nano_usd", BigInteger, nullable=False),
)

# Derived: sum of postings by account.
balances = Table(
    "balances",
    metadata,
    Column("account", Text, primary_key=True),
    Column("amount_nano_usd", BigInteger, nullable=False),
)


def _usage_columns() -> list[Column[Any]]:  # Any: text and numbers
    """What daily sums are kept by (the key), and what is summed."""
    return [
        Column("tenant_id", Text, primary_key=True),
        # First second of the day, UTC, on which the request was admitted.
        Column("day_unix_s", BigInteger, primary_key=True),
        Column("project_id", Text, primary_key=True),
        Column("key_id", Text, primary_key=True),
        Column("model", Text, primary_key=True),
        Column("tier", Integer, primary_key=True),
        Column("num_requests", BigInteger, nullable=False),
        # Classes of tokens, disjoint.
        Column("input_tokens", BigInteger, nullable=False),
        Column("cached_input_tokens", BigInteger, nullable=False),
        Column("cache_write_tokens", BigInteger, nullable=False),
        Column("output_tokens", BigInteger, nullable=False),
        Column("input_nano_usd", BigInteger, nullable=False),
        Column("cached_input_nano_usd", BigInteger, nullable=False),
        Column("cache_write_nano_usd", BigInteger, nullable=False),
        Column("output_nano_usd", BigInteger, nullable=False),
    ]


# Derived: sums of closed requests.
daily_usage = Table("daily_usage", metadata, *_usage_columns())

# What invoices hold already, in the same terms: the difference is what the next one bills.
invoiced_usage = Table("invoiced_usage", metadata, *_usage_columns())

# Money that moves without a request: credits and corrections.
journal = Table(
    "journal",
    metadata,
    # "credit:<tenant>:<credit_id>".
    Column("journal_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False, index=True),
    # billing.v1.Credit.
    Column("payload", LargeBinary, nullable=False),
    Column("created_unix_s", BigInteger, nullable=False),
)

journal_postings = Table(
    "journal_postings",
    metadata,
    Column("journal_id", Text, ForeignKey("journal.journal_id"), primary_key=True),
    Column("account", Text, primary_key=True),
    Column("amount_nano_usd", BigInteger, nullable=False),
)

# Credits that have an end and have not reached it.
ending_credits = Table(
    "ending_credits",
    metadata,
    Column("journal_id", Text, ForeignKey("journal.journal_id"), primary_key=True),
    Column("expires_unix_s", BigInteger, nullable=False, index=True),
)

invoices = Table(
    "invoices",
    metadata,
    Column("invoice_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
    # The period, or "correction:<correction_id>": what makes issuing idempotent.
    Column("slot", Text, nullable=False),
    # Of a credit note, else empty.
    Column("corrects_invoice_id", Text, nullable=False, index=True),
    # billing.v1.Invoice.
    Column("payload", LargeBinary, nullable=False),
    UniqueConstraint("tenant_id", "number"),
    UniqueConstraint("tenant_id", "slot"),
)

# Closed requests on their way to a metering service; 0 = not acknowledged yet.
exports = Table(
    "exports",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("exported_unix_s", BigInteger, nullable=False, index=True),
)

worker_usage = Table(
    "worker_usage",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("worker_id", Text, primary_key=True),
    Column("incarnation", BigInteger, primary_key=True),
    # usage.v1.WorkerUsage.
    Column("payload", LargeBinary, nullable=False),
)

# Where the consumer stands; last_sha256 is of the message before, to notice a log that began anew.
log_positions = Table(
    "log_positions",
    metadata,
    Column("topic", Text, primary_key=True),
    Column("partition", Integer, primary_key=True),
    Column("next_offset", BigInteger, nullable=False),
    Column("last_sha256", LargeBinary, nullable=False),
)

# Processes that read the log, and which partitions are whose. The epoch grows with each new owner;
# a batch is booked only under the newest (shares.py).
consumers = Table(
    "consumers",
    metadata,
    Column("consumer_id", Text, primary_key=True),
    Column("seen_unix_us", BigInteger, nullable=False),
)

partition_leases = Table(
    "partition_leases",
    metadata,
    Column("topic", Text, primary_key=True),
    Column("partition", Integer, primary_key=True),
    # Empty = free.
    Column("consumer_id", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_unix_us", BigInteger, nullable=False),
    # Since when nothing unread has been in it; 0 = something is, or unknown.
    Column("caught_up_unix_us", BigInteger, nullable=False),
)

# What can never be booked, for a person to look at. Each text once, however often it is delivered.
dead_letters = Table(
    "dead_letters",
    metadata,
    Column("dead_letter_id", _RowId, primary_key=True),
    Column("payload_sha256", LargeBinary, nullable=False, unique=True),
    Column("topic", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("log_offset", BigInteger, nullable=False),
    # As far as it could be read; empty and 0 otherwise.
    Column("request_id", Text, nullable=False, index=True),
    Column("kind", Integer, nullable=False),
    Column("error", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("at_unix_s", BigInteger, nullable=False),
)

# Differences that were found while booking, for a person to look at.
reconciliation = Table(
    "reconciliation",
    metadata,
    Column("request_id", Text, primary_key=True),
    # "late_close", "conflicting_duplicate" or "amount_mismatch".
    Column("finding", Text, primary_key=True),
    Column("detail", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("at_unix_s", BigInteger, nullable=False),
)

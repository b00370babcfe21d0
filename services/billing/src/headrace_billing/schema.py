"""The tables, as the migrations leave them (a test compares the two).

Times are whole Unix seconds or microseconds, money is whole nano-USD, contracts are kept as their
own bytes. `usage_events`, `entries`, `postings` and `prices` are append-only: triggers refuse
anything else.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

metadata = MetaData()
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
)

projects = Table(
    "projects",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("project_id", Text, primary_key=True),
    Column("limits", Text, nullable=False),
    Column("created_unix_s", BigInteger, nullable=False),
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
)

prices = Table(
    "prices",
    metadata,
    Column("version", BigInteger, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("tier", Integer, primary_key=True),
    Column("effective_from_unix_s", BigInteger, primary_key=True),
    Column("effective_to_unix_s", BigInteger, nullable=False),
    Column("input_nano_usd", BigInteger, nullable=False),
    Column("cached_input_nano_usd", BigInteger, nullable=False),
    Column("cache_write_nano_usd", BigInteger, nullable=False),
    Column("output_nano_usd", BigInteger, nullable=False),
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
)

# The primary key is the promise: one terminal entry per request.
entries = Table(
    "entries",
    metadata,
    Column("request_id", Text, primary_key=True),
    # "captured" or "voided".
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

# Differences that were found while booking and do not change the books.
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

"""Tenants, keys, prices and the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_APPEND_ONLY = ("usage_events", "entries", "postings", "prices")
_ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _create_admin_tables()
    _create_ledger_tables()
    _create_log_tables()
    for table in _APPEND_ONLY:
        _refuse_changes(table)


def _create_admin_tables() -> None:
    meta = op.create_table(
        "meta",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(meta, [{"name": "revision", "value": 1}, {"name": "prices", "value": 0}])
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("cache_salt", sa.LargeBinary, nullable=False),
        sa.Column("limits", sa.Text, nullable=False),
        sa.Column("created_unix_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "projects",
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.tenant_id"), primary_key=True),
        sa.Column("project_id", sa.Text, primary_key=True),
        sa.Column("limits", sa.Text, nullable=False),
        sa.Column("created_unix_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("key_sha256", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.tenant_id"), nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("created_unix_s", sa.BigInteger, nullable=False),
        sa.Column("revoked_unix_s", sa.BigInteger, nullable=False),
        sa.Column("last_used_unix_s", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_index("ix_api_keys_revision", "api_keys", ["revision"])
    op.create_table(
        "prices",
        sa.Column("version", sa.BigInteger, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("tier", sa.Integer, primary_key=True),
        sa.Column("effective_from_unix_s", sa.BigInteger, primary_key=True),
        sa.Column("effective_to_unix_s", sa.BigInteger, nullable=False),
        sa.Column("input_nano_usd", sa.BigInteger, nullable=False),
        sa.Column("cached_input_nano_usd", sa.BigInteger, nullable=False),
        sa.Column("cache_write_nano_usd", sa.BigInteger, nullable=False),
        sa.Column("output_nano_usd", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("audit_id", _ROW_ID, primary_key=True),
        sa.Column("at_unix_s", sa.BigInteger, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )


def _create_ledger_tables() -> None:
    op.create_table(
        "usage_events",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("kind", sa.Integer, primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
    op.create_index("usage_events_by_tenant", "usage_events", ["tenant_id", "request_id"])
    op.create_index("usage_events_by_key", "usage_events", ["key_id", "request_id"])
    op.create_table(
        "open_requests",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("deadline_unix_us", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_open_requests_deadline_unix_us", "open_requests", ["deadline_unix_us"])
    op.create_table(
        "entries",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "postings",
        sa.Column("request_id", sa.Text, sa.ForeignKey("entries.request_id"), primary_key=True),
        sa.Column("account", sa.Text, primary_key=True),
        sa.Column("amount_nano_usd", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "balances",
        sa.Column("account", sa.Text, primary_key=True),
        sa.Column("amount_nano_usd", sa.BigInteger, nullable=False),
    )


def _create_log_tables() -> None:
    op.create_table(
        "worker_usage",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("worker_id", sa.Text, primary_key=True),
        sa.Column("incarnation", sa.BigInteger, primary_key=True),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "log_positions",
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("last_sha256", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "dead_letters",
        sa.Column("dead_letter_id", _ROW_ID, primary_key=True),
        sa.Column("payload_sha256", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Integer, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("at_unix_s", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_dead_letters_request_id", "dead_letters", ["request_id"])
    op.create_table(
        "reconciliation",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("finding", sa.Text, primary_key=True),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("at_unix_s", sa.BigInteger, nullable=False),
    )


def _refuse_changes(table: str) -> None:
    if op.get_context().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_refuses_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        return
    op.execute(
        f"CREATE FUNCTION {table}_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{table} is append-only'; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_refuses_change BEFORE UPDATE OR DELETE ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION {table}_is_append_only()"
    )

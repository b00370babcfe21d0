"""Plans, invoices, daily sums, shared consuming; more about keys, prices and open requests."""

import sqlalchemy as sa
from alembic import op

from headrace_billing.backfill import fill_derived_tables
from headrace_billing.prices import PriceBook
from headrace_common.price_rows import PriceRow

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_CLASSES = ("input", "cached_input", "cache_write", "output")
_SUMS = (
    "num_requests",
    *(f"{name}_tokens" for name in _CLASSES),
    *(f"{name}_nano_usd" for name in _CLASSES),
)


def upgrade() -> None:
    _add_columns()
    _widen_prices()
    op.drop_table("open_requests")
    _create_admin_tables()
    _create_money_tables()
    _create_log_tables()
    daily_usage, open_requests = _create_derived_tables()
    connection = op.get_bind()
    prices = PriceBook(
        PriceRow(**row) for row in connection.execute(sa.text("SELECT * FROM prices")).mappings()
    )
    fill_derived_tables(connection, prices, daily_usage, open_requests)
    for table in ("prices", "audit", "journal", "journal_postings", "invoices"):
        _refuse_changes(table)


def _create_admin_tables() -> None:
    op.create_table(
        "plans",
        sa.Column("plan_id", sa.Text, primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("created_unix_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "idempotent_writes",
        sa.Column("write_sha256", sa.LargeBinary, primary_key=True),
        sa.Column("request_sha256", sa.LargeBinary, nullable=False),
        sa.Column("answer", sa.LargeBinary, nullable=False),
        sa.Column("at_unix_s", sa.BigInteger, nullable=False),
    )


def _create_money_tables() -> None:
    op.create_table(
        "journal",
        sa.Column("journal_id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("created_unix_s", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_journal_tenant_id", "journal", ["tenant_id"])
    op.create_table(
        "journal_postings",
        sa.Column("journal_id", sa.Text, sa.ForeignKey("journal.journal_id"), primary_key=True),
        sa.Column("account", sa.Text, primary_key=True),
        sa.Column("amount_nano_usd", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "invoices",
        sa.Column("invoice_id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("slot", sa.Text, nullable=False),
        sa.Column("corrects_invoice_id", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("tenant_id", "number"),
        sa.UniqueConstraint("tenant_id", "slot"),
    )
    op.create_index("ix_invoices_corrects_invoice_id", "invoices", ["corrects_invoice_id"])


def _create_log_tables() -> None:
    op.create_table(
        "exports",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("exported_unix_s", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_exports_exported_unix_s", "exports", ["exported_unix_s"])
    op.create_table(
        "consumers",
        sa.Column("consumer_id", sa.Text, primary_key=True),
        sa.Column("seen_unix_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "partition_leases",
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True),
        sa.Column("consumer_id", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("expires_unix_us", sa.BigInteger, nullable=False),
        sa.Column("caught_up_unix_us", sa.BigInteger, nullable=False),
    )


def _create_derived_tables() -> tuple[sa.Table, sa.Table]:
    daily_usage, _ = (
        op.create_table(
            name,
            sa.Column("tenant_id", sa.Text, primary_key=True),
            sa.Column("day_unix_s", sa.BigInteger, primary_key=True),
            sa.Column("project_id", sa.Text, primary_key=True),
            sa.Column("key_id", sa.Text, primary_key=True),
            sa.Column("model", sa.Text, primary_key=True),
            sa.Column("tier", sa.Integer, primary_key=True),
            *(sa.Column(it, sa.BigInteger, nullable=False) for it in _SUMS),
        )
        for name in ("daily_usage", "invoiced_usage")
    )
    open_requests = op.create_table(
        "open_requests",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("deadline_unix_us", sa.BigInteger, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("hold_nano_usd", sa.BigInteger, nullable=False),
        sa.Column("opened_unix_us", sa.BigInteger, nullable=False),
    )
    for name in ("deadline_unix_us", "tenant_id"):
        op.create_index(f"ix_open_requests_{name}", "open_requests", [name])
    return daily_usage, open_requests


def _add_columns() -> None:
    for table, name, default in (
        ("tenants", "plan_id", ""),
        ("tenants", "record", "{}"),
        ("projects", "name", ""),
        ("audit", "actor", "operator"),
    ):
        op.add_column(table, sa.Column(name, sa.Text, nullable=False, server_default=default))
    op.add_column("api_keys", sa.Column("old_key_sha256", sa.LargeBinary, nullable=True))
    op.create_index("ix_api_keys_old_key_sha256", "api_keys", ["old_key_sha256"], unique=True)
    op.add_column(
        "api_keys",
        sa.Column("overlap_until_unix_s", sa.BigInteger, nullable=False, server_default="0"),
    )


def _widen_prices() -> None:
    """A row's name is longer now, which neither database lets a table learn in place alike."""
    connection = op.get_bind()
    op.rename_table("prices", "prices_before")
    if connection.dialect.name == "postgresql":
        op.execute("ALTER INDEX prices_pkey RENAME TO prices_before_pkey")
    op.create_table(
        "prices",
        sa.Column("version", sa.BigInteger, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("tier", sa.Integer, primary_key=True),
        sa.Column("effective_from_unix_s", sa.BigInteger, primary_key=True),
        sa.Column("from_prompt_tokens", sa.BigInteger, primary_key=True),
        sa.Column("window_from_minute", sa.Integer, primary_key=True),
        sa.Column("window_to_minute", sa.Integer, primary_key=True),
        sa.Column("window_weekdays", sa.Integer, primary_key=True),
        sa.Column("effective_to_unix_s", sa.BigInteger, nullable=False),
        *(sa.Column(f"{it}_nano_usd", sa.BigInteger, nullable=False) for it in _CLASSES),
        sa.Column("withdrawn", sa.Boolean, nullable=False),
    )
    op.execute(
        "INSERT INTO prices (version, model, tier, effective_from_unix_s, effective_to_unix_s, "
        "input_nano_usd, cached_input_nano_usd, cache_write_nano_usd, output_nano_usd, "
        "from_prompt_tokens, window_from_minute, window_to_minute, window_weekdays, withdrawn) "
        "SELECT version, model, tier, effective_from_unix_s, effective_to_unix_s, "
        "input_nano_usd, cached_input_nano_usd, cache_write_nano_usd, output_nano_usd, "
        "0, 0, 0, 0, false FROM prices_before"
    )
    op.drop_table("prices_before")


def _refuse_changes(table: str) -> None:
    if op.get_context().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_refuses_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        return
    op.execute(
        f"CREATE OR REPLACE FUNCTION {table}_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{table} is append-only'; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_refuses_change BEFORE UPDATE OR DELETE ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION {table}_is_append_only()"
    )

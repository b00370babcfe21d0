"""Append-only tables cannot be emptied either: TRUNCATE asks no trigger of rows."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_APPEND_ONLY = (
    "usage_events",
    "entries",
    "postings",
    "prices",
    "audit",
    "journal",
    "journal_postings",
    "invoices",
)


def upgrade() -> None:
    # SQLite has no such statement.
    if op.get_context().dialect.name == "postgresql":
        for table in _APPEND_ONLY:
            op.execute(
                f"CREATE TRIGGER {table}_refuses_truncate BEFORE TRUNCATE ON {table} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_is_append_only()"
            )

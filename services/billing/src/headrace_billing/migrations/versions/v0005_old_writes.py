"""Answers to repeated writes are found by age, to be deleted."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_idempotent_writes_at_unix_s", "idempotent_writes", ["at_unix_s"])

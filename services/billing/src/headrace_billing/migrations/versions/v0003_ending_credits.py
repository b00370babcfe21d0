"""Credits that end."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ending_credits",
        sa.Column("journal_id", sa.Text, sa.ForeignKey("journal.journal_id"), primary_key=True),
        sa.Column("expires_unix_s", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_ending_credits_expires_unix_s", "ending_credits", ["expires_unix_s"])

"""The tables, as `migrations` leaves them (a test compares the two).

Every row belongs to a tenant and a project; whoever asks for another's row is told that there is
none. Times are whole Unix seconds. All names begin with `gw_`, so that the tables may share a
PostgreSQL database with others.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, Table, Text

metadata = MetaData()

meta = Table(
    "gw_meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

responses = Table(
    "gw_responses",
    metadata,
    Column("response_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    # Empty = a conversation begins here.
    Column("previous_id", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    # The public object, JSON; and the items that were given for it.
    Column("body", LargeBinary, nullable=False),
    Column("input_items", LargeBinary, nullable=False),
    # 0 = finished; else somebody works on it and renews this until then.
    Column("lease_until_s", BigInteger, nullable=False),
    Column("cancel_wanted", Integer, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False, index=True),
    # How often it was begun, so that a process that another has overtaken changes nothing.
    Column("attempt", Integer, nullable=False, server_default="1"),
)

# What is asked for by responses that nobody waits for, while they are not finished.
response_work = Table(
    "gw_response_work",
    metadata,
    Column("response_id", Text, primary_key=True),
    Column("key_id", Text, nullable=False),
    # The body as it was sent.
    Column("request", LargeBinary, nullable=False),
    Column("expires_s", BigInteger, nullable=False, index=True),
)

response_events = Table(
    "gw_response_events",
    metadata,
    Column("response_id", Text, primary_key=True),
    # The number of the first event in this piece.
    Column("first_number", Integer, primary_key=True),
    Column("events", LargeBinary, nullable=False),
    Column("expires_s", BigInteger, nullable=False, index=True),
)

files = Table(
    "gw_files",
    metadata,
    Column("file_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False, index=True),
    Index("gw_files_by_project", "tenant_id", "project_id", "file_id"),
)

file_chunks = Table(
    "gw_file_chunks",
    metadata,
    Column("file_id", Text, primary_key=True),
    Column("chunk_idx", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

# Their parts are files that nobody sees.
uploads = Table(
    "gw_uploads",
    metadata,
    Column("upload_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    # pending, completed or cancelled.
    Column("status", Text, nullable=False),
    # The public object, JSON, without status.
    Column("body", LargeBinary, nullable=False),
    Column("expires_s", BigInteger, nullable=False, index=True),
    Index("gw_uploads_by_project", "tenant_id", "project_id", "status"),
)

batches = Table(
    "gw_batches",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    # SHA-256 of the key that made it, of those made before they had the next.
    Column("key_sha256", LargeBinary, nullable=False),
    Column("status", Text, nullable=False),
    # The public object, JSON, without status and counts.
    Column("body", LargeBinary, nullable=False),
    Column("lease_owner", Text, nullable=False),
    Column("lease_until_s", BigInteger, nullable=False),
    Column("deadline_s", BigInteger, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False, index=True),
    # The key that made it: its limits and policy hold for every line.
    Column("key_id", Text, nullable=False, server_default=""),
    Index("gw_batches_by_project", "tenant_id", "project_id", "batch_id"),
    Index("gw_batches_by_status", "status", "created_s"),
)

batch_lines = Table(
    "gw_batch_lines",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("line_no", Integer, primary_key=True),
    Column("custom_id", Text, nullable=False),
    # Drawn when the line is read and kept over every try, so that the ledger books it once.
    Column("request_id", Text, nullable=False),
    # pending, succeeded or failed, which is also what was never answered.
    Column("state", Text, nullable=False),
    # What is asked, JSON; empty once the line is over.
    Column("request", LargeBinary, nullable=False),
    # One line of the output or error file, without its line end.
    Column("result", LargeBinary, nullable=False),
    Index("gw_batch_lines_by_state", "batch_id", "state", "line_no"),
)

idempotency = Table(
    "gw_idempotency",
    metadata,
    # SHA-256 over API key id, path and the client's key.
    Column("record_id", LargeBinary, primary_key=True),
    Column("body_sha256", LargeBinary, nullable=False),
    Column("request_id", Text, nullable=False),
    # 0 = the answer is complete.
    Column("lease_until_s", BigInteger, nullable=False),
    # Id that the request had whose process answers: another one than request_id after a takeover.
    Column("owner", Text, nullable=False, server_default=""),
    Column("status", Integer, nullable=False),
    # JSON pairs.
    Column("headers", LargeBinary, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Column("expires_s", BigInteger, nullable=False, index=True),
)

stories = Table(
    "gw_stories",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    Column("story", LargeBinary, nullable=False),
    Column("expires_s", BigInteger, nullable=False, index=True),
)

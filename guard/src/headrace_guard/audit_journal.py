"""The audit on disk: one SQLite file per guard. It survives restarts, and Kafka gets it from here.

All calls come from one thread at a time (the audit's own). A guard and its successor may write to
one file for a while: where the chain ends stands in the file only. Records that Kafka has taken, or
that nobody publishes, may be forgotten once there are too many; the chain goes on from the last
hash all the same.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from google.protobuf.message import DecodeError

from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.audit_chain import problems, root, seal

_SCHEMA = """
CREATE TABLE IF NOT EXISTS chain (
    chain_id TEXT NOT NULL, span_key BLOB NOT NULL, seq INTEGER NOT NULL, hash BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY, request_id TEXT NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_by_request ON records (request_id);
CREATE TABLE IF NOT EXISTS published (seq INTEGER NOT NULL);
"""


class AuditJournal:
    """Appends, finds and recounts records.

    Args:
        path: SQLite file, made if it is not there; None = in memory, for as long as the process.
        max_records: beyond these the oldest are forgotten, once they are published.
        is_published: whether anybody publishes them; if not, none are kept for that.
    """

    def __init__(self, path: Path | None, max_records: int, *, is_published: bool = True) -> None:
        self._max_records, self._is_published = max_records, is_published
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path or ":memory:", check_same_thread=False)
        if path is not None:
            path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        # The span key is for the keyed hash of what was found.
        self.chain_id, self.span_key = self._identity()

    def append(self, records: Sequence[pb.AuditRecord]) -> None:
        """Give records their places in the chain and keep them, all or none."""
        rows: list[tuple[int, str, bytes]] = []
        with self._writing():
            seq, last = self._end()
            for record in records:
                seq += 1
                last = seal(record, self.chain_id, seq, last)
                rows.append((seq, record.request_id, record.SerializeToString(deterministic=True)))
            self._db.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
            self._db.execute("UPDATE chain SET seq = ?, hash = ?", (seq, last))
            if not self._is_published:
                self._forget(seq)

    def find(self, request_id: str) -> list[pb.AuditRecord]:
        """Return all records of a request, oldest first."""
        query = "SELECT record FROM records WHERE request_id = ? ORDER BY seq"
        with closing(self._db.execute(query, (request_id,))) as rows:
            return [pb.AuditRecord.FromString(row[0]) for row in rows]

    def unpublished(self, limit: int) -> list[pb.AuditRecord]:
        """Return the oldest records that Kafka has not taken."""
        query = "SELECT record FROM records WHERE seq > ? ORDER BY seq LIMIT ?"
        with closing(self._db.execute(query, (self.published_seq(), limit))) as rows:
            return [pb.AuditRecord.FromString(row[0]) for row in rows]

    def published_seq(self) -> int:
        """Return the number of the last record that Kafka has taken; 0 = none."""
        with closing(self._db.execute("SELECT seq FROM published")) as rows:
            return int(rows.fetchone()[0])

    def mark_published(self, seq: int) -> None:
        """Remember that Kafka has taken everything up to *seq*; forget what is too old."""
        with self._writing():
            self._db.execute("UPDATE published SET seq = max(seq, ?)", (seq,))
            self._forget(seq)

    def _forget(self, up_to: int) -> None:
        oldest = self._end()[0] - self._max_records
        self._db.execute("DELETE FROM records WHERE seq <= ?", (min(up_to, oldest),))

    def verify(self) -> tuple[int, list[str]]:
        """Recount the chain; return how many records there are and what is wrong."""
        try:
            with self._db:
                # One moment of the file, though somebody else may write on.
                self._db.execute("BEGIN")
                return self._verify()
        except (DecodeError, sqlite3.Error) as error:
            return 0, [f"a record cannot be read: {error}"]

    def _verify(self) -> tuple[int, list[str]]:
        first = next(self._all(1), None)
        if first is None:
            return 0, []
        before = root(self.chain_id) if first.seq == 1 else first.prev_hash
        count, found = problems(self._all(), self.chain_id, first.seq, before)
        num_written, _ = self._end()
        if not found and first.seq + count - 1 != num_written:
            found = [f"the last record is {first.seq + count - 1}, {num_written} were written"]
        return count, found

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _all(self, limit: int = -1) -> Iterator[pb.AuditRecord]:
        query = "SELECT record FROM records ORDER BY seq LIMIT ?"
        with closing(self._db.execute(query, (limit,))) as rows:
            for row in rows:
                yield pb.AuditRecord.FromString(row[0])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the file for one change, all or none."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def _end(self) -> tuple[int, bytes]:
        """Return number and hash of the last record."""
        with closing(self._db.execute("SELECT seq, hash FROM chain")) as rows:
            end: tuple[int, bytes] = rows.fetchone()
        return end

    def _identity(self) -> tuple[str, bytes]:
        with self._writing():
            with closing(self._db.execute("SELECT chain_id, span_key FROM chain")) as rows:
                found: tuple[str, bytes] | None = rows.fetchone()
            if found is None:
                found = (secrets.token_hex(8), secrets.token_bytes(32))
                values = (*found, 0, root(found[0]))
                self._db.execute("INSERT INTO chain VALUES (?, ?, ?, ?)", values)
                self._db.execute("INSERT INTO published VALUES (0)")
        return found

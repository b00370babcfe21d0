"""The chain that ties audit records together: nothing in the middle can be changed or taken out.

hash(n) = BLAKE2b-256(hash(n-1) + record(n) without its hash), hash(0) = BLAKE2b-256(chain id)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from headrace_contracts.guard.v1 import guard_pb2 as pb

_MAX_PROBLEMS = 20


def root(chain_id: str) -> bytes:
    """Return what stands before the first record of a chain."""
    return hashlib.blake2b(chain_id.encode(), digest_size=32).digest()


def seal(record: pb.AuditRecord, chain_id: str, seq: int, prev_hash: bytes) -> bytes:
    """Give a record its place in the chain; return its hash."""
    record.chain_id, record.seq, record.prev_hash = chain_id, seq, prev_hash
    record.hash = _hash(record)
    return record.hash


def problems(
    records: Iterable[pb.AuditRecord], chain_id: str, seq: int, prev_hash: bytes
) -> tuple[int, list[str]]:
    """Recount records in order.

    Args:
        records: all from *seq* on.
        chain_id: the chain that they are said to be of.
        seq: expected number of the first one.
        prev_hash: hash of the one before it.

    Returns:
        How many there are, and what is wrong.
    """
    found: list[str] = []
    count = 0
    for record in records:
        count += 1
        if record.chain_id != chain_id or record.seq != seq:
            found.append(f"record {record.seq} stands where {seq} is expected")
            seq = record.seq
        elif record.prev_hash != prev_hash:
            found.append(f"record {seq} does not follow the one before it")
        if record.hash != _hash(record):
            found.append(f"record {seq} was changed")
        seq, prev_hash = seq + 1, record.hash
        if len(found) >= _MAX_PROBLEMS:
            break
    return count, found


def _hash(record: pb.AuditRecord) -> bytes:
    bare = pb.AuditRecord()
    bare.CopyFrom(record)
    bare.ClearField("hash")
    data = bare.SerializeToString(deterministic=True)
    return hashlib.blake2b(record.prev_hash + data, digest_size=32).digest()

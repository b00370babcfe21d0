"""Pure: a stable preference of a session for a replica, without any memory.

Rendezvous hashing (Thaler and Ravishankar, 1998): every router ranks the workers for a session
alike, and a worker that leaves moves only its own sessions. Inputs: session id. No parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from headrace_router.candidate import Candidate, Query

_MAX = 2**64 - 1


def score(query: Query, candidates: Sequence[Candidate]) -> list[float]:
    """Rate each candidate by a hash of session and worker; without a session all are 0."""
    if not query.session_id:
        return [0.0] * len(candidates)
    return [rendezvous_weight(query.session_id, one.key.worker_id) for one in candidates]


def rendezvous_weight(name: str, worker_id: str) -> float:
    """Return how much *name* belongs to a worker, from 0 to 1; the highest one is its home."""
    text = f"{len(name)}:{name}{worker_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / _MAX

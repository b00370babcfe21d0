"""Typed identities and how they are drawn.

Request ids sort by time (a ULID: 48 bits of milliseconds, 80 random bits; github.com/ulid/spec),
which keeps ledger indexes append-mostly.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import NewType

from headrace_common.clock import Clock

RequestId = NewType("RequestId", str)

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
# Two characters at a time.
_PAIRS = [high + low for high in _CROCKFORD for low in _CROCKFORD]
# Not the point: tries of a batch's line have ids with one, and are requests of their own.
_JOB = "#"
_SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\Z")


def ulid(clock: Clock) -> str:
    """Return a fresh 26-character ULID."""
    return _ulid(int(clock.unix_s() * 1000), int.from_bytes(os.urandom(10), "big"))


def _ulid(unix_ms: int, low_bits: int) -> str:
    pairs = _PAIRS
    return (
        _time_text(unix_ms)
        + pairs[low_bits >> 70]
        + pairs[low_bits >> 60 & 1023]
        + pairs[low_bits >> 50 & 1023]
        + pairs[low_bits >> 40 & 1023]
        + pairs[low_bits >> 30 & 1023]
        + pairs[low_bits >> 20 & 1023]
        + pairs[low_bits >> 10 & 1023]
        + pairs[low_bits & 1023]
    )


@lru_cache(maxsize=16)
def _time_text(unix_ms: int) -> str:
    return "".join([_PAIRS[(unix_ms >> shift) & 1023] for shift in (40, 30, 20, 10, 0)])


def new_request_id(clock: Clock) -> RequestId:
    """Return a fresh request id, `req_` and a ULID."""
    return RequestId("req_" + ulid(clock))


def job_id(request_id: str, idx: int) -> str:
    """Return the id under which one of several prompts of a request goes to router and workers."""
    return f"{request_id}{_JOB}{idx}"


def request_of(told_id: str) -> str:
    """Return the request's id out of the one that a router or worker was told."""
    return told_id.partition(_JOB)[0]


def jobs_prefix(request_id: str) -> str:
    """Return what the ids of a request's several prompts begin with."""
    return request_id + _JOB


def first_request_id(unix_us: int) -> RequestId:
    """Return the smallest id of requests that came in at or after *unix_us* (to a millisecond)."""
    return RequestId("req_" + _ulid(-(-unix_us // 1000), 0))


def new_incarnation(clock: Clock) -> int:
    """Return a number that grows with each start of a process, in milliseconds of wall time."""
    return int(clock.unix_s() * 1000)


def is_slug(text: str) -> bool:
    """Tell whether *text* may name a tenant or project: a-z 0-9 _ -, 1 to 64 characters."""
    return _SLUG.match(text) is not None

"""Operations that were sent together, and what their replies mean."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import hiredis

from headrace_common.errors import HeadraceError, Internal
from headrace_ratelimit.store import Op, Reply, unpacked

_log = logging.getLogger(__name__)

# Where the function failed, as Redis and Valkey say it.
_FAILURE = re.compile(r"user_function|@user_script|script: ")

OnReply = Callable[[Reply | HeadraceError], None]


class Waiting(NamedTuple):
    """An operation and what its caller left."""

    op: Op
    on_reply: OnReply
    must_run: bool


class Batch:
    """Operations that were sent together."""

    def __init__(self, waiting: list[Waiting], started_s: float) -> None:
        self.waiting, self.started_s = waiting, started_s
        # By tenant, as positions in `waiting`: each is one call.
        self.groups = by_tenant([it.op for it in waiting])
        self.timer: asyncio.TimerHandle | None = None
        self.stalls = 0
        self.is_second_try = False


def by_tenant(ops: Sequence[Op]) -> list[list[int]]:
    """Group operations, as positions: those of one tenant are one call."""
    groups: dict[str, list[int]] = {}
    for idx, op in enumerate(ops):
        groups.setdefault(op.tenant_id, []).append(idx)
    return list(groups.values())


def spread(
    groups: list[list[int]], results: list[Reply]
) -> Iterator[tuple[int, Reply | HeadraceError]]:
    """Give each operation its part of its call's result; a failed call's are `Internal`.

    Raises:
        ConnectionError: the server cannot serve.
    """
    for group, result in zip(groups, results, strict=True):
        if isinstance(result, hiredis.ReplyError):
            if not is_not_loaded(result):
                _check_is_script_failure(result)
                _log.error("the function failed: %s", result)
            result = [Internal() for _ in group]
        for idx, reply in zip(group, result, strict=True):
            yield idx, unpacked(reply)


def is_not_loaded(reply: Reply) -> bool:
    """Whether Redis lacks the library."""
    return isinstance(reply, hiredis.ReplyError) and "Function not found" in str(reply)


def check_loaded(reply: Reply) -> None:
    """Raise unless a library was loaded.

    Raises:
        ConnectionError: the server does not take it.
    """
    if isinstance(reply, hiredis.ReplyError):
        raise ConnectionError(f"Redis does not take the library: {reply}")


def _check_is_script_failure(error: hiredis.ReplyError) -> None:
    """Pass a bug of ours or bad data; raise for a server that is loading, read-only or full.

    Raises:
        ConnectionError: the server cannot serve.
    """
    if not _FAILURE.search(str(error)):
        raise ConnectionError(str(error))

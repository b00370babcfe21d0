"""Each filter alone: what it forbids and under which name."""

from __future__ import annotations

import pytest

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import (
    POOL_ROLE_DECODE,
    POOL_ROLE_PREFILL,
    WORKER_STATE_DRAINING,
    WORKER_STATE_LOADING,
    WORKER_STATE_READY,
    WORKER_STATE_STUCK,
    LoadReport,
    WorkerState,
)
from headrace_router.filters import broken, excluded, fresh, reachable, role, room, state
from headrace_router.filters.unavailable import unavailable
from headrace_router.replicas import MAX_REPORT_AGE_S, Replica

KEY = ReplicaKey("w", 2)


@pytest.fixture
def replica() -> Replica:
    """One that nothing forbids."""
    return Replica("w:1", KEY, WORKER_STATE_READY, is_reachable=True, reported_at_s=10.0)


def test_nothing_forbids_a_good_one(replica: Replica) -> None:
    """An empty name."""
    assert unavailable(replica, 10.1) == ""


def test_a_broken_stream_forbids(replica: Replica) -> None:
    """Whatever the worker last said; it is named first."""
    replica.is_reachable, replica.state = False, WORKER_STATE_DRAINING
    assert reachable.reason(replica, 10.1) == unavailable(replica, 10.1) == "unreachable"


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (WORKER_STATE_LOADING, "loading"),
        (WORKER_STATE_DRAINING, "draining"),
        (WORKER_STATE_STUCK, "stuck"),
        (WORKER_STATE_READY, ""),
    ],
)
def test_the_state_that_a_worker_tells_forbids(
    replica: Replica, told: WorkerState.ValueType, name: str
) -> None:
    """All but ready; a state of a later version counts as loading."""
    replica.state = told
    assert state.reason(replica, 10.1) == unavailable(replica, 10.1) == name


def test_silence_forbids(replica: Replica) -> None:
    """A frozen worker keeps its sockets; one that never reported is silent too."""
    assert fresh.reason(replica, 10.0 + MAX_REPORT_AGE_S / 2) == ""
    assert fresh.reason(replica, 10.1 + MAX_REPORT_AGE_S) == "stale"
    replica.reported_at_s = None
    assert unavailable(replica, 10.1) == "stale"


def test_a_prefill_worker_gets_no_requests(replica: Replica) -> None:
    """One that decodes does."""
    replica.role = POOL_ROLE_PREFILL
    assert role.reason(replica, 10.1) == unavailable(replica, 10.1) == "role"
    replica.role = POOL_ROLE_DECODE
    assert role.reason(replica, 10.1) == ""


def test_a_full_replica_has_no_room(replica: Replica) -> None:
    """By requests; a worker that tells no bound has room always."""
    assert room.reason(replica, 4) == ""
    replica.report = LoadReport(max_requests=4)
    assert room.reason(replica, 4) == "no_room"
    assert room.reason(replica, 3) == ""


def test_an_open_breaker_forbids() -> None:
    """By incarnation."""
    assert broken.reason(KEY, {KEY}) == "broken"
    assert broken.reason(KEY, {KEY._replace(incarnation=1)}) == ""


def test_what_a_request_excludes_is_forbidden_to_it(ask) -> None:
    """By incarnation."""
    assert excluded.reason(ask(excluded=frozenset({KEY})), KEY) == "excluded"
    assert excluded.reason(ask(excluded=frozenset({KEY._replace(incarnation=1)})), KEY) == ""

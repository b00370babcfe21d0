"""The policies one by one."""

from collections import Counter
from random import Random

import pytest

from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import Candidate
from headrace_router.policies import (
    HoldParameters,
    HoldPolicy,
    RandomPolicy,
    RoundRobinPolicy,
    ScoredPolicy,
)
from headrace_router.replicas import Replica


def one(name: str, backlog_s: float = 0.0, own_s: float = 0.0, **fields: int) -> Candidate:
    made = Candidate(Replica(name, ReplicaKey(name, 1)), backlog_s=backlog_s, own_s=own_s)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def hold(**fields: float) -> HoldPolicy:
    return HoldPolicy(HoldParameters(**fields), Random(1))


def test_hold_weighs_own_work_thrice(ask) -> None:
    """A cache hit is worth more than the time it saves this request: it saves the fleet work."""
    busy_with_hit, idle = one("hit", backlog_s=0.09, own_s=0.0), one("idle", own_s=0.05)
    assert hold().choose(ask(), [busy_with_hit, idle]) is busy_with_hit
    assert hold(own_weight=0.0).choose(ask(), [busy_with_hit, idle]) is idle
    assert busy_with_hit.total_score == pytest.approx(-0.09)


def test_hold_waits_while_the_cheapest_is_busy(ask) -> None:
    """Even when another one is idle."""
    cheapest, idle = one("a", backlog_s=0.2), one("b", own_s=1.0)
    assert hold().choose(ask(), [cheapest, idle]) is None
    assert hold(slack_s=0.3).choose(ask(), [cheapest, idle]) is cheapest


def test_hold_prefers_an_open_one_among_equals(ask) -> None:
    """Of two that cost the same the one without backlog goes at once."""
    busy, idle = one("a", backlog_s=0.3, own_s=0.0), one("b", backlog_s=0.0, own_s=0.1)
    assert hold().choose(ask(), [busy, idle]) is idle


def test_hold_serves_short_work_first_with_age() -> None:
    """One second of waiting outweighs a fifth of a second of work."""
    policy, short, long = hold(), one("a", own_s=0.1), one("b", own_s=1.0)
    assert policy.urgency(short, 0.0) < policy.urgency(long, 0.0)
    assert policy.urgency(short, 0.0) > policy.urgency(long, 5.0)


def test_least_load_takes_the_least_loaded(ask) -> None:
    """In tokens; equals are spread."""
    policy = ScoredPolicy("least-load", {"load": 1.0}, Random(1))
    candidates = [one("a", load_tokens=900), one("b", load_tokens=10), one("c", load_tokens=500)]
    assert policy.choose(ask(), candidates).key.worker_id == "b"
    idle = [one(name) for name in "abcd"]
    assert len({policy.choose(ask(), idle).key for _ in range(100)}) == 4


def test_weighted_explains_its_scores(ask) -> None:
    """Each scorer's part and the sum are told."""
    policy = ScoredPolicy("weighted", {"prefix": 2.0, "load": 1.0}, Random(1))
    candidates = [one("a", hit_blocks=1, load_tokens=100), one("b", hit_blocks=0, load_tokens=50)]
    assert policy.choose(ask(32), candidates) is candidates[0]
    assert candidates[0].scores == {"prefix": 0.5, "load": 0.0}
    assert candidates[0].total_score == pytest.approx(1.0)
    assert candidates[1].total_score == pytest.approx(0.5)


def test_round_robin_takes_turns(ask) -> None:
    """Also when a replica leaves or comes."""
    policy = RoundRobinPolicy()
    three = [one(name) for name in "cab"]
    assert [policy.choose(ask(), three).key.worker_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.choose(ask(), [one("a"), one("c")]).key.worker_id == "c"


def test_random_takes_all(ask) -> None:
    """About equally."""
    policy, three = RandomPolicy(Random(1)), [one(name) for name in "abc"]
    picked = Counter(policy.choose(ask(), three).key.worker_id for _ in range(300))
    assert set(picked) == set("abc")
    assert min(picked.values()) > 50

"""The policies one by one."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import Candidate
from headrace_router.fleet_view import FleetView, ReplicaView
from headrace_router.load_guard import Load
from headrace_router.policies.consistent_hash import (
    ConsistentHashParameters,
    ConsistentHashPolicy,
)
from headrace_router.policies.hold import HoldParameters, HoldPolicy
from headrace_router.policies.min_ttft import MinTtftPolicy
from headrace_router.policies.overlap_load import OverlapLoadPolicy
from headrace_router.policies.power_of_two import PowerOfTwoPolicy
from headrace_router.policies.prefix_threshold import (
    PrefixThresholdParameters,
    PrefixThresholdPolicy,
)
from headrace_router.policies.random_choice import RandomPolicy
from headrace_router.policies.round_robin import RoundRobinPolicy
from headrace_router.policies.session import SessionPolicy
from headrace_router.policies.weighted import WeightedPolicy
from headrace_router.replicas import Replica


def one(name: str, backlog_s: float = 0.0, own_s: float = 0.0, **fields: int) -> Candidate:
    made = Candidate(Replica(name, ReplicaKey(name, 1)), backlog_s=backlog_s, own_s=own_s)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def view(*candidates: Candidate) -> FleetView:
    replicas = [
        ReplicaView(one.replica, "", Load(0, 0, 0, 0), 0.001, one.backlog_s, 0.0, 0.0)
        for one in candidates
    ]
    return FleetView("m", 0.0, 1, 0.001, 256.0, replicas)


def hold(**fields: float) -> HoldPolicy:
    return HoldPolicy(HoldParameters(**fields), Random(1))


def test_hold_weighs_own_work_thrice(ask) -> None:
    """A cache hit is worth more than the time it saves this request: it saves the fleet work."""
    busy_with_hit = one("hit", backlog_s=0.09, own_s=0.0)
    other = one("other", own_s=0.05, num_requests=4)
    assert hold().choose(ask(), [busy_with_hit, other]) is busy_with_hit
    assert hold(own_weight=0.0).choose(ask(), [busy_with_hit, other]) is other
    # Where nothing runs, recomputing takes nothing from anybody.
    other.num_requests = 0
    assert hold().choose(ask(), [busy_with_hit, other]) is other
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
    policy = WeightedPolicy("least-load", {"load": 1.0}, Random(1))
    candidates = [one("a", load_tokens=900), one("b", load_tokens=10), one("c", load_tokens=500)]
    assert policy.choose(ask(), candidates).key.worker_id == "b"
    idle = [one(name) for name in "abcd"]
    assert len({policy.choose(ask(), idle).key for _ in range(100)}) == 4


def test_weighted_explains_its_scores(ask) -> None:
    """Each scorer's part and the sum are told."""
    policy = WeightedPolicy("weighted", {"prefix": 2.0, "load": 1.0}, Random(1))
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


def test_hold_gives_a_hot_prefix_a_second_home(ask) -> None:
    """Once decoding beside all those streams costs more than computing the prefix again."""
    holder, idle = one("holder", own_s=0.01), one("idle", own_s=0.5, num_requests=4)
    holder.decode_s = 1.4
    assert hold(decode_weight=1.0).choose(ask(), [holder, idle]) is holder
    holder.decode_s = 1.6
    assert hold(decode_weight=1.0).choose(ask(), [holder, idle]) is idle
    assert hold(decode_weight=0.0).choose(ask(), [holder, idle]) is holder


def test_hold_lets_no_replica_be_crowded_beside_an_idle_one(ask) -> None:
    """Whatever was predicted: predictions may be wrong by far, numbers of requests are not."""
    policy = hold(max_ratio=2.0, max_difference=8)
    holder, idle = one("holder", own_s=0.01, num_requests=8), one("idle", own_s=9.0)
    assert policy.choose(ask(), [holder, idle]) is holder
    holder.num_requests = 9
    assert policy.choose(ask(), [holder, idle]) is idle
    idle.num_requests = 1
    assert policy.choose(ask(), [holder, idle]) is holder
    holder.ahead = 2
    assert policy.choose(ask(), [holder, idle]) is idle


def test_hold_waits_for_nobody_who_is_busy_for_long_though_others_are_crowded(ask) -> None:
    """A replica with few but huge requests must not keep the fleet from the others."""
    crowded, huge = one("crowded", own_s=1.0, num_requests=40), one("huge", own_s=0.1)
    assert hold().choose(ask(), [crowded, huge]) is huge
    huge.backlog_s = 6.0
    assert hold().choose(ask(), [crowded, huge]) is crowded
    huge.backlog_s, huge.ahead_own_s = 3.0, 1.0
    assert hold().choose(ask(), [crowded, huge]) is None
    huge.ahead_own_s = 2.1
    assert hold().choose(ask(), [crowded, huge]) is crowded
    huge.backlog_s = huge.ahead_own_s = 0.0
    huge.num_requests, huge.kv_tokens, huge.kv_capacity_tokens = 2, 900, 900
    huge.uncached_tokens, crowded.own_s = 100, 0.01
    assert hold().choose(ask(), [crowded, huge]) is crowded


def test_hold_counts_those_who_wait_for_the_same_replica(ask) -> None:
    """They will be running there when this one is; asked in turn, they divide over the fleet."""
    policy, query = hold(), ask(100, chain=tuple(range(6)), expected_output_tokens=50)
    seen = view(one("holder", 0.3), one("cold", 0.2))
    for replica in seen.replicas:
        replica.stream_s = 0.01
    wanted = []
    for _ in range(9):
        outlook = policy.outlook(query, seen, [6, 0])
        assert outlook.must_wait
        assert outlook.seconds == pytest.approx(0.25)
        wanted.append(outlook.wanted)
        seen.queue_up(outlook)
    assert wanted[0] == 0
    assert {0, 1} == set(wanted)
    assert seen.ahead == [wanted.count(0), wanted.count(1)]
    seen.forget_queue()
    assert policy.outlook(query, seen, [6, 0]).wanted == 0


def test_hold_waits_for_kv_room(ask) -> None:
    """Sent there it would wait at the worker, where nobody can move it; an idle one always may."""
    full = one("a", num_requests=3, kv_tokens=900, kv_capacity_tokens=1000, uncached_tokens=101)
    assert hold().choose(ask(), [full]) is None
    full.uncached_tokens = 100
    assert hold().choose(ask(), [full]) is full
    lone = one("a", num_requests=0, kv_capacity_tokens=100, uncached_tokens=101)
    assert hold().choose(ask(), [lone]) is lone


def test_hold_says_when_no_scan_is_needed() -> None:
    """Nobody may go while the least busy replica is above the slack."""
    assert hold().may_release(view(one("a", 0.1), one("b", 5.0)))
    assert not hold().may_release(view(one("a", 0.2)))
    assert MinTtftPolicy(Random(1)).may_release(view(one("a", 99.0)))


@settings(max_examples=200, deadline=None)
@given(
    fleet=st.lists(
        st.tuples(
            st.floats(0, 8),
            st.integers(0, 60),
            st.floats(0.0001, 0.002),
            st.floats(0, 0.1),
            st.integers(0, 40),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_cheap_look_never_holds_what_could_go(ask, fleet) -> None:
    """`outlook` may err on one side only; the queue relies on it."""
    query, policy = ask(1000, chain=tuple(range(60)), expected_output_tokens=20), hold()
    candidates, hits = [], []
    for idx, (backlog_s, hit_blocks, token_s, step_s, _) in enumerate(fleet):
        uncached_tokens = 1000 - query.cached_tokens(hit_blocks)
        candidates.append(one(str(idx), backlog_s, uncached_tokens * token_s))
        candidates[-1].decode_s = 20 * step_s
        hits.append(hit_blocks)
    seen = view(*candidates)
    rows = enumerate(zip(seen.replicas, candidates, fleet, strict=True))
    for idx, (replica, candidate, (_, _, token_s, step_s, ahead)) in rows:
        replica.token_s, replica.step_s = token_s, step_s
        seen.ahead[idx] = candidate.ahead = ahead
        seen.ahead_s[idx] = candidate.ahead_s = ahead * step_s
        seen.ahead_own_s[idx] = candidate.ahead_own_s = ahead * 100 * token_s
    waits = policy.choose(query, candidates) is None
    assert waits or not policy.outlook(query, seen, hits).must_wait


def test_min_ttft_takes_the_earliest_first_token(ask) -> None:
    """Backlog and own work weigh the same, and nothing waits."""
    policy, near, far = MinTtftPolicy(Random(1)), one("a", 0.4, 0.1), one("b", 0.0, 0.6)
    assert policy.choose(ask(), [near, far]) is near
    assert near.total_score == pytest.approx(-0.5)


def test_overlap_load_sets_uncached_work_against_running_kv(ask) -> None:
    """With weight 2, two running blocks are worth one block of prefill."""
    hit = one("hit", uncached_tokens=160, load_tokens=1600)
    miss = one("miss", uncached_tokens=1600, load_tokens=0)
    assert OverlapLoadPolicy(2.0, Random(1)).choose(ask(), [hit, miss]) is hit
    assert OverlapLoadPolicy(1.0, Random(1)).choose(ask(), [hit, miss]) is miss
    queued = one("queued", uncached_tokens=160, load_tokens=1600, backlog_tokens=1600)
    assert OverlapLoadPolicy(2.0, Random(1)).choose(ask(), [queued, miss]) is miss


def test_prefix_threshold_follows_a_good_match_in_a_level_fleet(ask) -> None:
    """Half of the prompt or less is not good; a hot replica ends all affinity."""
    policy = PrefixThresholdPolicy(PrefixThresholdParameters(), Random(1))
    good, poor = one("good", hit_blocks=6, num_requests=30), one("poor", hit_blocks=1)
    assert policy.choose(ask(160), [good, poor]) is good
    good.num_requests = 40
    assert policy.choose(ask(160), [good, poor]) is poor
    good.hit_blocks, good.num_requests = 5, 30
    assert policy.choose(ask(160), [good, poor]) is poor


def test_power_of_two_takes_the_less_busy_of_its_draw(ask) -> None:
    """The busiest of three is never taken, the other two both are."""
    policy = PowerOfTwoPolicy(Random(1))
    three = [one("a"), one("b", num_requests=5), one("c", num_requests=9)]
    picked = Counter(policy.choose(ask(), three).key.worker_id for _ in range(300))
    assert set(picked) == {"a", "b"}
    assert policy.choose(ask(), three[:1]) is three[0]


def test_consistent_hash_keeps_a_head_together_until_its_home_is_busy(ask) -> None:
    """The same head goes home, other heads elsewhere, and a full home is passed over."""
    policy = ConsistentHashPolicy(ConsistentHashParameters(head_blocks=2))
    fleet = [one(name) for name in "abcdefgh"]
    homes = {
        head: {policy.choose(ask(chain=(head, head + 1, tail)), fleet).key for tail in range(5)}
        for head in range(0, 80, 2)
    }
    assert all(len(home) == 1 for home in homes.values())
    assert len({home for (home,) in homes.values()}) > 4
    home = policy.choose(ask(chain=(7, 8)), fleet)
    home.num_requests = 20
    assert policy.choose(ask(chain=(7, 8)), fleet) is not home


def test_consistent_hash_moves_only_what_it_must(ask) -> None:
    """A replica that leaves moves its own prompts and no others."""
    policy = ConsistentHashPolicy(ConsistentHashParameters())
    fleet = [one(name) for name in "abcdefgh"]
    before = {head: policy.choose(ask(chain=(head,)), fleet).key for head in range(100)}
    after = {head: policy.choose(ask(chain=(head,)), fleet[1:]).key for head in range(100)}
    assert {before[head].worker_id for head in range(100) if before[head] != after[head]} == {"a"}


def test_session_stays_whatever_the_load(ask) -> None:
    """Requests without one go to the least busy replica."""
    policy, fleet = SessionPolicy(Random(1)), [one(name) for name in "abcd"]
    home = policy.choose(ask(session_id="s"), fleet)
    home.num_requests = 100
    assert policy.choose(ask(session_id="s"), fleet) is home
    assert policy.choose(ask(), fleet) is not home

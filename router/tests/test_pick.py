"""The pipeline: who may be picked, who is picked, and who never is."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.errors import ModelNotFound, NoReplica
from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import (
    POOL_ROLE_PREFILL,
    WORKER_STATE_DRAINING,
    WORKER_STATE_LOADING,
    WORKER_STATE_STUCK,
)
from headrace_router.replicas import MAX_REPORT_AGE_S
from headrace_testing.clock import FakeClock

FATES = ["ready", "draining", "stuck", "loading", "lost", "silent", "excluded", "prefill"]


def fate(fleet, key: ReplicaKey, kind: str) -> None:
    """Bring a replica into a state in which it must not be picked (or leave it ready)."""
    states = {
        "draining": WORKER_STATE_DRAINING,
        "stuck": WORKER_STATE_STUCK,
        "loading": WORKER_STATE_LOADING,
    }
    if kind in states:
        fleet.report(key, states[kind])
    elif kind == "lost":
        fleet.table.lose(key.worker_id)
    elif kind == "prefill":
        fleet.table.get(key.worker_id).role = POOL_ROLE_PREFILL


@settings(max_examples=150, deadline=None)
@given(fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=6), data=st.data())
def test_only_ready_replicas_are_ever_picked(make_fleet, ask, fates: list[str], data) -> None:
    """Draining, stuck, loading, unreachable, frozen and excluded ones never are."""
    fleet = make_fleet(FakeClock())
    keys = [fleet.add(f"w{idx}") for idx in range(len(fates))]
    fleet.clock.advance(MAX_REPORT_AGE_S + 1)
    for key, kind in zip(keys, fates, strict=True):
        if kind != "silent":
            fleet.report(key)
        fate(fleet, key, kind)
        # A prefix there must not tempt.
        fresh = fleet.mirror.begin("m", 1)
        fleet.mirror.add(fresh, 1, range(1, data.draw(st.integers(1, 9))))
        fleet.mirror.commit(key, fresh)
    excluded = frozenset(k for k, kind in zip(keys, fates, strict=True) if kind == "excluded")
    query = ask(160, chain=tuple(range(1, 10)), excluded=excluded)
    ready = {key for key, kind in zip(keys, fates, strict=True) if kind == "ready"}
    if not ready:
        with pytest.raises(NoReplica):
            fleet.choose(query)
        return
    for _ in range(5):
        choice = fleet.choose(query)
        assert choice is not None
        assert choice.chosen.key in ready
    reasons = {one.key: one.filtered_by for one in choice.candidates}
    assert {key for key, reason in reasons.items() if not reason} == ready


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("draining", "draining"), ("stuck", "stuck"), ("loading", "loading"), ("lost", "unreachable")],
)
def test_the_reason_is_named(fleet, ask, kind: str, reason: str) -> None:
    """Explanations say which filter dropped a replica."""
    fleet.add("good")
    fate(fleet, fleet.add("bad"), kind)
    choice = fleet.choose(ask())
    assert {one.key.worker_id: one.filtered_by for one in choice.candidates} == {
        "good": "",
        "bad": reason,
    }


def test_exclusion_is_by_incarnation(fleet, ask) -> None:
    """A worker that failed and restarted is another replica."""
    key = fleet.add("w1", incarnation=2)
    former = frozenset({key._replace(incarnation=1)})
    assert fleet.choose(ask(excluded=former)).chosen.key == key
    with pytest.raises(NoReplica):
        fleet.choose(ask(excluded=frozenset({key})))


def test_unknown_models_and_missing_replicas_differ(fleet, ask) -> None:
    """404 if nobody serves it, 503 if somebody may."""
    with pytest.raises(NoReplica):
        fleet.choose(ask())
    key = fleet.add("w1")
    with pytest.raises(ModelNotFound):
        fleet.choose(ask(model="other"))
    fleet.table.expect("w2")
    with pytest.raises(NoReplica):
        fleet.choose(ask(model="other"))
    fleet.table.remove("w2")
    fleet.table.lose(key.worker_id)
    with pytest.raises(NoReplica):
        fleet.choose(ask())


def test_the_replica_with_the_prefix_wins(fleet, ask) -> None:
    """All else equal, the one that holds most of the prompt costs least."""
    fleet.add("w1")
    holder = fleet.add("w2")
    fresh = fleet.mirror.begin("m", 1)
    fleet.mirror.add(fresh, 1, range(1, 60))
    fleet.mirror.commit(holder, fresh)
    for _ in range(20):
        choice = fleet.choose(ask(1000, chain=tuple(range(1, 60))))
        assert choice.chosen.key == holder
        assert (choice.chosen.hit_blocks, choice.chosen.uncached_tokens) == (59, 1000 - 59 * 16)


def test_the_last_prompt_token_is_always_computed(fleet, ask) -> None:
    """A fully cached prompt still has one token to go."""
    key = fleet.add("w1")
    fresh = fleet.mirror.begin("m", 1)
    fleet.mirror.add(fresh, 1, [1, 2])
    fleet.mirror.commit(key, fresh)
    assert fleet.choose(ask(32, chain=(1, 2))).chosen.uncached_tokens == 1


def test_blocks_in_flight_count_as_cached(fleet, ask) -> None:
    """A burst of equal prompts follows the first one instead of scattering."""
    for idx in range(8):
        fleet.add(f"w{idx}")
    query = ask(64, chain=(1, 2, 3, 4))
    first, _ = fleet.pick(query)
    assert {fleet.pick(query)[0] for _ in range(10)} == {first}


def test_a_thousand_requests_without_a_match_spread(fleet, ask) -> None:
    """Ties never pile up on one replica."""
    for idx in range(8):
        fleet.add(f"w{idx}")
    picked: Counter[str] = Counter()
    for number in range(1000):
        worker_id, guard = fleet.pick(ask(16, chain=(number,)))
        picked[worker_id] += 1
        guard.release()
    assert len(picked) == 8
    assert max(picked.values()) < 2 * min(picked.values())


def test_a_full_replica_makes_the_request_wait(fleet, ask) -> None:
    """It is not refused: the engine only takes so many at once."""
    key = fleet.add("w1")
    fleet.report(key, max_requests=2, num_running=1, num_waiting=1)
    assert fleet.choose(ask()) is None
    fleet.report(key, max_requests=2, num_running=1)
    assert fleet.choose(ask()) is not None
    fleet.pick(ask())
    assert fleet.choose(ask()) is None


def test_decode_does_not_count_as_backlog(fleet, ask) -> None:
    """An engine that only generates takes more; it batches them."""
    key = fleet.add("w1")
    fleet.report(key, num_running=20, running_tokens=50_000, max_requests=64)
    assert fleet.choose(ask()) is not None


def test_hold_waits_for_the_replica_with_the_prefix(fleet, ask) -> None:
    """Recomputing a long prefix elsewhere costs more than waiting a little."""
    holder = fleet.add("w1")
    fleet.add("w2")
    fresh = fleet.mirror.begin("m", 1)
    fleet.mirror.add(fresh, 1, range(1, 101))
    fleet.mirror.commit(holder, fresh)
    query = ask(1600, chain=tuple(range(1, 101)))
    fleet.report(holder, queued_prefill_tokens=500)
    assert fleet.choose(query) is None
    fleet.report(holder, queued_prefill_tokens=5000)
    assert fleet.choose(query).chosen.key.worker_id == "w2"
    fleet.report(holder, queued_prefill_tokens=50)
    assert fleet.choose(query).chosen.key == holder


def test_stale_reports_are_not_used_for_load(fleet, ask) -> None:
    """Staleness is told with each choice."""
    fleet.add("w1")
    fleet.clock.advance(1.5)
    assert fleet.choose(ask()).load_staleness_s == pytest.approx(1.5)


def test_a_session_keeps_its_replica_among_equals(fleet, ask) -> None:
    """Stickiness decides ties only."""
    for idx in range(8):
        fleet.add(f"w{idx}")
    homes = {
        session: {fleet.choose(ask(session_id=session)).chosen.key for _ in range(5)}
        for session in ("one", "two", "three", "four", "five")
    }
    assert all(len(home) == 1 for home in homes.values())
    assert len({next(iter(home)) for home in homes.values()}) > 1

"""The queue of one model."""

from collections.abc import Callable
from random import Random

import pytest

from headrace_common.errors import QueueFull
from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import BATCH, HIGH, Candidate
from headrace_router.drain_rate import WINDOW_S
from headrace_router.fairness import VirtualCounters
from headrace_router.pick import Choice
from headrace_router.policies.hold import HoldParameters, HoldPolicy
from headrace_router.policy_file import QueueSection
from headrace_router.queue import SCAN_LIMIT, ModelQueue, Waiting
from headrace_router.replicas import Replica

POLICY = HoldPolicy(HoldParameters(), Random(1))


@pytest.fixture
def counters() -> VirtualCounters:
    return VirtualCounters(output_weight=2.0, slack_tokens=0)


@pytest.fixture
def waiting(ask):
    def make(request_id: str = "r", arrived_s: float = 0.0, own: int = 1, **fields) -> Waiting:
        query = ask(own, request_id=request_id, **fields)
        return Waiting(query, arrived_s, arrived_s + 10, on_leave=lambda _: None)

    return make


def choose(one: Waiting) -> Choice:
    """Anybody may go; own work in seconds = prompt tokens."""
    chosen = Candidate(Replica("w", ReplicaKey("w", 1)), own_s=float(one.query.prompt_tokens))
    return Choice(chosen, [chosen], POLICY, 0.0)


def drain(queue: ModelQueue, now_s: float = 0.0) -> list[str]:
    order = []
    while (release := queue.next_release(choose, now_s)) is not None:
        order.append(release.waiting.query.request_id)
        queue.remove(release.waiting)
    assert len(queue) == 0
    return order


def test_classes_come_first_then_short_work(counters, waiting) -> None:
    """BATCH runs in the gaps."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=100))
    for one in (
        waiting("batch", own=1, priority=BATCH),
        waiting("long", own=9),
        waiting("short", own=2),
        waiting("high", own=50, priority=HIGH),
    ):
        queue.add(one, 1.0)
    assert drain(queue) == ["high", "short", "long", "batch"]


def test_age_lets_long_work_through(counters, waiting) -> None:
    """Short requests cannot starve a long one."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=100))
    queue.add(waiting("old and long", arrived_s=0.0, own=9), 1.0)
    queue.add(waiting("new and short", arrived_s=50.0, own=1), 1.0)
    assert drain(queue, now_s=50.0) == ["old and long", "new and short"]


def test_the_tenant_served_least_goes_first(counters, waiting) -> None:
    """However long its work is."""
    counters.charge("greedy", prompt_tokens=1000)
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=100))
    queue.add(waiting("g", own=1, tenant_id="greedy"), 1.0)
    counters.charge("greedy", prompt_tokens=1000)
    queue.add(waiting("m", own=5, tenant_id="modest"), 1.0)
    counters.charge("greedy", prompt_tokens=1)
    assert drain(queue) == ["m", "g"]


def test_one_that_must_wait_blocks_nobody(counters, waiting) -> None:
    """The next class and the next tenant are looked at."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=100))
    queue.add(waiting("stuck", priority=HIGH), 1.0)
    queue.add(waiting("free"), 1.0)
    release = queue.next_release(
        lambda one: None if one.query.request_id == "stuck" else choose(one), 0.0
    )
    assert release.waiting.query.request_id == "free"


def test_a_pass_looks_at_a_bounded_number(counters, waiting) -> None:
    """A long queue does not make decisions slow."""
    queue, looked_at = ModelQueue("m", counters, QueueSection(max_waiting_per_model=1000)), []
    for number in range(500):
        queue.add(waiting(str(number), tenant_id=f"t{number % 3}"), 1.0)
    assert queue.next_release(looked_at.append, 0.0) is None
    assert len(looked_at) == SCAN_LIMIT
    assert {one.query.tenant_id for one in looked_at} == {"t0", "t1", "t2"}


def test_a_full_queue_refuses_and_says_when_to_come_back(counters, waiting) -> None:
    """Of equals the newcomer loses."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=2))
    queue.add(waiting("a"), 1.0)
    queue.add(waiting("b"), 1.0)
    with pytest.raises(QueueFull) as caught:
        queue.add(waiting("c"), 7.0)
    assert caught.value.retry_after_s == 7.0
    assert len(queue) == 2


def test_a_full_queue_makes_room_for_a_higher_class(counters, waiting) -> None:
    """The newest of the lowest class loses its place."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=2))
    queue.add(waiting("old", priority=BATCH), 1.0)
    queue.add(waiting("new", priority=BATCH), 1.0)
    victim = queue.add(waiting("urgent", priority=HIGH), 1.0)
    assert victim.query.request_id == "new"
    assert drain(queue) == ["urgent", "old"]


def test_one_tenant_cannot_fill_the_queue(counters, waiting) -> None:
    """The tenant with the most waiting requests gives up its newest."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=3))
    for number in range(3):
        queue.add(waiting(f"flood{number}", tenant_id="flood"), 1.0)
    victim = queue.add(waiting("mine", tenant_id="other"), 1.0)
    assert victim.query.request_id == "flood2"
    with pytest.raises(QueueFull):
        queue.add(waiting("flood3", tenant_id="flood"), 1.0)


def test_no_queue_at_all_refuses(counters, waiting) -> None:
    """A bound of zero means: go now or not at all."""
    with pytest.raises(QueueFull):
        ModelQueue("m", counters, QueueSection(max_waiting_per_model=0)).add(waiting(), 1.0)


def test_expired_requests_are_found(counters, waiting) -> None:
    """Each has its own deadline."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=10))
    queue.add(waiting("a", arrived_s=0.0), 1.0)
    queue.add(waiting("b", arrived_s=5.0), 1.0)
    assert queue.next_deadline_s() == 10.0
    assert [one.query.request_id for one in queue.expired(10.0)] == ["a"]


def test_removing_twice_is_harmless(counters, waiting) -> None:
    """A cancelled request may have left already."""
    queue, one = ModelQueue("m", counters, QueueSection(max_waiting_per_model=10)), waiting()
    queue.add(one, 1.0)
    assert queue.remove(one)
    assert not queue.remove(one)
    assert len(queue) == 0


def test_age_lifts_into_the_next_class(counters, waiting) -> None:
    """A stream of important requests cannot starve the others; it takes one period per class."""
    rules = QueueSection(max_waiting_per_model=10, promote_after_s=15)
    queue = ModelQueue("m", counters, rules)
    queue.add(waiting("batch", arrived_s=0.0, own=1, priority=BATCH), 1.0)
    queue.add(waiting("standard", arrived_s=14.0, own=2), 1.0)
    assert queue.next_release(choose, 14.9).waiting.query.request_id == "standard"
    assert queue.next_release(choose, 15.0).waiting.query.request_id == "batch"
    queue.add(waiting("high", arrived_s=29.0, own=3, priority=HIGH), 1.0)
    assert queue.next_release(choose, 28.9).waiting.query.request_id == "high"
    assert queue.next_release(choose, 30.0).waiting.query.request_id == "batch"


def flooded(queue: ModelQueue, counters: VirtualCounters, waiting) -> None:
    """Let a tenant with sixty requests have forty turns, one a second."""
    for idx in range(60):
        queue.add(waiting(f"flood {idx}", own=9, tenant_id="flood"), 1.0)
    for second in range(40):
        one = queue.next_release(choose, float(second)).waiting
        queue.note_turn(one, float(second))
        queue.remove(one)
        counters.charge("flood", prompt_tokens=1000)


def test_a_flood_is_not_lifted_by_its_age(counters, waiting) -> None:
    """While a tenant has its turns, its old requests stay in their class."""
    rules = QueueSection(max_waiting_per_model=100, promote_after_s=15)
    queue = ModelQueue("m", counters, rules)
    flooded(queue, counters, waiting)
    queue.add(waiting("high", arrived_s=40.0, own=99, tenant_id="flood", priority=HIGH), 1.0)
    assert queue.next_release(choose, 40.0).waiting.query.request_id == "high"
    # Nothing of it went for a whole period: then its age counts.
    queue.add(waiting("higher", arrived_s=55.0, own=99, tenant_id="other", priority=HIGH), 1.0)
    assert queue.next_release(choose, 55.0).waiting.query.request_id.startswith("flood")


def test_among_tenants_served_alike_the_age_of_a_flood_does_not_count(waiting) -> None:
    """A newcomer starts as served as the least; the flood's old requests wait for their turn."""
    counters = VirtualCounters(output_weight=2.0, slack_tokens=8192)
    rules = QueueSection(max_waiting_per_model=100, promote_after_s=3600)
    queue = ModelQueue("m", counters, rules)
    flooded(queue, counters, waiting)
    queue.add(waiting("small", arrived_s=40.0, own=2, tenant_id="small"), 1.0)
    assert queue.next_release(choose, 40.0).waiting.query.request_id == "small"


def test_goals_about_to_be_missed_go_first(counters, waiting) -> None:
    """Earliest first, inside a class; one that is lost already presses no more."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=10, goal_window_s=1.0))
    for one in (
        waiting("short", own=1),
        waiting("later", own=6, ttft_goal_s=16.9),
        waiting("sooner", own=6, ttft_goal_s=16.5),
        waiting("lost", own=6, ttft_goal_s=15.0),
        waiting("in time", own=6, ttft_goal_s=30.0),
    ):
        queue.add(one, 1.0)
    order = drain(queue, now_s=10.0)
    assert order[:3] == ["sooner", "later", "short"]
    assert set(order[3:]) == {"lost", "in time"}


def test_other_rules_hold_for_newcomers(counters, waiting) -> None:
    """A smaller bound evicts nobody who waits already."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=2))
    queue.add(waiting("a"), 1.0)
    queue.add(waiting("b"), 1.0)
    queue.use(QueueSection(max_waiting_per_model=1))
    with pytest.raises(QueueFull):
        queue.add(waiting("c"), 1.0)
    assert len(queue) == 2


def _moving(queue: ModelQueue, waiting: Callable[..., Waiting], num_turns: int) -> float:
    """Let a queue move for a window; return the time at its end."""
    for number in range(num_turns):
        gone = waiting(arrived_s=0.0)
        queue.add(gone, 1.0)
        queue.note_turn(gone, WINDOW_S * (number + 1) / num_turns)
        queue.remove(gone)
    return WINDOW_S


def test_who_cannot_be_served_in_time_is_told_early(counters, waiting) -> None:
    """The newest, if the queue moves as it did, with a quarter of grace."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=100))
    now_s = _moving(queue, waiting, num_turns=16)
    for number in range(40):
        queue.add(waiting(str(number), arrived_s=now_s), 1.0)
    # Two a second for ten seconds.
    told = [one.query.request_id for one in queue.hopeless(now_s)]
    assert told == [str(number) for number in range(25, 40)]


def test_a_flood_makes_nobody_else_hopeless(counters, waiting) -> None:
    """Tenants have their turns; a higher class goes first."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=100))
    now_s = _moving(queue, waiting, num_turns=16)
    for number in range(60):
        queue.add(waiting(f"flood{number}", arrived_s=now_s, tenant_id="flood"), 1.0)
    queue.add(waiting("mine", arrived_s=now_s, tenant_id="other"), 1.0)
    queue.add(waiting("high", arrived_s=now_s, tenant_id="flood", priority=HIGH), 1.0)
    told = [one.query.request_id for one in queue.hopeless(now_s)]
    assert told == [f"flood{number}" for number in range(23, 60)]


def test_hope_is_given_up_only_where_the_rate_is_known(counters, waiting) -> None:
    """A queue that is young or hardly moves may do better; a stream without its replica waits."""
    queue = ModelQueue("m", counters, QueueSection(max_waiting_per_model=100))
    for number in range(40):
        queue.add(waiting(str(number), arrived_s=0.0), 1.0)
    assert queue.hopeless(WINDOW_S) == []
    now_s = _moving(queue, waiting, num_turns=16)
    assert queue.hopeless(now_s - 1) == []
    assert len(queue.hopeless(now_s)) == 35
    for one in list(queue):
        queue.remove(one)
    lost = frozenset({ReplicaKey("w", 1)})
    for number in range(40):
        queue.add(waiting(str(number), arrived_s=now_s, excluded=lost), 1.0)
    assert queue.hopeless(now_s + 2) == []

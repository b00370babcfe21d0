"""Blocks of engines that send no KV events."""

from headrace_common.kv_index import ReplicaKey
from headrace_router.assumed import AssumedBlocks
from headrace_router.in_flight import InFlightBlocks
from headrace_router.load_guard import LoadBook, LoadGuard
from headrace_router.mirror import BYTES_PER_ENTRY
from headrace_testing.clock import FakeClock

SILENT, TELLING = ReplicaKey("silent", 1), ReplicaKey("telling", 1)
TTL_S = 100.0


class Booked:
    """A load book with one listener."""

    def __init__(self, clock: FakeClock, ttl_s: float = TTL_S, max_blocks: int = 10_000) -> None:
        self.clock, self.loads = clock, LoadBook(InFlightBlocks())
        indexed = TELLING.__eq__
        self.assumed = AssumedBlocks(ttl_s, max_blocks * BYTES_PER_ENTRY, clock, indexed)
        self.loads.listen(self.assumed)

    def send(self, chain: list[int], replica: ReplicaKey = SILENT) -> LoadGuard:
        return self.loads.book(
            replica, chain, uncached_tokens=1, prompt_tokens=1, now_s=self.clock.now_s()
        )

    def serve(self, chain: list[int], replica: ReplicaKey = SILENT) -> None:
        guard = self.send(chain, replica)
        guard.first_token(self.clock.now_s())
        guard.release()


def test_a_prompt_is_assumed_from_its_first_token_on(clock: FakeClock) -> None:
    """Before it nothing is computed; a request that fails before it leaves nothing."""
    booked = Booked(clock)
    guard = booked.send([1, 2, 3])
    assert booked.assumed.depths([1, 2, 3]) == {}
    guard.first_token(0.0)
    assert booked.assumed.depths([1, 2, 9]) == {SILENT: 2}
    booked.send([7, 8]).release()
    assert booked.assumed.depths([7, 8]) == {}


def test_nothing_is_assumed_of_who_tells(clock: FakeClock) -> None:
    """Its events are the truth, also about what it has dropped."""
    booked = Booked(clock)
    booked.serve([1, 2], TELLING)
    assert booked.assumed.depths([1, 2]) == {}


def test_what_is_not_used_again_is_forgotten(clock: FakeClock) -> None:
    """At most the time to live, at least half of it after the last use."""
    booked = Booked(clock)
    booked.serve([1, 2])
    clock.advance(TTL_S / 2 - 1)
    booked.serve([1, 2, 3])
    clock.advance(TTL_S / 2 - 1)
    assert booked.assumed.depths([1, 2, 3]) == {SILENT: 3}
    clock.advance(TTL_S)
    assert booked.assumed.depths([1, 2, 3]) == {}
    assert booked.assumed.num_entries() == 0


def test_memory_is_bounded(clock: FakeClock) -> None:
    """All-distinct prompts push one another out."""
    booked = Booked(clock, max_blocks=4096)
    for start in range(0, 100_000, 50):
        booked.serve(list(range(start, start + 50)))
    assert booked.assumed.num_entries() <= 4096
    assert booked.assumed.depths(list(range(99_950, 100_000))) == {SILENT: 50}


def test_it_can_be_switched_off(clock: FakeClock) -> None:
    """A time to live of 0."""
    booked = Booked(clock, ttl_s=0)
    booked.serve([1, 2])
    assert booked.assumed.depths([1, 2]) == {}

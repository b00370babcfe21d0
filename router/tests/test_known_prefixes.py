"""Strides, windows, tiers and assumptions between the mirror and a request's blocks."""

from headrace_common.kv_index import TIERS, ReplicaKey
from headrace_contracts.types.v1.types_pb2 import HashRecipe
from headrace_contracts.worker.v1.worker_pb2 import ModelCard
from headrace_router.assumed import AssumedBlocks
from headrace_router.in_flight import InFlightBlocks
from headrace_router.known_prefixes import KnownPrefixes
from headrace_router.load_guard import LoadBook
from headrace_router.mirror import PrefixMirror
from headrace_router.replicas import Replica
from headrace_testing.clock import FakeClock

A, B, C = ReplicaKey("a", 1), ReplicaKey("b", 1), ReplicaKey("c", 1)
CHAIN = list(range(101, 117))


class Known:
    """All sources, empty."""

    def __init__(self, clock: FakeClock) -> None:
        self.mirror, self.loads = PrefixMirror(), LoadBook(InFlightBlocks())
        assumed = AssumedBlocks(60, 1 << 20, clock, lambda key: key in self.mirror.replicas())
        self.loads.listen(assumed)
        weights = dict(zip(TIERS, (1.0, 0.75, 0.25), strict=True))
        self.prefixes = KnownPrefixes(self.mirror, assumed, weights)

    def hold(self, key: ReplicaKey, blocks: list[int], tier: int = 0) -> None:
        known = self.mirror.replicas().get(key)
        if known is None:
            known = self.mirror.begin("m")
            self.mirror.commit(key, known)
        self.mirror.add(known, TIERS[tier], blocks)

    def describe(self, **recipes: HashRecipe) -> None:
        self.prefixes.describe(
            Replica(name, ReplicaKey(name, 1), cards=(ModelCard(recipe=recipe),))
            for name, recipe in recipes.items()
        )


def test_a_stride_is_counted_in_blocks_of_the_request(clock: FakeClock) -> None:
    """Every 4th block is known: 4 blocks each; replicas with and without one side by side."""
    known = Known(clock)
    known.describe(a=HashRecipe(index_stride_blocks=4), b=HashRecipe(), c=HashRecipe())
    known.hold(A, CHAIN[3:12:4])
    known.hold(B, CHAIN[:5])
    known.hold(C, CHAIN[3:4])
    assert known.prefixes.depths(CHAIN) == {A: 12, B: 5}
    assert known.prefixes.depths(CHAIN[:3]) == {B: 3}


def test_a_window_in_the_recipe_forbids_jumps(clock: FakeClock) -> None:
    """Declared on the model's card, from Describe on."""
    known = Known(clock)
    long = list(range(1, 200))
    known.hold(A, [block for block in long if block != 50])
    assert known.prefixes.depths(long)[A] == len(long)
    known.describe(a=HashRecipe(window_tokens=1024))
    assert known.prefixes.depths(long) == {A: 49}


def test_slower_tiers_are_worth_part_of_their_blocks(clock: FakeClock) -> None:
    """8 on the device and 8 in host memory are worth 14; what is worth nothing is left out."""
    known = Known(clock)
    known.hold(A, CHAIN[:8])
    known.hold(A, CHAIN[8:], tier=1)
    known.hold(B, CHAIN[:2], tier=2)
    assert known.prefixes.depths(CHAIN) == {A: 14}


def test_replicas_without_events_are_credited_with_what_they_were_sent(clock: FakeClock) -> None:
    """Until they tell for themselves."""
    known = Known(clock)
    known.hold(B, CHAIN[:2])
    guard = known.loads.book(A, CHAIN[:6], uncached_tokens=1, prompt_tokens=1, now_s=0)
    guard.first_token(0)
    assert known.prefixes.depths(CHAIN) == {A: 6, B: 2}
    known.hold(A, CHAIN[:1])
    assert known.prefixes.depths(CHAIN) == {A: 1, B: 2}
    assert known.prefixes.depths([]) == {}

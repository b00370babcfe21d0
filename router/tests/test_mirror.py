"""The mirror against plain sets: any changes, in any order of operations."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_common.kv_index import TIERS, ReplicaKey, Tier
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_router.mirror import BYTES_PER_ENTRY, PrefixMirror

A, B = ReplicaKey("a", 1), ReplicaKey("b", 1)


def pack(hashes: list[int] | set[int]) -> bytes:
    return b"".join(one.to_bytes(8, "little") for one in hashes)


def delta(
    key: ReplicaKey, seq: int, added: list[int] | None = None, **fields: object
) -> IndexDelta:
    made = IndexDelta(replica=key.to_ref(), seq=seq, model="m", tier=1, added=pack(added or []))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_counts_leading_blocks_only() -> None:
    """A hole ends the prefix, whatever is held behind it."""
    mirror = PrefixMirror()
    mirror.apply(delta(A, 1, [1, 2, 3]))
    mirror.apply(delta(B, 1, [1, 3]))
    assert mirror.depths([1, 2, 3, 4]) == {A: 3, B: 1}
    assert mirror.depths([9, 1]) == {}
    assert mirror.depths([]) == {}


def test_a_gap_asks_for_a_rescan() -> None:
    """A missing number, an unknown replica in mid-life and a reset are not guessed over."""
    mirror = PrefixMirror()
    assert mirror.apply(delta(A, 1, [1]))
    assert not mirror.apply(delta(A, 3, [3]))
    assert not mirror.apply(delta(B, 2, [1]))
    assert not mirror.apply(delta(A, 9, reset=True))
    assert mirror.depths([1]) == {A: 1}


def test_two_tiers_of_one_batch_are_no_gap() -> None:
    """Several changes may carry one number; a block on any tier is held."""
    mirror = PrefixMirror()
    assert mirror.apply(delta(A, 1, [1]))
    assert mirror.apply(delta(A, 1, [2], tier=2))
    assert mirror.apply(delta(A, 2, removed=pack([1])))
    assert mirror.depths([2]) == {A: 1}
    assert mirror.depths([1]) == {}


def test_leaving_one_tier_is_not_leaving() -> None:
    """A block that moved from one tier to another is still held."""
    mirror = PrefixMirror()
    mirror.apply(delta(A, 1, [1]))
    mirror.apply(delta(A, 2, [1], tier=2))
    mirror.apply(delta(A, 3, removed=pack([1])))
    assert mirror.depths([1]) == {A: 1}


def test_a_dropped_replica_is_gone_at_once_and_its_slot_is_reused_clean() -> None:
    """Stale bits never show, neither before nor after the sweep."""
    mirror = PrefixMirror()
    mirror.apply(delta(A, 1, [1, 2]))
    mirror.apply(delta(B, 1, [1]))
    mirror.apply(delta(A, 0, dropped=True))
    assert mirror.depths([1, 2]) == {B: 1}
    while mirror.sweep_some(1):
        pass
    assert mirror.num_entries() == 1
    mirror.apply(delta(ReplicaKey("c", 1), 1, [9]))
    assert mirror.depths([1, 2]) == {B: 1}


def test_a_rescan_serves_the_old_state_until_it_is_done() -> None:
    """The new slot shows all at once."""
    mirror = PrefixMirror()
    mirror.apply(delta(A, 1, [1]))
    fresh = mirror.begin("m", seq=7)
    mirror.add(fresh, TIERS[0], [1, 2, 3])
    assert mirror.depths([1, 2, 3]) == {A: 1}
    mirror.commit(A, fresh)
    assert mirror.depths([1, 2, 3]) == {A: 3}
    assert mirror.apply(delta(A, 8, [4]))


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 200),
    depths=st.lists(st.integers(0, 200), min_size=1, max_size=6),
)
def test_jumping_finds_what_walking_finds(length: int, depths: list[int]) -> None:
    """On prefixes, however long, each replica's depth is exact."""
    mirror, chain = PrefixMirror(), list(range(1, length + 1))
    want = {}
    for idx, depth in enumerate(depths):
        key = ReplicaKey(f"w{idx}", 1)
        mirror.apply(delta(key, 1, chain[:depth]))
        if depth:
            want[key] = min(depth, length)
    assert mirror.depths(chain) == want


SMALL = 2048 * BYTES_PER_ENTRY


def test_the_size_is_bounded_and_what_is_looked_up_stays() -> None:
    """A hundred thousand distinct blocks pass through; a prefix in use is still known after it."""
    mirror = PrefixMirror(SMALL)
    hot = list(range(1, 101))
    mirror.apply(delta(A, 1, hot))
    for seq in range(2, 1000):
        mirror.apply(delta(A, seq, list(range(seq * 1000, seq * 1000 + 100))))
        assert mirror.num_entries() <= 2048
        if seq % 4 == 0:
            assert mirror.depths(hot) == {A: 100}
    assert mirror.num_evicted > 90_000
    assert mirror.depths([2000]) == {}
    assert mirror.replicas()[A].num_blocks == mirror.num_entries()
    assert mirror.replicas()[A].is_partial


def test_one_large_change_keeps_the_bound() -> None:
    """More blocks at once than fit: the last of them are kept."""
    mirror = PrefixMirror(SMALL)
    mirror.apply(delta(A, 1, list(range(1, 50_001))))
    assert mirror.num_entries() <= 2048
    assert mirror.depths([50_000]) == {A: 1}


def test_a_model_with_windows_is_never_credited_over_a_hole() -> None:
    """Its early blocks go first, so that a later one says nothing of those between."""
    mirror, chain = PrefixMirror(), list(range(1, 101))
    mirror.set_stepwise({A})
    mirror.apply(delta(A, 1, [block for block in chain if block != 20]))
    mirror.apply(delta(B, 1, chain))
    assert mirror.depths(chain) == {A: 19, B: 100}
    mirror.drop(A)
    assert mirror.depths(chain) == {B: 100}


def test_blocks_on_slower_tiers_are_worth_less() -> None:
    """Each block counts as on the best tier that holds it."""
    mirror, weights = PrefixMirror(), dict(zip(TIERS, (1.0, 0.75, 0.25), strict=True))
    chain = [1, 2, 3, 4]
    mirror.apply(delta(A, 1, [1, 2]))
    mirror.apply(delta(B, 1, chain))
    assert mirror.slower_blocks(chain, mirror.depths(chain), weights) == {}
    mirror.apply(delta(A, 2, [2, 3], tier=2))
    mirror.apply(delta(A, 3, [4], tier=3))
    depths = mirror.depths(chain)
    assert depths == {A: 4, B: 4}
    assert mirror.slower_blocks(chain, depths, weights) == {A: 0.25 + 0.75}


def test_equal_masks_are_one_object() -> None:
    """Memory per entry does not grow with the number of replicas."""
    mirror = PrefixMirror()
    for number in range(100):
        mirror.apply(delta(ReplicaKey(f"w{number}", 1), 1, list(range(1, 50))))
    reader = mirror._table.reader()
    assert len({id(reader(block)) for block in range(1, 50)}) == 1


hashes = st.sets(st.integers(1, 12), max_size=5)
keys = st.sampled_from([A, B, ReplicaKey("a", 2)])


class MirrorMachine(RuleBasedStateMachine):
    """The mirror beside one set per replica and tier."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = PrefixMirror()
        self.truth: dict[ReplicaKey, dict[Tier, set[int]]] = {}
        self.seq: dict[ReplicaKey, int] = {}

    @rule(
        key=keys, tier=st.sampled_from(TIERS), added=hashes, removed=hashes, cleared=st.booleans()
    )
    def change(
        self, key: ReplicaKey, tier: Tier, added: set[int], removed: set[int], cleared: bool
    ) -> None:
        removed -= added
        seq = self.seq[key] = self.seq.get(key, 0) + 1
        one = delta(key, seq, list(added), removed=pack(removed), cleared=cleared, tier=tier)
        assert self.mirror.apply(one)
        held = self.truth.setdefault(key, {each: set() for each in TIERS})
        if cleared:
            held.update({each: set() for each in TIERS})
        held[tier] = (held[tier] - removed) | added

    @rule(key=keys, added=hashes, behind=st.integers(1, 3))
    def repeat_an_old_change(self, key: ReplicaKey, added: set[int], behind: int) -> None:
        seq = self.seq.get(key, 0)
        if seq > behind:
            assert self.mirror.apply(delta(key, seq - behind, list(added)))

    @rule(key=keys, added=hashes)
    def lose_a_change(self, key: ReplicaKey, added: set[int]) -> None:
        assert not self.mirror.apply(delta(key, self.seq.get(key, 0) + 2, list(added)))

    @rule(key=keys)
    def drop(self, key: ReplicaKey) -> None:
        self.mirror.apply(delta(key, 0, dropped=True))
        self.truth.pop(key, None)
        self.seq.pop(key, None)

    @rule(key=keys, held=hashes, jump=st.integers(0, 5))
    def rescan(self, key: ReplicaKey, held: set[int], jump: int) -> None:
        seq = self.seq[key] = self.seq.get(key, 0) + jump
        fresh = self.mirror.begin("m", seq)
        self.mirror.add(fresh, TIERS[0], list(held))
        self.mirror.commit(key, fresh)
        self.truth[key] = {each: set() for each in TIERS} | {TIERS[0]: set(held)}

    @rule(key=keys, held=hashes)
    def fail_a_rescan(self, key: ReplicaKey, held: set[int]) -> None:
        fresh = self.mirror.begin("m", 1)
        self.mirror.add(fresh, TIERS[0], list(held))
        self.mirror.abandon(fresh)

    @rule(entries=st.integers(1, 20))
    def sweep(self, entries: int) -> None:
        self.mirror.sweep_some(entries)

    @invariant()
    def every_block_is_where_the_sets_say(self) -> None:
        for block in range(1, 13):
            want = {
                key: 1 for key, held in self.truth.items() if any(block in s for s in held.values())
            }
            assert self.mirror.depths([block]) == want

    @invariant()
    def sizes_agree(self) -> None:
        for key, held in self.truth.items():
            size = sum(len(blocks) for blocks in held.values())
            assert self.mirror.replicas()[key].num_blocks == size


TestMirrorMachine = MirrorMachine.TestCase
TestMirrorMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)

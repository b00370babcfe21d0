"""The gate and the folding of batches, against the ordered log."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_cache_index.events import PATIENCE_S, Change, Gate, Mode, Replacement, fold
from headrace_cache_index.outcome import Status
from headrace_common.errors import InvalidRequest
from headrace_common.kv_index import TIERS, ReplicaKey, Tier
from headrace_contracts.cache_index.v1.cache_index_pb2 import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
    PublishReply,
    Snapshot,
)
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_CPU, CACHE_TIER_GPU
from headrace_testing.clock import FakeClock
from headrace_testing.memory_index import MemoryIndex

REPLICA = ReplicaKey("w1", 1)


def block(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(8)


def short(*numbers: int) -> set[bytes]:
    return {block(number)[:8] for number in numbers}


def stored(*numbers: int, tier: Tier = CACHE_TIER_GPU) -> KvEvent:
    hashes = b"".join(block(number) for number in numbers)
    return KvEvent(stored=BlocksStored(block_hashes=hashes, tier=tier))


def removed(*numbers: int, tier: Tier = CACHE_TIER_GPU) -> KvEvent:
    hashes = b"".join(block(number) for number in numbers)
    return KvEvent(removed=BlocksRemoved(block_hashes=hashes, tier=tier))


def cleared() -> KvEvent:
    return KvEvent(cleared=AllCleared())


def batch(seq: int, *events: KvEvent) -> KvEventBatch:
    return KvEventBatch(seq=seq, events=events)


def follow(gate: Gate, *seqs: int) -> None:
    for seq in seqs:
        assert isinstance(gate.take_batch(batch(seq)), Change)
        gate.applied(seq)


def test_folds_a_batch_to_its_last_word() -> None:
    """Of several events on one block the last one counts."""
    change = fold(batch(1, stored(1, 2), removed(1), stored(3), removed(9), stored(9)))
    assert change.added == {CACHE_TIER_GPU: short(2, 3, 9)}
    assert change.removed == {CACHE_TIER_GPU: short(1)}


def test_a_clear_voids_what_came_before_it_in_the_batch() -> None:
    """Cleared means all tiers, and only what follows remains."""
    change = fold(batch(1, stored(1), stored(2, tier=CACHE_TIER_CPU), cleared(), stored(3)))
    assert change.cleared
    assert change.added == {CACHE_TIER_GPU: short(3)}
    assert not change.removed


CUT = KvEvent(stored=BlocksStored(block_hashes=b"short", tier=CACHE_TIER_GPU))


@pytest.mark.parametrize("event", [stored(1, tier=0), CUT, KvEvent()])
def test_refuses_malformed_events(event: KvEvent) -> None:
    """No tier, cut hashes and unknown kinds are the publisher's mistakes."""
    with pytest.raises(InvalidRequest):
        fold(batch(1, event))


def test_a_fresh_publisher_is_welcomed() -> None:
    """A first Hello gets an acknowledgement of nothing."""
    assert Gate(10, FakeClock()).open(1, None).acknowledged_seq == 0


def test_a_reconnected_publisher_goes_on_where_the_index_is() -> None:
    """Known and in step: acknowledged; known and behind: replay; unknown: snapshot."""
    assert Gate(10, FakeClock()).open(6, 5).acknowledged_seq == 5
    assert Gate(10, FakeClock()).open(9, 5).replay_from_seq == 6
    assert Gate(10, FakeClock()).open(9, None).snapshot_wanted


def test_a_gap_is_asked_for_once() -> None:
    """Batches behind a gap are not applied, and only the first one asks."""
    gate = Gate(10, FakeClock())
    gate.open(1, None)
    follow(gate, 1, 2)
    reply = gate.take_batch(batch(5))
    assert isinstance(reply, PublishReply)
    assert reply.replay_from_seq == 3
    assert gate.take_batch(batch(6)) is None
    assert gate.num_gaps == 1
    follow(gate, 3, 4, 5, 6)
    assert gate.mode is Mode.FOLLOWING


def test_duplicates_are_dropped() -> None:
    """A batch at or below the watermark is only acknowledged again."""
    gate = Gate(10, FakeClock())
    gate.open(1, None)
    follow(gate, 1, 2)
    reply = gate.take_batch(batch(1, stored(5)))
    assert isinstance(reply, PublishReply)
    assert reply.acknowledged_seq == 2


def test_a_batch_is_not_durable_before_the_store_says_so() -> None:
    """An accepted batch is not acknowledged until it was applied."""
    gate = Gate(10, FakeClock())
    gate.open(1, None)
    assert isinstance(gate.take_batch(batch(1)), Change)
    reply = gate.take_batch(batch(1))
    assert isinstance(reply, PublishReply)
    assert reply.acknowledged_seq == 0
    assert gate.applied(1).acknowledged_seq == 1


def test_an_unanswered_replay_becomes_a_snapshot() -> None:
    """When the gap is still there after a while, a snapshot is wanted."""
    clock = FakeClock()
    gate = Gate(10, clock)
    gate.open(1, None)
    gate.take_batch(batch(3))
    clock.advance(PATIENCE_S)
    reply = gate.take_batch(batch(4))
    assert isinstance(reply, PublishReply)
    assert reply.snapshot_wanted


def test_a_snapshot_comes_in_parts_and_ends_the_search() -> None:
    """Only the last part completes it; the next batch follows on from it."""
    gate = Gate(10, FakeClock())
    gate.open(9, None)
    part = [BlocksStored(block_hashes=block(n), tier=CACHE_TIER_GPU) for n in (1, 2)]
    assert gate.take_snapshot(Snapshot(as_of_seq=8, blocks=part[:1])) is None
    whole = gate.take_snapshot(Snapshot(as_of_seq=8, blocks=part[1:], last=True))
    assert isinstance(whole, Replacement)
    assert whole.blocks == {CACHE_TIER_GPU: short(1, 2)}
    assert gate.replaced(whole.seq).acknowledged_seq == 8
    follow(gate, 9)


def test_of_a_snapshot_above_the_limit_the_beginning_is_taken() -> None:
    """Parents come first and stay; a quarter is left free for what comes next."""
    gate = Gate(8, FakeClock())
    gate.open(9, None)
    parts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11]]
    for numbers in parts:
        hashes = b"".join(map(block, numbers))
        blocks = [BlocksStored(block_hashes=hashes, tier=CACHE_TIER_GPU)]
        is_last = numbers == parts[-1]
        whole = gate.take_snapshot(Snapshot(as_of_seq=8, blocks=blocks, last=is_last))
    assert isinstance(whole, Replacement)
    assert whole.blocks == {CACHE_TIER_GPU: short(1, 2, 3, 4, 5, 6)}


def test_a_snapshot_at_the_limit_is_taken_whole() -> None:
    """Also when a block lies on two tiers."""
    gate = Gate(3, FakeClock())
    gate.open(9, None)
    blocks = [
        BlocksStored(block_hashes=block(1) + block(2), tier=CACHE_TIER_GPU),
        BlocksStored(block_hashes=block(1), tier=CACHE_TIER_CPU),
    ]
    whole = gate.take_snapshot(Snapshot(as_of_seq=8, blocks=blocks, last=True))
    assert isinstance(whole, Replacement)
    assert whole.blocks == {CACHE_TIER_GPU: short(1, 2), CACHE_TIER_CPU: short(1)}


def test_gap_double_and_resync_in_one_story() -> None:
    """1, 2, 4, 4, 3, then a snapshot as of 4 and batch 5: one gap, asked for once, no loop."""
    wire = Wire([], replay_len=0)
    gate, asked = wire.gate, []
    gate.open(1, None)
    story = [
        batch(1, stored(1)), batch(2, stored(2)), batch(4, removed(1)), batch(4, removed(1)),
        batch(3, stored(3)),
        Snapshot(
            as_of_seq=4,
            blocks=[BlocksStored(block_hashes=block(2) + block(3), tier=CACHE_TIER_GPU)],
            last=True,
        ),
        batch(5, stored(4)),
    ]  # fmt: skip
    wire.answer = lambda reply: asked.append(reply.WhichOneof("kind"))  # type: ignore[method-assign]
    for message in story:
        wire.deliver(message)
    assert wire.index.blocks(REPLICA) == {CACHE_TIER_GPU: short(2, 3, 4)}
    assert [kind for kind in asked if kind != "acknowledged_seq"] == ["replay_from_seq"]
    assert (gate.num_gaps, gate.mode, gate.seq) == (1, Mode.FOLLOWING, 5)


events_strategy = st.lists(
    st.one_of(
        st.builds(stored, st.integers(0, 12), st.integers(0, 12), tier=st.sampled_from(TIERS)),
        st.builds(removed, st.integers(0, 12), tier=st.sampled_from(TIERS)),
        st.builds(cleared),
    ),
    max_size=4,
)


class Wire:
    """A worker's log, a bad wire, the gate and the index."""

    def __init__(self, log: list[list[KvEvent]], replay_len: int) -> None:
        self.log = [batch(seq, *events) for seq, events in enumerate(log, 1)]
        self.replay_len, self.clock = replay_len, FakeClock()
        self.gate, self.index = Gate(10_000, self.clock), MemoryIndex()
        self.index.register(REPLICA, "m", 10_000)
        self.inbox: list[KvEventBatch | Snapshot] = []
        self.sent = 0

    def deliver(self, message: KvEventBatch | Snapshot) -> None:
        take = (
            self.gate.take_batch(message)
            if isinstance(message, KvEventBatch)
            else self.gate.take_snapshot(message)
        )
        if isinstance(take, Change):
            outcome = self.index.apply(REPLICA, take)
            take = self.gate.applied(outcome.seq)
            if outcome.status is Status.LOST:
                self.index.register(REPLICA, "m", 10_000)
                take = self.gate.base_lost(0)
        elif isinstance(take, Replacement):
            if self.index.replace(REPLICA, take).status is Status.LOST:
                self.index.register(REPLICA, "m", 10_000)
                self.index.replace(REPLICA, take)
            take = self.gate.replaced(take.seq)
        if take is not None:
            self.answer(take)

    def answer(self, reply: PublishReply) -> None:
        """What the worker does with a reply: replay what it still has, else a snapshot."""
        match reply.WhichOneof("kind"):
            case "replay_from_seq":
                if reply.replay_from_seq > self.sent - self.replay_len:
                    self.inbox.extend(self.log[reply.replay_from_seq - 1 : self.sent])
                else:
                    self.inbox.append(self.snapshot())
            case "snapshot_wanted":
                self.inbox.append(self.snapshot())

    def snapshot(self) -> Snapshot:
        truth = in_order(self.log[: self.sent])
        blocks = [
            BlocksStored(block_hashes=b"".join(h + bytes(8) for h in hashes), tier=tier)
            for tier, hashes in truth.items()
        ]
        return Snapshot(as_of_seq=self.sent, blocks=blocks, last=True)


def in_order(log: list[KvEventBatch]) -> dict[Tier, set[bytes]]:
    """The rules once more, event by event, as the worker itself would."""
    held: dict[Tier, set[bytes]] = {}
    for one in log:
        for event in one.events:
            if event.HasField("cleared"):
                held = {}
                continue
            blocks: Any = event.stored if event.HasField("stored") else event.removed
            joined = blocks.block_hashes
            hashes = {joined[i : i + 8] for i in range(0, len(joined), 16)}
            now = held.setdefault(blocks.tier, set())
            held[blocks.tier] = now | hashes if event.HasField("stored") else now - hashes
    return {tier: hashes for tier, hashes in held.items() if hashes}


@settings(max_examples=300, deadline=None)
@given(log=st.lists(events_strategy, min_size=1, max_size=12), data=st.data())
def test_lost_doubled_and_reordered_batches_end_in_the_state_of_the_log(
    log: list[list[KvEvent]], data: st.DataObject
) -> None:
    """Whatever the wire does, once it is quiet the index equals the ordered log."""
    wire = Wire(log, replay_len=data.draw(st.integers(0, 6), "replay buffer"))
    wire.gate.open(1, None)
    fates = st.sampled_from(["deliver", "lose", "double", "late", "forget"])
    for one in wire.log:
        wire.sent += 1
        wire.clock.advance(data.draw(st.sampled_from([0.0, PATIENCE_S]), "pause"))
        fate = data.draw(fates, "fate")
        if fate == "forget":
            wire.index.forget_all()
        if fate != "lose":
            wire.inbox.append(one)
        if fate == "double":
            wire.inbox.append(one)
        while wire.inbox and fate != "late":
            idx = data.draw(st.integers(0, len(wire.inbox) - 1), "next message")
            wire.deliver(wire.inbox.pop(idx))
    quiesce(wire)
    assert wire.index.blocks(REPLICA) == in_order(wire.log)


def quiesce(wire: Wire) -> None:
    """Deliver the rest in order, then one more batch, until the gate has all of it."""
    wire.log.append(batch(len(wire.log) + 1))
    wire.sent += 1
    wire.inbox.append(wire.log[-1])
    for _ in range(20):
        while wire.inbox:
            wire.deliver(wire.inbox.pop(0))
        if wire.gate.seq == wire.sent:
            return
        wire.clock.advance(PATIENCE_S)
        wire.inbox.append(wire.log[-1])
    raise AssertionError("the gate never caught up")


def test_unreadable_batches_are_made_good_by_few_snapshots() -> None:
    """The first asks at once; one whose batches all are like that is asked every few seconds."""
    clock = FakeClock()
    gate = Gate(10, clock)
    gate.open(1, None)
    follow(gate, 1)
    for wanted in (True, False):
        with pytest.raises(InvalidRequest):
            gate.take_batch(batch(gate.next_seq, KvEvent()))
        assert bool(gate.unreadable()) is wanted
        assert gate.applied(gate.seq).acknowledged_seq == gate.seq
        assert gate.take_batch(batch(gate.next_seq + 1)) is None
        clock.advance(PATIENCE_S - 0.1 if wanted else PATIENCE_S)
        if wanted:
            assert isinstance(gate.take_snapshot(Snapshot(as_of_seq=2, last=True)), Replacement)
            gate.replaced(2)
    reply = gate.ask_again()
    assert reply is not None
    assert reply.snapshot_wanted
    assert gate.num_gaps == 2

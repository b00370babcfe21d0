"""Ids in the forms in which they travel, and the memory of pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_common import blocks
from headrace_common.blocks import packed_ids
from headrace_common.proto_wire import bytes_tag, with_length
from headrace_contracts.worker.v1.worker_pb2 import TokenSequence
from headrace_gateway.token_ids import ChainMemory, PieceMemory, TokenIds

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=300)


@given(IDS, IDS)
def test_both_forms_hold_the_ids(left: list[int], right: list[int]) -> None:
    joined = TokenIds.joined([TokenIds.of(left), TokenIds.of(right)])
    assert joined.listed() == left + right
    assert len(joined) == len(left + right)
    assert joined.packed == packed_ids(left + right)
    wire = bytes_tag(1) + with_length(joined.varints)
    assert TokenSequence.FromString(wire).token_ids == left + right


def test_a_text_is_remembered_for_its_owner() -> None:
    """Nobody can tell by the time it takes what somebody else has sent."""
    memory, ids = PieceMemory(), TokenIds.of([1, 2])
    memory.put((b"a", "text"), ids)
    assert memory.get((b"a", "text")) is ids
    assert memory.get((b"b", "text")) is None


def test_what_is_used_stays_and_the_rest_is_bounded() -> None:
    memory, ids = PieceMemory(max_bytes=100_000), TokenIds.of([1])
    memory.put((b"", "often"), ids)
    for idx in range(1000):
        memory.put((b"", f"seldom {idx}"), ids)
        assert memory.get((b"", "often")) is ids
    remembered = [idx for idx in range(1000) if memory.get((b"", f"seldom {idx}"))]
    assert 100 < len(remembered) < 300
    assert remembered[0] > 700


def test_what_is_asked_for_again_and_again_is_bounded_too() -> None:
    """All of it in turn, more than there is room for."""
    memory, ids = PieceMemory(max_bytes=100_000), TokenIds.of([1])
    for _ in range(5):
        for idx in range(400):
            if memory.get((b"", f"text {idx}")) is None:
                memory.put((b"", f"text {idx}"), ids)
                memory.get((b"", f"text {idx // 2}"))
    kept = sum(memory.get((b"", f"text {idx}")) is not None for idx in range(400))
    assert 0 < kept < 260
    assert len(memory.recent) <= 125


def test_a_very_long_text_is_not_kept() -> None:
    memory = PieceMemory(max_bytes=10_000)
    memory.put((b"", "x" * 10_000), TokenIds.of([1]))
    assert memory.get((b"", "x" * 10_000)) is None


@given(st.lists(st.integers(0, 400), min_size=1, max_size=4), st.sampled_from([1, 16]))
def test_remembered_hashes_are_the_chains(lengths: list[int], block_size: int) -> None:
    """Prompts that share a beginning, and those of another key, which share nothing."""
    memory = ChainMemory(max_bytes=20_000)
    for length in lengths:
        for key in (blocks.chain_key("m", "", b"a"), blocks.chain_key("m", "", b"b")):
            packed = packed_ids(range(length))
            expected = blocks.join(blocks.chain(key, range(length), block_size))
            assert memory.chain(key, packed, block_size) == expected

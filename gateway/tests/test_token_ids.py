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


def test_a_text_is_encoded_once_for_each_owner() -> None:
    """Nobody can tell by the time it takes what somebody else has sent."""
    memory, encoded = PieceMemory(), []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [1, 2]

    for owner in (b"a", b"a", b"b", b"b"):
        assert memory.ids(owner, "text", encode).listed() == [1, 2]
    assert encoded == ["text", "text"]


def test_what_is_used_stays_and_the_rest_is_bounded() -> None:
    memory, encoded = PieceMemory(max_bytes=100_000), []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [1]

    for idx in range(1000):
        memory.ids(b"", "often", encode)
        memory.ids(b"", f"seldom {idx}", encode)
    assert encoded.count("often") == 1
    memory.ids(b"", "seldom 0", encode)
    assert encoded.count("seldom 0") == 2


def test_a_very_long_text_is_not_kept() -> None:
    memory, encoded = PieceMemory(max_bytes=10_000), []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [1] * len(text)

    for _ in range(2):
        memory.ids(b"", "x" * 10_000, encode)
    assert len(encoded) == 2


@given(st.lists(st.integers(0, 400), min_size=1, max_size=4), st.sampled_from([1, 16]))
def test_remembered_hashes_are_the_chains(lengths: list[int], block_size: int) -> None:
    """Prompts that share a beginning, and those of another key, which share nothing."""
    memory = ChainMemory(max_bytes=20_000)
    for length in lengths:
        for key in (blocks.chain_key("m", "", b"a"), blocks.chain_key("m", "", b"b")):
            packed = packed_ids(range(length))
            expected = blocks.join(blocks.chain(key, range(length), block_size))
            assert memory.chain(key, packed, block_size) == expected

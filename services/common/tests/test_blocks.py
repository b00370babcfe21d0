"""The chain of block hashes: the same everywhere, and apart where it must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common import blocks

KEY = blocks.chain_key("model-1", "", b"tenant-a")
TOKENS = st.lists(st.integers(0, 2**31), max_size=70)


def test_golden_vector() -> None:
    """Any change of the algorithm is a new recipe, never a silent one."""
    hashes = blocks.chain(KEY, range(48))
    assert [h.hex() for h in hashes] == [
        "e599f7bb0daf4555ab031c7b21fc21bc",
        "cfdbeda17ef640f1d944654e5405d198",
        "f6107cf649be430e213dc992d52dade4",
    ]


@given(TOKENS, TOKENS)
def test_a_prefix_has_the_same_leading_hashes(head: list[int], tail: list[int]) -> None:
    whole, part = blocks.chain(KEY, head + tail), blocks.chain(KEY, head)
    assert whole[: len(part)] == part
    assert len(part) == len(head) // 16


@given(st.lists(st.integers(0, 2**31), min_size=48, max_size=48), st.integers(0, 47))
def test_a_changed_token_changes_its_block_and_all_later_ones(ids: list[int], at: int) -> None:
    changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    same = [a == b for a, b in zip(blocks.chain(KEY, ids), blocks.chain(KEY, changed), strict=True)]
    assert same == [i < at // 16 for i in range(3)]


@pytest.mark.parametrize(
    "other",
    [("model-2", "", b"tenant-a"), ("model-1", "lora", b"tenant-a"), ("model-1", "", b"tenant-b"),
     ("model-1t", "", b"enant-a")],
)  # fmt: skip
def test_model_adapter_and_salt_keep_chains_apart(other: tuple[str, str, bytes]) -> None:
    ids = range(160)
    assert not set(blocks.chain(KEY, ids)) & set(blocks.chain(blocks.chain_key(*other), ids))


def test_a_block_in_the_middle_never_matches_a_start() -> None:
    same = [5] * 48
    assert len(set(blocks.chain(KEY, same))) == 3


def test_a_chain_can_go_on_from_its_parent() -> None:
    whole = blocks.chain(KEY, range(64))
    assert blocks.chain(KEY, range(32, 64), parent=whole[1]) == whole[2:]


def test_join_and_split_are_inverse_and_split_refuses_fragments() -> None:
    hashes = blocks.chain(KEY, range(64))
    assert blocks.split(blocks.join(hashes)) == hashes
    with pytest.raises(ValueError, match="multiple"):
        blocks.split(b"x" * 17)


def test_self_test_depends_on_model_and_block_size() -> None:
    made = {blocks.self_test(m, size) for m in ("a", "b") for size in (16, 64)}
    assert len(made) == 4

"""The index's key names and encodings."""

import pytest

from headrace_common.blocks import chain, chain_key, join
from headrace_common.kv_index import (
    TIERS,
    IndexKeys,
    RegistryEntry,
    ReplicaKey,
    chain_ints,
    pad,
    short_ints,
    shorten,
)

HASHES = chain(chain_key("model"), list(range(64)))


def test_both_ways_to_shorten_agree() -> None:
    """The writer's 8 bytes and the reader's integers name the same block."""
    assert short_ints(join(shorten(join(HASHES)))) == tuple(chain_ints(join(HASHES)))
    assert shorten(join(HASHES)) == [block[:8] for block in HASHES]


@pytest.mark.parametrize("read", [shorten, chain_ints])
def test_cut_hashes_are_refused(read: object) -> None:
    """Half a hash is an error, never a wrong hash."""
    with pytest.raises(ValueError, match="no multiple of 16"):
        read(b"x" * 24)  # type: ignore[operator]  # parametrised function
    with pytest.raises(ValueError, match="no multiple of 8"):
        short_ints(b"x" * 12)


def test_registry_entry_survives_its_text() -> None:
    """What is written is read, also when the model's name holds the separator."""
    entry = RegistryEntry(2**64 - 1, 7, 1_800_000_000_000, 4096, "org/model|v1")
    assert RegistryEntry.decode(entry.encode().encode()) == entry
    with pytest.raises(ValueError, match="not a registry entry"):
        RegistryEntry.decode(b"1|2|3")


def test_padded_incarnations_compare_as_numbers() -> None:
    """Scripts compare text; a later life must be the greater one."""
    lives = [1, 9, 10, 2**53 + 1, 2**64 - 1]
    assert sorted(lives, key=pad) == lives


def test_no_two_sets_share_a_key() -> None:
    """Separators inside names cannot make two replicas one."""
    keys = IndexKeys()
    names = {
        name
        for model, worker in [("a:b", "c"), ("a", "b:c"), ("a", "b")]
        for life in (1, 2)
        for name in keys.all_blocks(model, ReplicaKey(worker, life))
    }
    assert len(names) == 3 * 2 * len(TIERS)


def test_replica_key_survives_its_message() -> None:
    """A key and its message name the same life."""
    key = ReplicaKey("w1", 2**63)
    assert ReplicaKey.of(key.to_ref()) == key

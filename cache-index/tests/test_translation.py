"""An engine's own hashes, told in ours."""

from typing import Any

import pytest

from headrace_cache_index.engine_events import decode_batch
from headrace_cache_index.translation import Translator
from headrace_common.blocks import chain, chain_key, salt_text
from headrace_common.kv_index import Tier
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_CPU, CACHE_TIER_DISK, CACHE_TIER_GPU
from headrace_testing.zmq_engine import CLEARED, Form, encode, removed, stored

TOKENS = list(range(100, 100 + 16 * 8))


def ours(count: int, *, adapter: str = "", salt: bytes = b"", start: int = 0) -> set[bytes]:
    hashes = chain(chain_key("model", adapter, salt), TOKENS)
    return {one[:8] for one in hashes[start:count]}


class Engine:
    """A translator and what the index would hold after its changes."""

    def __init__(self, *, windows_declared: bool = False, capacity_blocks: int = 1000) -> None:
        self.translator = Translator(
            "model", 16, capacity_blocks, windows_declared=windows_declared
        )
        self.held: dict[Tier, set[bytes]] = {}

    def tell(self, *events: dict[str, Any], form: Form = "maps") -> dict[Tier, set[bytes]]:
        change = self.translator.apply(decode_batch(encode(list(events), form)), 1)
        if change.cleared:
            self.held = {}
        for tier, gone in change.removed.items():
            self.held[tier] = self.held.get(tier, set()) - gone
        for tier, added in change.added.items():
            self.held[tier] = self.held.get(tier, set()) | added
        self.held = {tier: held for tier, held in self.held.items() if held}
        assert self.translator.snapshot(1).blocks == self.held
        return self.held


@pytest.mark.parametrize("form", ["arrays", "maps"])
def test_blocks_are_hashed_anew(form: Form) -> None:
    """By our recipe, over their tokens and their parent, whatever the engine calls them."""
    engine = Engine()
    engine.tell(stored([11, 12], TOKENS[:32]), form=form)
    assert engine.tell(stored([b"x"], TOKENS[32:48], parent=12), form=form) == {
        CACHE_TIER_GPU: ours(3)
    }
    assert engine.tell(removed([b"x", 999]), form=form) == {CACHE_TIER_GPU: ours(2)}
    assert engine.tell(CLEARED, form=form) == {}


def test_adapters_and_salts_separate() -> None:
    """The salt is written so that it can be read back; each goes into the chain's key."""
    engine = Engine()
    salt = b"\x01tenant"
    keys = [[salt_text(salt)], None]
    held = engine.tell(stored([1, 2], TOKENS[:32], extra_keys=keys))
    assert held == {CACHE_TIER_GPU: ours(2, salt=salt)}
    adapted = [["lora-a", salt_text(salt)], ["lora-a"]]
    held = engine.tell(stored([3, 4], TOKENS[:32], lora_name="lora-a", extra_keys=adapted))
    assert held[CACHE_TIER_GPU] == ours(2, salt=salt) | ours(2, adapter="lora-a", salt=salt)


def test_what_cannot_be_told_is_left_out_with_all_that_follows() -> None:
    """An unknown parent, an image, a foreign salt, too few tokens: never a guess."""
    engine = Engine()
    assert engine.tell(stored([2], TOKENS[16:32], parent=1)) == {}
    assert engine.tell(stored([3, 4], TOKENS[:32], extra_keys=[["image-hash"], None])) == {}
    assert engine.tell(stored([5], TOKENS[:16], extra_keys=[["users own salt"]])) == {}
    assert engine.tell(stored([6], TOKENS[:10])) == {}
    assert engine.tell(stored([7], TOKENS[:24], block_size=24)) == {}
    assert engine.translator.num_left_out == 6
    assert engine.tell(stored([8, 9], TOKENS[:32])) == {CACHE_TIER_GPU: ours(2)}


def test_tiers_are_kept_apart() -> None:
    """A block in host memory stays known when it leaves the device."""
    engine = Engine()
    engine.tell(stored([1], TOKENS[:16]))
    engine.tell(stored([1], TOKENS[:16], medium="CPU"), stored([1], TOKENS[:16], medium="fs"))
    held = engine.tell(removed([1]))
    assert held == {CACHE_TIER_CPU: ours(1), CACHE_TIER_DISK: ours(1)}


def test_longer_blocks_are_several_of_ours() -> None:
    """An engine's block of 32 tokens is two of ours, both or none."""
    engine = Engine()
    assert engine.tell(stored([1, 2], TOKENS[:64], block_size=32)) == {CACHE_TIER_GPU: ours(4)}
    assert engine.tell(removed([2])) == {CACHE_TIER_GPU: ours(2)}


def test_a_block_counts_while_all_groups_of_layers_hold_it() -> None:
    """The windowed layers drop early blocks: these can no longer be resumed from."""
    engine = Engine(windows_declared=True)
    windowed = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    whole = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    blocks: list[int | bytes] = [1, 2, 3]
    held = engine.tell(
        stored(blocks, TOKENS[:48], **whole), stored(blocks, TOKENS[:48], **windowed)
    )
    assert held == {CACHE_TIER_GPU: ours(3)}
    assert engine.tell(removed([1], group_idx=1)) == {CACHE_TIER_GPU: ours(3, start=1)}
    assert engine.tell(stored([4], TOKENS[48:64], parent=3, **whole)) == {
        CACHE_TIER_GPU: ours(3, start=1)
    }


def test_undeclared_windows_are_no_affinity() -> None:
    """Readers would jump over holes: nothing of such an engine is indexed."""
    engine = Engine()
    engine.tell(stored([1], TOKENS[:16]))
    assert engine.tell(stored([1], TOKENS[:16], group_idx=1, kv_cache_spec_kind="mamba")) == {}
    assert engine.translator.is_refused
    assert engine.tell(stored([2], TOKENS[:16])) == {}
    assert engine.translator.num_blocks() == 0


def test_memory_is_bounded() -> None:
    """Beyond the capacity the oldest blocks are given up, in the index too."""
    engine = Engine(capacity_blocks=3)
    engine.tell(stored([1, 2], TOKENS[:32]))
    held = engine.tell(stored([3, 4], TOKENS[32:64], parent=2))
    assert held == {CACHE_TIER_GPU: ours(4, start=1)}
    assert engine.translator.num_blocks() == 3


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x01", encode([{"type": "BlockStored"}])])
def test_other_protocols_are_refused(payload: bytes) -> None:
    """What is no batch of events is an error, not an empty batch."""
    with pytest.raises(ValueError, match="KV events"):
        decode_batch(payload)


def test_unknown_kinds_of_events_are_passed_over() -> None:
    """Engines grow."""
    assert decode_batch(encode([{"type": "BlockMoved", "from": 1}, CLEARED]))

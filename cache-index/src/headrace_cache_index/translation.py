"""Pure: what an engine of another make holds, in our block hashes.

Its own hashes are opaque names. Each stored block's tokens are hashed anew by our recipe, under the
parent's hash; the salt of the tenant comes back out of the engine's extra keys (`salt_text`). What
cannot be told exactly is left out, with all that follows on it: a block whose parent is unknown,
or one with images or embeddings in its hash. So the index may miss blocks, and never invents one.

Engines with windowed layers keep several groups of layers, which drop blocks each for itself: a
block counts while all groups hold it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace_cache_index.engine_events import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
)
from headrace_cache_index.events import Change, Replacement
from headrace_common.blocks import ROOT, chain, chain_key, salt_of_text
from headrace_common.kv_index import SHORT_HASH_BYTES, TIERS, Tier


@dataclass(slots=True)
class _Block:
    """One block of the engine."""

    key: bytes
    # Our hashes of it: several if the engine's blocks are longer than ours.
    hashes: tuple[bytes, ...]
    # Groups that hold it, by tier.
    groups: dict[Tier, set[int]] = field(default_factory=dict)


class Translator:
    """Follows one engine's life.

    Args:
        fingerprint: identity of the model.
        block_size: tokens of our blocks.
        capacity_blocks: engine blocks remembered at most; beyond it the oldest is given up.
        windows_declared: whether the model's recipe names a window. If not, and the engine has
            windowed groups, nothing of it is indexed: it would be counted wrongly.
    """

    def __init__(
        self, fingerprint: str, block_size: int, capacity_blocks: int, *, windows_declared: bool
    ) -> None:
        self._fingerprint, self._block_size = fingerprint, block_size
        self._capacity_blocks, self._windows_declared = capacity_blocks, windows_declared
        self._blocks: OrderedDict[EngineHash, _Block] = OrderedDict()
        self._groups: set[int] = {0}
        # What the index was last told.
        self._told: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}
        self.num_left_out = 0
        self.is_refused = False

    def apply(self, events: Iterable[EngineEvent], seq: int) -> Change:
        """Take in the events of one message; return what they change in the index as *seq*."""
        change, touched = Change(seq), set[EngineHash]()
        for event in events:
            match event:
                case EngineCleared():
                    self._blocks.clear()
                    touched.clear()
                    change = Change(seq, cleared=True)
                    self._told = {tier: set() for tier in TIERS}
                case EngineStored():
                    touched |= self._store(event)
                case EngineRemoved():
                    touched |= self._remove(event)
        gone = self._make_room()
        if self.is_refused:
            # Nothing of this engine is indexed any more, so nothing of it need be known.
            gone += self._blocks.values()
            self._blocks.clear()
        for name in touched & self._blocks.keys():
            block = self._blocks[name]
            self._tell(block, change)
            if not any(block.groups.values()):
                del self._blocks[name]
        for block in gone:
            self._tell(block, change)
        return change

    def snapshot(self, seq: int) -> Replacement:
        """Return everything that the index should hold, as of *seq*."""
        return Replacement(seq, {tier: set(told) for tier, told in self._told.items() if told})

    def clear(self) -> None:
        """Forget everything, as for a new life of the engine."""
        self.apply([EngineCleared()], 0)

    def num_blocks(self) -> int:
        """Count the engine's blocks that are known."""
        return len(self._blocks)

    def num_told(self) -> int:
        """Count the blocks that the index should hold."""
        return sum(map(len, self._told.values()))

    def shrink(self, num_blocks: int) -> None:
        """Give up the oldest blocks until the index should hold *num_blocks* at most."""
        change = Change(0)
        while self._blocks and self.num_told() > num_blocks:
            self._tell(self._give_up(), change)

    def _store(self, event: EngineStored) -> set[EngineHash]:
        if event.is_windowed and not self._windows_declared:
            self.is_refused = True
        if self.is_refused:
            self.num_left_out += len(event.hashes)
            return set()
        fresh_group = event.group not in self._groups
        self._groups.add(event.group)
        touched = set(self._blocks) if fresh_group else set[EngineHash]()
        per_block = event.block_size // self._block_size
        fits = event.block_size % self._block_size == 0
        enough = len(event.token_ids) >= len(event.hashes) * event.block_size
        for idx, name in enumerate(event.hashes):
            block = self._blocks.get(name)
            if block is None and fits and enough:
                block = self._translate(event, idx, per_block)
            if block is None:
                # What follows on it has an unknown parent and is left out as well.
                self.num_left_out += 1
                continue
            # Moves it to the end: the oldest is given up first.
            self._blocks[name] = block
            self._blocks.move_to_end(name)
            block.groups.setdefault(event.tier, set()).add(event.group)
            touched.add(name)
        return touched

    def _translate(self, event: EngineStored, idx: int, per_block: int) -> _Block | None:
        extra = event.extra_keys[idx] if event.extra_keys is not None else ()
        parent_name = event.hashes[idx - 1] if idx else event.parent
        if parent_name is None:
            salt = _salt(extra, event.adapter)
            if salt is None:
                return None
            key, parent = chain_key(self._fingerprint, event.adapter, salt), ROOT
        else:
            before = self._blocks.get(parent_name)
            if before is None or _salt(extra, event.adapter) != b"":
                return None
            key, parent = before.key, before.hashes[-1]
        start = idx * event.block_size
        tokens = event.token_ids[start : start + per_block * self._block_size]
        return _Block(key, tuple(chain(key, tokens, self._block_size, parent)))

    def _remove(self, event: EngineRemoved) -> set[EngineHash]:
        touched = set()
        for name in event.hashes:
            block = self._blocks.get(name)
            if block is not None and event.tier in block.groups:
                block.groups[event.tier].discard(event.group)
                touched.add(name)
        return touched

    def _make_room(self) -> list[_Block]:
        gone = []
        while len(self._blocks) > self._capacity_blocks:
            gone.append(self._give_up())
        return gone

    def _give_up(self) -> _Block:
        _, block = self._blocks.popitem(last=False)
        block.groups.clear()
        return block

    def _tell(self, block: _Block, change: Change) -> None:
        for tier in TIERS:
            is_held = not self.is_refused and block.groups.get(tier, set()) >= self._groups
            told = self._told[tier]
            added = change.added.setdefault(tier, set())
            removed = change.removed.setdefault(tier, set())
            for one in block.hashes:
                short = one[:SHORT_HASH_BYTES]
                if is_held and short not in told:
                    told.add(short)
                    removed.discard(short)
                    added.add(short)
                elif not is_held and short in told:
                    told.discard(short)
                    added.discard(short)
                    removed.add(short)


def _salt(extra: Sequence[Hashable], adapter: str) -> bytes | None:
    """Return the tenant's salt out of a block's extra keys; None if something else is in there."""
    salt = b""
    for one in extra:
        if one == adapter:
            continue
        found = salt_of_text(one) if isinstance(one, str) else None
        if found is None:
            return None
        salt = found
    return salt

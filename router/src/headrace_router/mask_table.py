"""Pure: block hash -> bitmask of who holds it, per tier, bounded in size and in every step's time.

The entries are spread over many dicts by the hash's low bits. One dict of millions would stop the
loop for as long as it takes to copy it whenever it grows, and its oldest entries lie behind as many
gaps as have left before them. Of many small ones each is copied, searched or cleared within a
millisecond or two. Equal masks are one object, so an entry costs the same with 256 replicas as
with 8.

Before a dict would exceed its share its oldest entries leave, and those that a lookup has met
lately get a second chance (CLOCK, an approximation of LRU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from headrace_common.kv_index import TIERS, Tier

_MIN_ENTRIES = 1024
# About so many entries in each part, and at most so many parts.
_PART_ENTRIES = 8_192
_MAX_PARTS = 2048
# Share of a part that leaves at once, so that its gaps are not passed for each block alone.
_EVICTED_SHARE = 64
# Distinct masks shared at most; beyond that sharing begins anew.
_MAX_SHARED_MASKS = 65_536


class MaskTable:
    """Belongs to one event loop.

    Args:
        max_entries: bound on the hashes of all tiers.
        on_evicted: told the mask of each entry that had to leave.
    """

    def __init__(self, max_entries: int, on_evicted: Callable[[int], None]) -> None:
        self.max_entries = max(_MIN_ENTRIES, max_entries)
        num_parts = 1
        while num_parts < _MAX_PARTS and num_parts * _PART_ENTRIES < self.max_entries:
            num_parts *= 2
        self._low = num_parts - 1
        self._masks: dict[Tier, list[dict[int, int]]] = {
            tier: [{} for _ in range(num_parts)] for tier in TIERS
        }
        self.num_by_tier = dict.fromkeys(TIERS, 0)
        # What each part may still take, all tiers together.
        self._room = [self.max_entries // num_parts] * num_parts
        self._evicted_at_once = max(1, self._room[0] // _EVICTED_SHARE)
        self._recent: list[set[int]] = [set() for _ in range(num_parts)]
        self._max_recent = self._room[0] // 4
        self._shared: dict[int, int] = {}
        self._on_evicted = on_evicted

    @property
    def num_entries(self) -> int:
        """The hashes of all tiers."""
        return sum(self.num_by_tier.values())

    def add(self, tier: Tier, hashes: Iterable[int], bit: int) -> int:
        """Set a bit in the masks of *hashes*; return in how many it was not set."""
        parts, room, low, shared = self._masks[tier], self._room, self._low, self._shared
        num_added = num_new = 0
        for block in hashes:
            place = block & low
            masks = parts[place]
            mask = masks.get(block)
            if mask is None:
                if room[place] <= 0:
                    self._evict(place)
                room[place] -= 1
                masks[block] = bit
                num_new += 1
            elif not mask & bit:
                mask |= bit
                masks[block] = shared.setdefault(mask, mask)
                num_added += 1
        self.num_by_tier[tier] += num_new
        if len(shared) > _MAX_SHARED_MASKS:
            shared.clear()
        return num_added + num_new

    def remove(self, tier: Tier, hashes: Iterable[int], bit: int) -> int:
        """Clear a bit in the masks of *hashes*; return in how many it was set."""
        parts, low, shared = self._masks[tier], self._low, self._shared
        num_removed = 0
        for block in hashes:
            masks = parts[block & low]
            mask = masks.get(block, 0)
            if mask & bit:
                num_removed += 1
                if mask == bit:
                    del masks[block]
                    self._room[block & low] += 1
                    self.num_by_tier[tier] -= 1
                else:
                    mask &= ~bit
                    masks[block] = shared.setdefault(mask, mask)
        return num_removed

    def reader(self) -> Callable[[int], int]:
        """Return what looks up who holds a block, on any tier."""
        used = [parts for tier, parts in self._masks.items() if self.num_by_tier[tier]]
        low = self._low
        if len(used) != 1:
            return self._on_any_tier
        parts = used[0]
        return lambda block: parts[block & low].get(block, 0)

    def on_tier(self, tier: Tier, block: int) -> int:
        """Return who holds a block on one tier."""
        return self._masks[tier][block & self._low].get(block, 0)

    def remember(self, hashes: Sequence[int]) -> None:
        """Give entries a second chance; of no use before the table fills."""
        if self.num_entries <= self.max_entries * 3 // 4:
            return
        recent, low = self._recent, self._low
        for block in hashes:
            met = recent[block & low]
            if len(met) > self._max_recent:
                met.clear()
            met.add(block)

    def sweep(self, mask: int) -> Sweep:
        """Return a pass that clears the bits in *mask* everywhere."""
        return Sweep(self, mask)

    def parts(self) -> list[tuple[Tier, int]]:
        """Name the parts that hold something now, for `clear_bits`."""
        return [
            (tier, place)
            for tier, parts in self._masks.items()
            for place, masks in enumerate(parts)
            if masks
        ]

    def hashes_of(self, tier: Tier, place: int) -> list[int]:
        """Return the hashes in one part."""
        return list(self._masks[tier][place])

    def clear_bits(self, tier: Tier, place: int, hashes: Iterable[int], stale: int) -> None:
        """Clear the bits in *stale* of some entries of a part."""
        masks = self._masks[tier][place]
        for block in hashes:
            mask = masks.get(block, 0)
            if mask & stale:
                if kept := mask & ~stale:
                    masks[block] = self._shared.setdefault(kept, kept)
                else:
                    del masks[block]
                    self._room[place] += 1
                    self.num_by_tier[tier] -= 1

    def _on_any_tier(self, block: int) -> int:
        holders = 0
        for parts in self._masks.values():
            holders |= parts[block & self._low].get(block, 0)
        return holders

    def _evict(self, place: int) -> None:
        """Let the oldest entries of a part go."""
        recent, left = self._recent[place], self._evicted_at_once
        tier = max(TIERS, key=lambda one: len(self._masks[one][place]))
        masks = self._masks[tier][place]
        while left > 0 and masks:
            for block in list(islice(masks, left)):
                mask = masks.pop(block)
                if block in recent:
                    recent.discard(block)
                    masks[block] = mask
                else:
                    left -= 1
                    self._room[place] += 1
                    self.num_by_tier[tier] -= 1
                    self._on_evicted(mask)


class Sweep:
    """A pass over all entries of a table, in steps."""

    def __init__(self, table: MaskTable, mask: int) -> None:
        self.mask, self._table = mask, table
        self._parts = table.parts()
        self._hashes: list[int] = []
        self._part = (TIERS[0], 0)

    def step(self, max_entries: int) -> bool:
        """Handle some entries; tell whether more are left."""
        while max_entries > 0 and (self._hashes or self._parts):
            if not self._hashes:
                self._part = self._parts.pop()
                self._hashes = self._table.hashes_of(*self._part)
            some = self._hashes[-max_entries:]
            del self._hashes[-max_entries:]
            self._table.clear_bits(*self._part, some, self.mask)
            max_entries -= len(some)
        return bool(self._hashes or self._parts)

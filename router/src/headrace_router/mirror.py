"""Pure: the prefix index in memory, a dict from block hash to a bitmask of replicas.

Every replica owns one bit, its slot. To forget a replica its slot is retired, one operation; the
stale bits are masked out of every answer and swept away later, in slices. A replica that is read
again gets a fresh slot, filled while the old one goes on serving.

Lookups jump: a chain is prefix-closed on each replica (parents are stored before and dropped after
their children), so if a block 32 further on is held by the same replicas, all between are. Where
that is wrong the answer is wrong, and only the speed suffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace_common.kv_index import TIERS, ReplicaKey, Tier, short_ints
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta

_STRIDE = 32


@dataclass(slots=True)
class Mirrored:
    """What the mirror knows of one replica's place in the index."""

    model: str
    slot: int
    # Last batch that is in the mirror.
    seq: int = 0
    num_blocks: int = 0


class PrefixMirror:
    """hash -> replicas, per tier. Belongs to one event loop."""

    def __init__(self) -> None:
        self._masks: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}
        self._replicas: dict[ReplicaKey, Mirrored] = {}
        self._key_of_slot: dict[int, ReplicaKey] = {}
        self._live_mask = 0
        self._num_slots = 0
        self._free_slots: list[int] = []
        self._retired_mask = 0
        self._sweep: _Sweep | None = None

    def replicas(self) -> dict[ReplicaKey, Mirrored]:
        """Return what is known, by replica. Read only."""
        return self._replicas

    def num_entries(self) -> int:
        """Count the hashes of all tiers."""
        return sum(len(masks) for masks in self._masks.values())

    def apply(self, delta: IndexDelta) -> bool:
        """Apply one change.

        Returns:
            False if the replica must be read again from its sets: changes are missing, or the
            change says so.
        """
        key = ReplicaKey.of(delta.replica)
        if delta.dropped:
            self.drop(key)
            return True
        known = self._replicas.get(key)
        if delta.reset or (known is None and delta.seq > 1):
            return False
        if known is None:
            known = self.begin(delta.model)
            self.commit(key, known)
        if delta.seq > known.seq + 1:
            return False
        if delta.seq < known.seq:
            return True
        known.seq = delta.seq
        if delta.cleared:
            fresh = self.begin(known.model, known.seq)
            self.commit(key, fresh)
            known = fresh
        tier = delta.tier or TIERS[0]
        self._remove(known, tier, short_ints(delta.removed))
        self.add(known, tier, short_ints(delta.added))
        return True

    def begin(self, model: str, seq: int = 0) -> Mirrored:
        """Open a slot that no lookup sees before `commit`."""
        if self._free_slots:
            return Mirrored(model, self._free_slots.pop(), seq)
        self._num_slots += 1
        return Mirrored(model, self._num_slots - 1, seq)

    def add(self, known: Mirrored, tier: Tier, hashes: Iterable[int]) -> None:
        """Add blocks to a slot. Idempotent."""
        masks, bit, num_added = self._masks[tier], 1 << known.slot, 0
        for block in hashes:
            mask = masks.get(block, 0)
            if not mask & bit:
                masks[block] = mask | bit
                num_added += 1
        known.num_blocks += num_added

    def commit(self, key: ReplicaKey, fresh: Mirrored) -> None:
        """Let lookups see a slot in the place of the replica's former one."""
        self.drop(key)
        self._replicas[key] = fresh
        self._key_of_slot[fresh.slot] = key
        self._live_mask |= 1 << fresh.slot

    def abandon(self, unused: Mirrored) -> None:
        """Give back a slot that was never committed."""
        self._retired_mask |= 1 << unused.slot

    def drop(self, key: ReplicaKey) -> None:
        """Forget a replica. Idempotent."""
        known = self._replicas.pop(key, None)
        if known is not None:
            del self._key_of_slot[known.slot]
            self._live_mask &= ~(1 << known.slot)
            self._retired_mask |= 1 << known.slot

    def depths(self, chain: Sequence[int]) -> dict[ReplicaKey, int]:
        """Count the leading blocks of *chain* that each replica holds on any tier.

        Replicas that hold none are left out.
        """
        found: dict[ReplicaKey, int] = {}
        holders = self._reader()
        alive = holders(chain[0], 0) & self._live_mask if chain else 0
        position = 0
        while alive and position < len(chain):
            probe = min(position + _STRIDE, len(chain) - 1)
            if holders(chain[probe], 0) & alive != alive:
                alive = self._walk(chain[position : probe + 1], position, alive, found)
            position = probe + 1
        self._note(alive, len(chain), found)
        return found

    def sweep_some(self, max_entries: int) -> bool:
        """Clear some stale bits of retired slots; tell whether more is to do."""
        if self._sweep is None:
            if not self._retired_mask:
                return False
            self._sweep = _Sweep(self._masks, self._retired_mask)
            self._retired_mask = 0
        if self._sweep.step(max_entries):
            return True
        self._free_slots += _bits(self._sweep.mask)
        self._sweep = None
        return self._retired_mask != 0

    def _remove(self, known: Mirrored, tier: Tier, hashes: Iterable[int]) -> None:
        masks, bit = self._masks[tier], 1 << known.slot
        for block in hashes:
            mask = masks.get(block, 0)
            if mask & bit:
                known.num_blocks -= 1
                if mask == bit:
                    del masks[block]
                else:
                    masks[block] = mask & ~bit

    def _reader(self) -> Callable[[int, int], int]:
        """Return what looks a block up: a plain `dict.get` as long as one tier is in use."""
        used = [masks for masks in self._masks.values() if masks]
        return used[0].get if len(used) == 1 else self._on_any_tier

    def _on_any_tier(self, block: int, default: int) -> int:
        holders = default
        for masks in self._masks.values():
            holders |= masks.get(block, 0)
        return holders

    def _walk(
        self, blocks: Sequence[int], start: int, alive: int, found: dict[ReplicaKey, int]
    ) -> int:
        """Step through *blocks*, noting who drops out where; return who is left."""
        holders = self._reader()
        for position, block in enumerate(blocks, start):
            still = holders(block, 0) & alive
            if still != alive:
                self._note(alive & ~still, position, found)
                alive = still
                if not alive:
                    break
        return alive

    def _note(self, slots: int, depth: int, found: dict[ReplicaKey, int]) -> None:
        if slots and depth:
            for slot in _bits(slots):
                found[self._key_of_slot[slot]] = depth


class _Sweep:
    """A pass over all entries that clears the bits in `mask`."""

    def __init__(self, masks: dict[Tier, dict[int, int]], mask: int) -> None:
        self.mask = mask
        self._todo = [(one, list(one)) for one in masks.values() if one]

    def step(self, max_entries: int) -> bool:
        """Handle some entries; tell whether more are left."""
        keep = ~self.mask
        while self._todo and max_entries > 0:
            masks, hashes = self._todo[-1]
            for block in hashes[-max_entries:]:
                mask = masks.get(block)
                if mask is not None and mask & self.mask:
                    if mask & keep:
                        masks[block] = mask & keep
                    else:
                        del masks[block]
            done = min(max_entries, len(hashes))
            del hashes[len(hashes) - done :]
            max_entries -= done
            if not hashes:
                self._todo.pop()
        return bool(self._todo)


def _bits(mask: int) -> list[int]:
    slots = []
    while mask:
        lowest = mask & -mask
        slots.append(lowest.bit_length() - 1)
        mask ^= lowest
    return slots

"""Pure: the prefix index in memory, from block hash to a bitmask of replicas (`mask_table`).

Every replica owns one bit, its slot. To forget a replica its slot is retired, one operation; the
stale bits are masked out of every answer and swept away later, in slices. A replica that is read
again gets a fresh slot, filled while the old one goes on serving.

Lookups jump: a chain is prefix-closed on each replica (parents are stored before and dropped after
their children), so if a block 32 further on is held by the same replicas, all between are; where
some drop out, the place is found by halves. Where that is wrong the answer is wrong, and only the
speed suffers. Replicas whose model has layers with a window do not keep that order (early blocks go
first), so where one of them is in play the chain is walked block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from headrace_common.kv_index import TIERS, ReplicaKey, Tier, short_ints
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_router.mask_table import MaskTable, Sweep

_STRIDE = 32
# What one entry costs at most, whatever the dict's load; measured by benchmarks/index.py.
BYTES_PER_ENTRY = 140
# Blocks looked at per lookup to tell how much of a prefix lies on slower tiers.
_MAX_TIER_PROBES = 64


@dataclass(slots=True)
class Mirrored:
    """What the mirror knows of one replica's place in the index."""

    model: str
    slot: int
    # 1 << slot, one object for all entries of a sole holder.
    bit: int
    # Last batch that is in the mirror.
    seq: int = 0
    num_blocks: int = 0
    # Some of its entries have left to keep the bound on size.
    is_partial: bool = False


class PrefixMirror:
    """hash -> replicas, per tier. Belongs to one event loop.

    Args:
        max_bytes: bound on the memory of all entries.
    """

    def __init__(self, max_bytes: int = 1 << 40) -> None:
        self._table = MaskTable(max_bytes // BYTES_PER_ENTRY, self._note_evicted)
        self._replicas: dict[ReplicaKey, Mirrored] = {}
        self._key_of_slot: dict[int, ReplicaKey] = {}
        # Those that fill up unseen too.
        self._mirrored: dict[int, Mirrored] = {}
        self._live_mask = 0
        self._num_slots = 0
        self._free_slots: list[int] = []
        self._retired_mask = 0
        self._sweep: Sweep | None = None
        self._stepwise: frozenset[ReplicaKey] = frozenset()
        self._stepwise_mask = 0
        self.num_evicted = 0

    def replicas(self) -> dict[ReplicaKey, Mirrored]:
        """Return what is known, by replica. Read only."""
        return self._replicas

    def num_entries(self) -> int:
        """Count the hashes of all tiers."""
        return self._table.num_entries

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
        if delta.removed:
            known.num_blocks -= self._table.remove(tier, short_ints(delta.removed), known.bit)
        if delta.added:
            self.add(known, tier, short_ints(delta.added))
        return True

    def begin(self, model: str, seq: int = 0) -> Mirrored:
        """Open a slot that no lookup sees before `commit`."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        fresh = self._mirrored[slot] = Mirrored(model, slot, 1 << slot, seq)
        return fresh

    def add(self, known: Mirrored, tier: Tier, hashes: Sequence[int]) -> None:
        """Add blocks to a slot. Idempotent."""
        # Counted afterwards: some of its own may leave meanwhile.
        num_added = self._table.add(tier, hashes, known.bit)
        known.num_blocks += num_added

    def commit(self, key: ReplicaKey, fresh: Mirrored) -> None:
        """Let lookups see a slot in the place of the replica's former one."""
        self.drop(key)
        self._replicas[key] = fresh
        self._key_of_slot[fresh.slot] = key
        self._live_mask |= fresh.bit
        if key in self._stepwise:
            self._stepwise_mask |= fresh.bit

    def abandon(self, unused: Mirrored) -> None:
        """Give back a slot that was never committed."""
        self._retired_mask |= unused.bit
        del self._mirrored[unused.slot]

    def drop(self, key: ReplicaKey) -> None:
        """Forget a replica. Idempotent."""
        known = self._replicas.pop(key, None)
        if known is not None:
            del self._key_of_slot[known.slot], self._mirrored[known.slot]
            self._live_mask &= ~known.bit
            self._stepwise_mask &= ~known.bit
            self._retired_mask |= known.bit

    def set_stepwise(self, keys: Collection[ReplicaKey]) -> None:
        """Name the replicas whose models have layers with a window; see the module."""
        self._stepwise = frozenset(keys)
        self._stepwise_mask = 0
        for key in self._stepwise & self._replicas.keys():
            self._stepwise_mask |= self._replicas[key].bit

    def depths(self, chain: Sequence[int]) -> dict[ReplicaKey, int]:
        """Count the leading blocks of *chain* that each replica holds on any tier.

        Replicas that hold none are left out.
        """
        found: dict[ReplicaKey, int] = {}
        holders = self._table.reader()
        alive = holders(chain[0]) & self._live_mask if chain else 0
        position, stride = 0, 1 if alive & self._stepwise_mask else _STRIDE
        while alive and position < len(chain):
            probe = min(position + stride, len(chain)) - 1
            if holders(chain[probe]) & alive != alive:
                alive = self._split(holders, chain, position, probe, alive, found)
            position = probe + 1
        self._note(alive, len(chain), found)
        if found:
            self._table.remember(chain[: max(found.values())])
        return found

    def slower_blocks(
        self, chain: Sequence[int], depths: dict[ReplicaKey, int], weights: dict[Tier, float]
    ) -> dict[ReplicaKey, float]:
        """Tell what the found prefixes lose by lying on slower tiers.

        Args:
            chain: what was looked up.
            depths: what `depths` found.
            weights: worth of a block by tier, 1 = as good as one on the device.

        Returns:
            Blocks lost by replica; those that lose nothing are left out. Long prefixes are sampled.
        """
        lost: dict[ReplicaKey, float] = {}
        if not depths or not any(self._table.num_by_tier[tier] for tier in TIERS[1:]):
            return lost
        for key, depth in depths.items():
            bit, stride = self._replicas[key].bit, -(-depth // _MAX_TIER_PROBES)
            probes = chain[0:depth:stride]
            worth = sum(self._worth(block, bit, weights) for block in probes)
            if worth < len(probes):
                lost[key] = depth * (1 - worth / len(probes))
        return lost

    def sweep_some(self, max_entries: int) -> bool:
        """Clear some stale bits of retired slots; tell whether more is to do."""
        if self._sweep is None:
            if not self._retired_mask:
                return False
            self._sweep = self._table.sweep(self._retired_mask)
            self._retired_mask = 0
        if self._sweep.step(max_entries):
            return True
        self._free_slots += _bits(self._sweep.mask)
        self._sweep = None
        return self._retired_mask != 0

    def _worth(self, block: int, bit: int, weights: dict[Tier, float]) -> float:
        return max(
            (weights[tier] for tier in TIERS if self._table.on_tier(tier, block) & bit), default=0.0
        )

    def _note_evicted(self, mask: int) -> None:
        self.num_evicted += 1
        for slot in _bits(mask):
            holder = self._mirrored.get(slot)
            if holder is not None:
                holder.num_blocks -= 1
                holder.is_partial = True

    def _split(
        self,
        holders: Callable[[int], int],
        chain: Sequence[int],
        first: int,
        last: int,
        alive: int,
        found: dict[ReplicaKey, int],
    ) -> int:
        """Find where between two blocks who drops out, by halves; return who is left at *last*.

        Args:
            holders: looks a block up.
            chain: the whole prompt.
            first: the first block not looked at.
            last: the last one to look at.
            alive: who holds everything before *first*.
            found: where depths are noted.
        """
        left = holders(chain[last]) & alive
        if left == alive:
            return alive
        if first == last:
            self._note(alive & ~left, first, found)
            return left
        middle = (first + last) // 2
        still = self._split(holders, chain, first, middle, alive, found)
        return self._split(holders, chain, middle + 1, last, still, found) if still else 0

    def _note(self, slots: int, depth: int, found: dict[ReplicaKey, int]) -> None:
        if slots and depth:
            for slot in _bits(slots):
                found[self._key_of_slot[slot]] = depth


def _bits(mask: int) -> list[int]:
    slots = []
    while mask:
        lowest = mask & -mask
        slots.append(lowest.bit_length() - 1)
        mask ^= lowest
    return slots

"""Pure: the cache index in plain dicts, the oracle of its property tests.

It gives the answers that `store` gives from Redis, and states the rules in the least code:
a newer incarnation drops the older one, batches apply in sequence only, removes are idempotent,
a replica never holds more blocks than its capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_cache_index.events import Change, Replacement
from headrace_cache_index.outcome import Outcome, Status
from headrace_common.kv_index import TIERS, ReplicaKey, Tier


@dataclass(slots=True)
class _Held:
    """What one incarnation holds."""

    incarnation: int
    model: str
    capacity_blocks: int
    seq: int = 0
    blocks: dict[Tier, set[bytes]] = field(default_factory=lambda: {tier: set() for tier in TIERS})

    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.blocks.values())

    def clear(self) -> None:
        for blocks in self.blocks.values():
            blocks.clear()


class MemoryIndex:
    """Which live incarnation holds which blocks."""

    def __init__(self) -> None:
        self._workers: dict[str, _Held] = {}

    def register(self, replica: ReplicaKey, model: str, capacity_blocks: int) -> Outcome:
        """Make *replica* the live incarnation of its worker. `seq` tells what is known of it."""
        held = self._workers.get(replica.worker_id)
        if held is not None and held.incarnation > replica.incarnation:
            return Outcome(Status.SUPERSEDED, held.seq)
        if held is not None and held.incarnation == replica.incarnation:
            return Outcome(Status.KNOWN, held.seq)
        self._workers[replica.worker_id] = _Held(replica.incarnation, model, capacity_blocks)
        return Outcome(Status.NEW, 0)

    def apply(self, replica: ReplicaKey, change: Change) -> Outcome:
        """Apply the next batch."""
        held = self._workers.get(replica.worker_id)
        if held is None:
            return Outcome(Status.LOST, 0)
        if held.incarnation != replica.incarnation:
            return Outcome(Status.SUPERSEDED, 0)
        if change.seq <= held.seq:
            return Outcome(Status.APPLIED, held.seq)
        if change.seq != held.seq + 1:
            return Outcome(Status.GAP, held.seq)
        held.seq = change.seq
        if change.cleared:
            held.clear()
        for tier in TIERS:
            held.blocks[tier] -= change.removed.get(tier, set())
            held.blocks[tier] |= change.added.get(tier, set())
        if held.num_blocks() > held.capacity_blocks:
            held.clear()
            return Outcome(Status.OVERFLOW, held.seq)
        return Outcome(Status.APPLIED, held.seq)

    def replace(self, replica: ReplicaKey, whole: Replacement) -> Outcome:
        """Take a snapshot for everything known before."""
        held = self._workers.get(replica.worker_id)
        if held is None:
            return Outcome(Status.LOST, 0)
        if held.incarnation != replica.incarnation:
            return Outcome(Status.SUPERSEDED, 0)
        held.seq = whole.seq
        held.blocks = {tier: set(whole.blocks.get(tier, ())) for tier in TIERS}
        return Outcome(Status.APPLIED, whole.seq)

    def drop(self, replica: ReplicaKey) -> None:
        """Forget an incarnation. Idempotent."""
        held = self._workers.get(replica.worker_id)
        if held is not None and held.incarnation == replica.incarnation:
            del self._workers[replica.worker_id]

    def forget_all(self) -> None:
        """Lose everything, as a store that lost its data."""
        self._workers.clear()

    def blocks(self, replica: ReplicaKey) -> dict[Tier, set[bytes]]:
        """Return a copy of what *replica* holds, by tier; tiers without blocks are left out."""
        held = self._workers.get(replica.worker_id)
        if held is None or held.incarnation != replica.incarnation:
            return {}
        return {tier: set(blocks) for tier, blocks in held.blocks.items() if blocks}

    def leading_blocks(self, model: str, chain: Sequence[bytes]) -> dict[ReplicaKey, int]:
        """Count the leading blocks of *chain* (8-byte hashes) that each replica holds anywhere."""
        found = {}
        for worker_id, held in self._workers.items():
            if held.model == model:
                depth = 0
                while depth < len(chain) and any(
                    chain[depth] in blocks for blocks in held.blocks.values()
                ):
                    depth += 1
                found[ReplicaKey(worker_id, held.incarnation)] = depth
        return found

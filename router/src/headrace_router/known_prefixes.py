"""Pure: what is known of cached prefixes, from all sources, in blocks of the request.

Three things lie between the mirror's answer and a request's blocks:

- *strides*: a replica may tell the index of every n-th block only (`index_stride_blocks` of its
  recipe);
- *windows*: blocks of models with windowed layers are counted one by one (`window_tokens`);
- *tiers*: a block that is fetched from host memory or disk is worth part of one on the device.

Replicas that tell the index nothing are credited with what was sent there lately (`assumed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace_common.kv_index import ReplicaKey, Tier
from headrace_router.assumed import AssumedBlocks
from headrace_router.mirror import PrefixMirror
from headrace_router.replicas import Replica


class KnownPrefixes:
    """Answers for the pipeline which replica holds how much of a prompt.

    Args:
        mirror: what replicas told the index.
        assumed: what was sent to those that tell nothing.
        tier_weights: worth of a block by tier, at most 1.
    """

    def __init__(
        self,
        mirror: PrefixMirror,
        assumed: AssumedBlocks,
        tier_weights: dict[Tier, float],
    ) -> None:
        self._mirror, self._assumed = mirror, assumed
        self._weights = tier_weights
        self._strides: dict[ReplicaKey, int] = {}

    def describe(self, replicas: Iterable[Replica]) -> None:
        """Take up how each replica's blocks are counted. Call it when replicas change."""
        windowed = set()
        self._strides = {}
        for replica in replicas:
            for card in replica.cards:
                if card.recipe.index_stride_blocks > 1:
                    self._strides[replica.key] = card.recipe.index_stride_blocks
                if card.recipe.window_tokens:
                    windowed.add(replica.key)
        self._mirror.set_stepwise(windowed)

    def depths(self, chain: Sequence[int]) -> dict[ReplicaKey, int]:
        """Count the leading blocks of *chain* that each replica holds; zeros are left out.

        Blocks on slower tiers count in part.
        """
        if not chain:
            return {}
        found = self._confirmed(chain, 1)
        for stride in sorted(set(self._strides.values())):
            found |= self._confirmed(chain[stride - 1 :: stride], stride)
        return found | self._assumed.depths(chain)

    def _confirmed(self, chain: Sequence[int], stride: int) -> dict[ReplicaKey, int]:
        depths = self._mirror.depths(chain)
        if self._strides:
            depths = {k: depth for k, depth in depths.items() if self._strides.get(k, 1) == stride}
        lost = self._mirror.slower_blocks(chain, depths, self._weights)
        if not lost and stride == 1:
            return depths
        worth = {key: int((depth - lost.get(key, 0)) * stride) for key, depth in depths.items()}
        return {key: blocks for key, blocks in worth.items() if blocks}

"""Pure: whether another replica computes the prompt, for the replica that will decode.

The policy has chosen a replica as ever. It decodes; its prefill would come in chunks between the
steps of the streams that run there and delay each of them. A replica with the role `prefill` could
compute the prompt instead and hand its KV over. Seconds, by the same predictions as everywhere::

    direct = backlog + own + stall_weight x own x streams        at the chosen replica
    pair   = backlog + own at the prefill replica + set-up + bytes / rate of the transfer

The pair is taken where it costs less; so a short uncached part stays where it is (the set-up alone
costs more), an idle replica computes for itself, and a prefill pool with a long queue is passed by.
After DistServe (arXiv 2401.09670) and Splitwise (arXiv 2311.18677); theirs always split.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import Candidate, Query
from headrace_router.filters import room
from headrace_router.filters.role import ROLE
from headrace_router.load_guard import LoadGuard
from headrace_router.replicas import Replica


@dataclass(frozen=True, slots=True)
class PairRules:
    """Knobs of the choice; see the module."""

    setup_s: float = 0.02
    transfer_bytes_per_s: float = 5e8
    stall_weight: float = 0.5


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill replica for a decode replica, with what that was predicted to cost."""

    prefill: Candidate
    pair_s: float


def find_pair(
    query: Query, chosen: Candidate, candidates: list[Candidate], rules: PairRules
) -> Pair | None:
    """Return the prefill replica for *chosen*, or None if it should compute the prompt itself.

    Args:
        query: the request.
        chosen: the replica that will decode.
        candidates: all that serve the model.
        rules: the knobs.
    """
    # The last of the filters that look at a replica alone: only room is left to look at.
    pool = [one for one in candidates if one.filtered_by == ROLE]
    pool = [one for one in pool if not room.reason(one.replica, one.num_requests)]
    card = _card(chosen.replica, query.model)
    pool = [one for one in pool if _card(one.replica, query.model) == card]
    if not pool or card is None:
        return None
    _, kv_bytes_per_token = card
    best = min(pool, key=lambda one: one.backlog_s + one.own_s)
    moved_bytes = chosen.uncached_tokens * kv_bytes_per_token
    transfer_s = rules.setup_s + moved_bytes / rules.transfer_bytes_per_s
    pair_s = best.backlog_s + best.own_s + transfer_s
    stall_s = rules.stall_weight * chosen.own_s * chosen.num_requests
    direct_s = chosen.backlog_s + chosen.own_s + stall_s
    chosen.scores |= {"pair_s": pair_s, "direct_s": direct_s}
    if pair_s >= direct_s:
        return None
    return Pair(best, pair_s)


@dataclass(frozen=True, slots=True)
class Booked:
    """What a choice costs where, in tokens."""

    replica: ReplicaKey
    uncached_tokens: int
    prompt_tokens: int


def bookings(query: Query, chosen: Candidate, pair: Pair | None) -> list[Booked]:
    """Say what to book: at the replica that decodes, then at the one that only computes."""
    if pair is None:
        return [Booked(chosen.key, chosen.uncached_tokens, query.prompt_tokens)]
    # The last block is always computed where the decoding is.
    left = min(query.block_size_tokens, chosen.uncached_tokens)
    prefill = pair.prefill
    return [
        Booked(chosen.key, left, query.prompt_tokens),
        Booked(prefill.key, prefill.uncached_tokens, query.prompt_tokens),
    ]


def tie(guards: list[LoadGuard]) -> LoadGuard:
    """Let the first guard's first token, or its end, give back the others."""
    first, *others = guards
    for one in others:
        first.tie(one)
    return first


def _card(replica: Replica, model: str) -> tuple[str, int] | None:
    """Return fingerprint and bytes of KV per token: equal ones may exchange blocks."""
    for card in replica.cards:
        if card.model == model:
            return card.fingerprint, card.kv_bytes_per_token
    return None

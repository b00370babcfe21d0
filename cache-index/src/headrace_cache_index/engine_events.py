"""Pure: the KV events of vLLM's ZMQ publisher, decoded.

A message's payload is msgpack: a batch of events, each a tagged record. Older engines write records
as arrays (tag first, then fields in order), newer ones as maps; both are read, unknown fields and
kinds are passed over. Block hashes are the engine's own, integers or bytes: opaque names.
Format: vLLM ``vllm/distributed/kv_events.py``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from headrace_common.kv_index import Tier
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_CPU, CACHE_TIER_DISK, CACHE_TIER_GPU

EngineHash: TypeAlias = int | bytes
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_MAX_TOKEN_ID = 2**32 - 1
_WHOLE_KINDS = ("", "full", "mla")


@dataclass(frozen=True, slots=True)
class EngineStored:
    """Blocks of one run, parents first."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    tier: Tier
    adapter: str
    # Whatever else went into each block's hash; None = nothing, or the engine does not tell.
    extra_keys: tuple[tuple[Hashable, ...], ...] | None
    # Layers that share a cache: engines with windowed layers have several groups.
    group: int
    # The group's layers attend to a window only, or carry a state.
    is_windowed: bool


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """Blocks that left one tier."""

    hashes: tuple[EngineHash, ...]
    tier: Tier
    group: int


@dataclass(frozen=True, slots=True)
class EngineCleared:
    """Everything is gone."""


EngineEvent: TypeAlias = EngineStored | EngineRemoved | EngineCleared


def decode_batch(payload: bytes) -> list[EngineEvent]:
    """Decode a message's payload.

    Raises:
        ValueError: it is no batch of events.
    """
    try:
        batch = _record(msgspec.msgpack.decode(payload), _BATCH_FIELDS)
        return [event for raw in batch["events"] if (event := _event(raw)) is not None]
    except (
        msgspec.MsgspecError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"not a batch of KV events: {error!r}") from error


def _event(raw: Any) -> EngineEvent | None:  # Any: decoded msgpack
    kind = raw["type"] if isinstance(raw, dict) else raw[0]
    if kind not in _FIELDS:
        return None
    fields = _record(raw if isinstance(raw, dict) else raw[1:], _FIELDS[kind])
    if kind == "AllBlocksCleared":
        return EngineCleared()
    hashes = tuple(_hash(one) for one in fields["block_hashes"])
    tier, group = _tier(fields.get("medium")), int(fields.get("group_idx") or 0)
    if kind == "BlockRemoved":
        return EngineRemoved(hashes, tier, group)
    kind_of_cache = str(fields.get("kv_cache_spec_kind") or "")
    return EngineStored(
        hashes=hashes,
        parent=None if fields["parent_block_hash"] is None else _hash(fields["parent_block_hash"]),
        token_ids=tuple(_natural(one, _MAX_TOKEN_ID) for one in fields["token_ids"]),
        block_size=_natural(fields["block_size"] or None, _MAX_TOKEN_ID),
        tier=tier,
        adapter=_adapter(fields),
        extra_keys=_extra_keys(fields.get("extra_keys"), len(hashes)),
        group=group,
        is_windowed=not kind_of_cache.lower().startswith(_WHOLE_KINDS[1:]) and kind_of_cache != "",
    )


def _record(raw: Any, names: Sequence[str]) -> dict[str, Any]:  # Any: decoded msgpack
    return raw if isinstance(raw, dict) else dict(zip(names, raw, strict=False))


def _natural(raw: Any, most: int) -> int:  # Any: decoded msgpack
    if not isinstance(raw, int) or not 0 <= raw <= most:
        raise ValueError(f"{raw!r} is no number from 0 to {most}")
    return raw


def _hash(raw: Any) -> EngineHash:  # Any: decoded msgpack
    if not isinstance(raw, int | bytes):
        raise TypeError(f"a block hash is no {type(raw).__name__}")
    return raw


def _tier(medium: str | None) -> Tier:
    match (medium or "GPU").upper():
        case "GPU":
            return CACHE_TIER_GPU
        case "CPU":
            return CACHE_TIER_CPU
        case _:
            return CACHE_TIER_DISK


def _adapter(fields: dict[str, Any]) -> str:
    # An engine that tells only a number names its adapters by it: nobody else's hash can match.
    if fields.get("lora_name"):
        return str(fields["lora_name"])
    return "" if fields.get("lora_id") is None else f"lora-id:{fields['lora_id']}"


def _extra_keys(raw: Any, num_blocks: int) -> tuple[tuple[Hashable, ...], ...] | None:
    # Any: decoded msgpack
    if raw is None:
        return None
    keys = tuple(tuple(_frozen(one) for one in block or ()) for block in raw)
    if len(keys) != num_blocks:
        raise TypeError("as many extra keys as blocks are needed")
    return keys


def _frozen(raw: Any) -> Hashable:  # Any: decoded msgpack
    return tuple(_frozen(one) for one in raw) if isinstance(raw, list) else raw

"""The block-hash chain: one implementation for gateway, router, index and worker.

A block hash is keyed BLAKE2b (RFC 7693) with a 16-byte digest over the parent's hash and the
block's token ids as little-endian uint32. The key is derived from everything that must separate
caches: model fingerprint, adapter and the tenant's cache salt. Only full blocks have a hash; the
first block's parent is 16 zero bytes.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache

ALGORITHM = "blake2b-128-keyed/1"
HASH_BYTES = 16
# Of one token id, packed.
ID_BYTES = 4
ROOT = bytes(HASH_BYTES)
BLOCK_SIZE_TOKENS = 16
_LONG_CONTEXT_TOKENS = 16_384
_LONG_CONTEXT_STRIDE = 4
_SALT_PREFIX = "headrace-salt:"
_SELF_TEST_TOKENS = tuple(range(1, 34))
# Whether an array of this machine's has the bytes that are hashed.
_IS_NATIVE = array("I", [1]).tobytes() == struct.pack("<I", 1)


@lru_cache(maxsize=4096)
def chain_key(model_fingerprint: str, adapter: str = "", cache_salt: bytes = b"") -> bytes:
    """Derive the 32-byte key of a chain; any change of an argument changes every hash."""
    digest = hashlib.blake2b(digest_size=32, person=b"headrace-chain-1")
    for part in (model_fingerprint.encode(), adapter.encode(), cache_salt):
        digest.update(struct.pack("<I", len(part)) + part)
    return digest.digest()


def chain(
    key: bytes,
    token_ids: Sequence[int],
    block_size: int = BLOCK_SIZE_TOKENS,
    parent: bytes = ROOT,
) -> list[bytes]:
    """Hash the full blocks of *token_ids*, each over its parent.

    Args:
        key: from `chain_key`.
        token_ids: ids in order; a rest shorter than a block is left out.
        block_size: tokens per block.
        parent: hash of the block before the first one, `ROOT` at the start.

    Returns:
        One 16-byte hash per full block.
    """
    num_blocks = len(token_ids) // block_size
    return chain_packed(key, packed_ids(token_ids[: num_blocks * block_size]), block_size, parent)


def chain_packed(
    key: bytes, packed: bytes, block_size: int = BLOCK_SIZE_TOKENS, parent: bytes = ROOT
) -> list[bytes]:
    """Hash the full blocks of ids from `packed_ids`; else as `chain`."""
    width = ID_BYTES * block_size
    copy_base = hashlib.blake2b(key=key, digest_size=HASH_BYTES).copy
    hashes = []
    for end in range(width, len(packed) + 1, width):
        state = copy_base()
        state.update(parent + packed[end - width : end])
        parent = state.digest()
        hashes.append(parent)
    return hashes


def index_stride(context_tokens: int) -> int:
    """Tell of how many blocks of a chain the index is told one: all of short-context models."""
    return 1 if context_tokens <= _LONG_CONTEXT_TOKENS else _LONG_CONTEXT_STRIDE


def salt_text(cache_salt: bytes) -> str:
    """Write a tenant's salt as engines of another make take it, so that it can be read back."""
    return _SALT_PREFIX + cache_salt.hex()


def salt_of_text(text: str) -> bytes | None:
    """Read what `salt_text` wrote; None for anything else."""
    if not text.startswith(_SALT_PREFIX):
        return None
    try:
        return bytes.fromhex(text.removeprefix(_SALT_PREFIX))
    except ValueError:
        return None


def self_test(model_fingerprint: str, block_size: int) -> bytes:
    """Hash a fixed token sequence: peers compare it before they trust each other's hashes."""
    tokens = _SELF_TEST_TOKENS * (1 + block_size // len(_SELF_TEST_TOKENS))
    return chain(chain_key(model_fingerprint), tokens, block_size)[-1]


def join(hashes: Sequence[bytes]) -> bytes:
    """Join hashes for the wire."""
    return b"".join(hashes)


def split(joined: bytes) -> list[bytes]:
    """Split joined hashes.

    Raises:
        ValueError: the length is no multiple of 16.
    """
    if len(joined) % HASH_BYTES:
        raise ValueError(f"block hashes: {len(joined)} bytes is no multiple of {HASH_BYTES}")
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """Write ids as little-endian uint32, as they are hashed."""
    if _IS_NATIVE:
        return array("I", token_ids).tobytes()
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpacked_ids(packed: bytes) -> list[int]:
    """Read what `packed_ids` wrote."""
    return list(struct.unpack(f"<{len(packed) // ID_BYTES}I", packed))

"""What a device could do at best, and what share of it something does.

A kernel moves bytes and computes products; the device's copy bandwidth and matrix rate, both
measured in the same run, give the least time for either. The larger one is the floor, and the share
is floor / time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_worker.model.config import ModelConfig

BF16_BYTES = 2
_FLOAT32_BYTES = 4
# A multiplication and an addition.
_FLOP = 2


@dataclass(frozen=True)
class Roofline:
    """A device's measured limits.

    Attributes:
        copy_bytes_per_s: read and written bytes of a large copy, per second.
        matrix_flop_per_s: of a large bfloat16 product.
    """

    copy_bytes_per_s: float
    matrix_flop_per_s: float

    def floor_s(self, work: Work) -> float:
        """Least time for *work*."""
        return max(work.num_bytes / self.copy_bytes_per_s, work.num_flop / self.matrix_flop_per_s)

    def ratio(self, work: Work, duration_s: float) -> float:
        """Share of the device that *work* done in *duration_s* used; 1 = all of it."""
        return self.floor_s(work) / duration_s


@dataclass(frozen=True)
class Work:
    """What has to be done, however it is done."""

    num_bytes: float = 0.0
    num_flop: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.num_flop + other.num_flop)


def decode_attention(contexts: Sequence[int], num_heads: int, num_kv_heads: int, dim: int) -> Work:
    """One token a row: each key and value read once, each query read and each result written."""
    kv = 2 * num_kv_heads * dim * sum(contexts)
    rows = 2 * num_heads * dim * len(contexts)
    flop = 2 * _FLOP * num_heads * dim * sum(contexts)
    return Work(BF16_BYTES * (kv + rows), flop)


def prefill_attention(
    num_new: int, context: int, num_heads: int, num_kv_heads: int, dim: int
) -> Work:
    """The last *num_new* of *context* tokens, each seeing those before it and itself."""
    pairs = num_new * (context - num_new) + num_new * (num_new + 1) // 2
    moved = 2 * num_kv_heads * dim * context + 2 * num_heads * dim * num_new
    return Work(BF16_BYTES * moved, 2 * _FLOP * num_heads * dim * pairs)


def add_rms_norm(num_tokens: int, size: int) -> Work:
    """Two rows read, their sum and its norm written."""
    return Work(4 * BF16_BYTES * num_tokens * size)


def rope_write_kv(num_tokens: int, num_heads: int, num_kv_heads: int, dim: int) -> Work:
    """Heads read and written, cosines and sines read."""
    heads = 2 * BF16_BYTES * num_tokens * (num_heads + 2 * num_kv_heads) * dim
    return Work(heads + _FLOAT32_BYTES * num_tokens * dim)


def gate(num_tokens: int, size: int) -> Work:
    """Two halves read, one written."""
    return Work(3 * BF16_BYTES * num_tokens * size)


def copy(num_bytes: int) -> Work:
    """Bytes read and written."""
    return Work(2 * num_bytes)


def one_pass(num_rows: int, vocab: int) -> Work:
    """Float32 logits read once; a sampler's time is told in such passes."""
    return Work(_FLOAT32_BYTES * num_rows * vocab)


def decode_step(config: ModelConfig, contexts: Sequence[int]) -> Work:
    """One token a row through a whole model: weights read once, keys and values of each row.

    An untied embedding is read at a few rows only, which do not count.
    """
    embedding = config.vocab_size * config.hidden_size
    weights = config.num_parameters - (0 if config.is_head_tied else embedding)
    linear = Work(BF16_BYTES * weights, _FLOP * weights * len(contexts))
    attention = decode_attention(contexts, config.num_heads, config.num_kv_heads, config.head_dim)
    layers = config.num_layers
    return linear + Work(layers * attention.num_bytes, layers * attention.num_flop)

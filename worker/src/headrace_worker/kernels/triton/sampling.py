"""From logits to tokens without sorting the vocabulary; the twin is `headrace_worker.sampling`.

Two passes over the logits; penalties and bias touch single ones:

1. `tile_stats_kernel`: the maximum and the sum of exponentials of every tile of 256 logits. They
   give the distribution's normaliser, and a bound: the r-th largest of the tiles' maxima is no
   larger than the r-th largest logit.
2. With truncation, `collect_kernel` gathers what lies above such a bound, at most `CANDIDATES`, and
   `choose_kernel` sorts these few, truncates by top-k, top-p and min-p and inverts the
   distribution over ids in ascending order. Without truncation `invert_kernel` finds the tile that
   the draw falls into by the tiles' sums and reads that tile only; greedy rows likewise.

A row whose truncation the candidates cannot decide (a flat distribution with top-p near 1, a top-k
beyond `MAX_TOP_K`) is marked and left to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.triton.launch import check_last_contiguous, padded

TILE = 256
CANDIDATES = 1024
MAX_TOP_K = 512
# Tiles that one program of a pass reads.
_TILES = 8
# Single logits that one program changes.
_ENTRIES = 256
# Chosen for a row that has to be drawn in another way.
UNDECIDED = -1
# Logits down here count as impossible; the lowest temperature does not make it overflow.
_LOWEST = tl.constexpr(-1.0e30)
_HIGHEST = tl.constexpr(1.0e30)
_LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class DrawRows:
    """How each of R rows is drawn; see `sampling.SampleSpec`. All on the device.

    Attributes:
        temperature: (R,) float32; 0 = greedy.
        top_k: (R,) int32; 0 = off.
        top_p: (R,) float32; 1 = off.
        min_p: (R,) float32; 0 = off.
        uniform: (R,) float64 in [0, 1).
        cut: (C,) int32, the rows that are truncated and not greedy.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    cut: torch.Tensor


@triton.jit
def _finite(x):
    """Take NaN for impossible."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, _LOWEST), _HIGHEST), _LOWEST)


@triton.jit
def penalise_kernel(
    logits_ptr,
    rows_ptr,
    ids_ptr,
    repetition_ptr,
    subtracted_ptr,
    added_ptr,
    kept_ptr,
    num_entries,
    vocab,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK entries; no two entries name the same logit."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    row = tl.load(rows_ptr + entry, mask=inside, other=0).to(tl.int64)
    at = logits_ptr + row * vocab + tl.load(ids_ptr + entry, mask=inside, other=0)
    repetition = tl.load(repetition_ptr + entry, mask=inside, other=1.0)
    value = tl.load(at, mask=inside, other=0.0)
    tl.store(kept_ptr + entry, value, mask=inside)
    # Dividing by one is no change; a NaN or a zero stays.
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value = value - tl.load(subtracted_ptr + entry, mask=inside, other=0.0)
    tl.store(at, value + tl.load(added_ptr + entry, mask=inside, other=0.0), mask=inside)


@triton.jit
def restore_kernel(
    logits_ptr, rows_ptr, ids_ptr, kept_ptr, num_entries, vocab, BLOCK: tl.constexpr
):
    """Undo `penalise_kernel`."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    row = tl.load(rows_ptr + entry, mask=inside, other=0).to(tl.int64)
    at = logits_ptr + row * vocab + tl.load(ids_ptr + entry, mask=inside, other=0)
    tl.store(at, tl.load(kept_ptr + entry, mask=inside, other=0.0), mask=inside)


@triton.jit
def tile_stats_kernel(
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    vocab,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per row and TILES tiles. NaN counts as impossible."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(logits_ptr + row * vocab + at, mask=at < vocab, other=_LOWEST)
    x = _finite(x)
    temperature = tl.load(temperature_ptr + row)
    scale = tl.where(temperature > 0.0, 1.0 / tl.maximum(temperature, 1e-30), 1.0)
    top = tl.max(x, axis=1)
    weights = tl.where(x > _LOWEST, tl.exp((x - top[:, None]) * scale), 0.0)
    is_tile = tile < num_tiles
    tl.store(maxima_ptr + row * num_tiles + tile, top, mask=is_tile)
    tl.store(sums_ptr + row * num_tiles + tile, tl.sum(weights, axis=1), mask=is_tile)


@triton.jit
def collect_kernel(
    logits_ptr,
    rows_ptr,
    bounds_ptr,
    counts_ptr,
    ids_ptr,
    values_ptr,
    vocab,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """One program per row of *rows* and BLOCK logits: append what reaches the row's bound."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = logits_ptr + tl.load(rows_ptr + row).to(tl.int64) * vocab
    x = tl.load(source + at, mask=at < vocab, other=_LOWEST)
    found = (x >= tl.load(bounds_ptr + row)) & (at < vocab)
    number = tl.sum(found.to(tl.int32), axis=0)
    if number > 0:
        start = tl.atomic_add(counts_ptr + row, number)
        place = start + tl.cumsum(found.to(tl.int32), axis=0) - 1
        fits = found & (place < CANDIDATES)
        tl.store(ids_ptr + row * CANDIDATES + place, at, mask=fits)
        tl.store(values_ptr + row * CANDIDATES + place, _finite(x), mask=fits)


@triton.jit
def choose_kernel(
    ids_ptr,
    values_ptr,
    counts_ptr,
    maxima_ptr,
    sums_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    chosen_ptr,
    CANDIDATES: tl.constexpr,
):
    """One program per row: truncate the candidates and draw one of what is left."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, CANDIDATES)
    count = tl.load(counts_ptr + row)
    inside = rank < count
    ids = tl.load(ids_ptr + row * CANDIDATES + rank, mask=inside, other=0)
    values = tl.load(values_ptr + row * CANDIDATES + rank, mask=inside, other=_LOWEST)
    # Likeliest first, lower ids first among equals: one key of the value's bits, made to sort as
    # numbers do, and the id.
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(inside, (-1 - ordered) * 4294967296 + ids.to(tl.int64), _LAST)
    key = tl.sort(key)
    ids = (key & 0xFFFFFFFF).to(tl.int32)
    ordered = (-1 - (key >> 32)).to(tl.int32)
    values = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    top = tl.load(maxima_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    exponent = tl.where(inside, (values - top) / temperature, -1.0e30)
    normaliser = tl.load(sums_ptr + row)
    # Zero in a row without any possible token.
    normaliser = tl.where(normaliser > 0.0, normaliser, 1.0)
    probs = tl.exp(exponent).to(tl.float64) / normaliser
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row).to(tl.float64)
    min_p = tl.load(min_p_ptr + row).to(tl.float64)
    has_top_k = top_k > 0
    keep = inside & ((rank < top_k) | (top_k <= 0))
    left = tl.where(keep, probs, 0.0)
    total = tl.where(has_top_k, tl.sum(left, axis=0), 1.0)
    upto = tl.cumsum(left, axis=0)
    keep = keep & (upto - left < tl.where(top_p < 1.0, top_p * total, 1.0e30))
    likeliest = tl.max(probs, axis=0)
    keep = keep & (probs >= min_p * likeliest)
    num_kept = tl.maximum(tl.sum(keep.to(tl.int32), axis=0), 1)
    # Whether one more candidate could have been kept, had there been one.
    least = tl.min(tl.where(inside, probs, 2.0), axis=0)
    by_k = tl.where(has_top_k & (count >= top_k), 1, 0)
    by_p = tl.where(tl.sum(left, axis=0) >= tl.where(top_p < 1.0, top_p * total, 1.0e30), 1, 0)
    by_min = tl.where(least < min_p * likeliest, 1, 0)
    # What top-p counts within is known only where all of top-k is among the candidates.
    knows_total = tl.where(has_top_k, by_k, 1)
    by_p = by_p * knows_total
    by_min = by_min * tl.where(top_p < 1.0, knows_total, 1)
    is_decided = (count <= CANDIDATES) & (by_k + by_p + by_min > 0)
    kept = rank < num_kept
    packed = ids.to(tl.int64) * 4294967296 + rank.to(tl.int64)
    packed = tl.sort(tl.where(kept, packed, _LAST))
    is_in = packed != _LAST
    id_sorted = (packed >> 32).to(tl.int32)
    # The probabilities in the order of ids, by the ranks that travelled along.
    back = (packed & 0xFFFFFFFF).to(tl.int32)
    probs = tl.gather(probs, tl.where(is_in, back, 0), axis=0)
    upto = tl.cumsum(tl.where(is_in, probs, 0.0), axis=0)
    target = tl.load(uniform_ptr + row) * tl.max(upto, axis=0)
    place = tl.sum((upto <= target).to(tl.int32), axis=0)
    place = tl.minimum(place, num_kept - 1)
    chosen = tl.sum(tl.where(rank == place, id_sorted, 0), axis=0)
    tl.store(chosen_ptr + row, tl.where(is_decided, chosen, -1))


@triton.jit
def invert_kernel(
    logits_ptr,
    tile_maxima_ptr,
    tile_sums_ptr,
    maxima_ptr,
    temperature_ptr,
    uniform_ptr,
    chosen_ptr,
    vocab,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per row: find the tile the draw falls into, then the place in it."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature <= 0.0
    scale = tl.where(is_greedy, 1.0, 1.0 / tl.maximum(temperature, 1e-30))
    top = tl.load(maxima_ptr + row)
    tops = tl.load(tile_maxima_ptr + row * num_tiles + tile, mask=is_tile, other=_LOWEST)
    sums = tl.load(tile_sums_ptr + row * num_tiles + tile, mask=is_tile, other=0.0)
    weights = (sums * tl.exp((tops - top) * scale)).to(tl.float64)
    # Greedy: all weight on the first tile with the maximum, and in it on the first such place.
    first = tl.min(tl.where(tops == top, tile, TILES), axis=0)
    weights = tl.where(is_greedy, (tile == first).to(tl.float64), weights)
    upto = tl.cumsum(weights, axis=0)
    target = tl.load(uniform_ptr + row) * tl.max(upto, axis=0)
    place = tl.minimum(tl.sum((upto <= target).to(tl.int32), axis=0), num_tiles - 1)
    before = tl.sum(tl.where(tile < place, weights, 0.0), axis=0)
    offset = tl.arange(0, TILE)
    at = place * TILE + offset
    x = tl.load(logits_ptr + row * vocab + at, mask=at < vocab, other=_LOWEST)
    x = _finite(x)
    inner = tl.where(x > _LOWEST, tl.exp((x - top) * scale), 0.0).to(tl.float64)
    best = tl.min(tl.where(x == top, offset, TILE), axis=0)
    inner = tl.where(is_greedy, (offset == best).to(tl.float64), inner)
    upto = tl.cumsum(inner, axis=0)
    found = tl.sum((upto <= target - before).to(tl.int32), axis=0)
    # Rounding may leave the target at the tile's very end: the last possible place, then.
    last = tl.max(tl.where(inner > 0.0, offset, 0), axis=0)
    found = tl.where(is_greedy, best, tl.minimum(found, last))
    tl.store(chosen_ptr + row, place * TILE + found)


@dataclass(frozen=True)
class Penalties:
    """What changes single logits, in this order. On the device, N entries.

    Attributes:
        rows: (N,) int32; with *ids* it names each logit at most once.
        ids: (N,) int32.
        repetition: (N,) float32; divides a positive and multiplies a negative logit; 1 = off.
        subtracted: (N,) float32; the frequency and presence penalties.
        added: (N,) float32; the bias, or minus infinity for what may not come.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    repetition: torch.Tensor
    subtracted: torch.Tensor
    added: torch.Tensor


def penalise(logits: torch.Tensor, entries: Penalties) -> torch.Tensor:
    """Change some logits in place.

    Args:
        logits: (R, V) float32, contiguous.
        entries: which, and how.

    Returns:
        (N,) what was there before, for `restore`.
    """
    kept = torch.empty_like(entries.added)
    number = len(entries.ids)
    penalise_kernel[(triton.cdiv(number, _ENTRIES),)](
        logits, entries.rows, entries.ids, entries.repetition, entries.subtracted, entries.added,
        kept, number, logits.shape[1], BLOCK=_ENTRIES,
    )  # fmt: skip
    return kept


def restore(logits: torch.Tensor, entries: Penalties, kept: torch.Tensor) -> None:
    """Undo `penalise`, which costs less than a copy of all logits before it."""
    number = len(entries.ids)
    restore_kernel[(triton.cdiv(number, _ENTRIES),)](
        logits, entries.rows, entries.ids, kept, number, logits.shape[1], BLOCK=_ENTRIES
    )


def draw(logits: torch.Tensor, rows: DrawRows, num_candidates: int = CANDIDATES) -> torch.Tensor:
    """Choose one token per row.

    Args:
        logits: (R, V) float32, contiguous, penalties and masks applied.
        rows: how to draw.
        num_candidates: a power of two; most logits that truncation looks at.

    Returns:
        (R,) int32 token ids; `UNDECIDED` for a row that must be drawn in another way.
    """
    check_last_contiguous(logits)
    num_rows, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, TILE)
    shape, device = (num_rows, num_tiles), logits.device
    maxima, sums = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    tile_stats_kernel[(num_rows, triton.cdiv(num_tiles, _TILES))](
        logits, rows.temperature, maxima, sums, vocab, num_tiles, TILE=TILE, TILES=_TILES
    )
    top = maxima.amax(dim=1)
    chosen = torch.empty(num_rows, dtype=torch.int32, device=device)
    invert_kernel[(num_rows,)](
        logits, maxima, sums, top, rows.temperature, rows.uniform, chosen, vocab, num_tiles,
        TILE=TILE, TILES=padded(num_tiles),
    )  # fmt: skip
    if len(rows.cut):
        cut = rows.cut.long()
        chosen[cut] = _draw_truncated(logits, rows, cut, (maxima, sums, top), num_candidates)
    return chosen


def _draw_truncated(
    logits: torch.Tensor,
    rows: DrawRows,
    cut: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_candidates: int,
) -> torch.Tensor:
    maxima, sums, top = (part[cut] for part in stats)
    temperature = rows.temperature[cut]
    num_rows, vocab = len(cut), logits.shape[1]
    weights = sums.double() * ((maxima - top[:, None]).double() / temperature[:, None]).exp()
    # Min-p is a bound by itself; else the r-th largest of the tiles' maxima is.
    rank = min(MAX_TOP_K, maxima.shape[1])
    ranked = maxima.topk(rank, dim=1).values
    top_k = rows.top_k[cut].long()
    wanted = torch.where(top_k > 0, top_k, rank).clamp(max=rank)
    bounds = ranked.gather(1, wanted[:, None] - 1).squeeze(1)
    device = logits.device
    counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
    shape = (num_rows, num_candidates)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    values = torch.empty(shape, dtype=torch.float32, device=device)
    block = TILE * _TILES
    collect_kernel[(num_rows, triton.cdiv(vocab, block))](
        logits, rows.cut, bounds, counts, ids, values, vocab, BLOCK=block,
        CANDIDATES=num_candidates,
    )  # fmt: skip
    chosen = torch.empty(num_rows, dtype=torch.int32, device=device)
    choose_kernel[(num_rows,)](
        ids, values, counts, top, weights.sum(dim=1), temperature, rows.top_k[cut],
        rows.top_p[cut], rows.min_p[cut], rows.uniform[cut], chosen, CANDIDATES=num_candidates,
    )  # fmt: skip
    return chosen

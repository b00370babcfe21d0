"""Tokens for a step's rows where their logits lie; the twin is `headrace_worker.sampling.sample`.

The same tokens as the twin's, by the same numbers. Penalties and biases change single logits and
are taken back afterwards, so nothing is copied; only where a row has a mask, all are copied under
masks once. Logits are passed over at most four times: the copy (read and written), statistics,
candidates. One transfer to the device says how to draw, one brings the tokens back. A row that the
kernels cannot decide (see `kernels.triton.sampling`) is drawn by the twin.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace_worker.kernels.triton.sampling import (
    CANDIDATES,
    UNDECIDED,
    DrawRows,
    Penalties,
    draw,
    penalise,
    restore,
)
from headrace_worker.sampling import (
    Sampled,
    SampleSpec,
    allowed_ids,
    draw_of,
    drawn,
    is_truncated,
    uniform,
    with_logprobs,
)

_OFF = float("-inf")


@torch.inference_mode()
def sample(
    logits: torch.Tensor, specs: Sequence[SampleSpec], num_candidates: int = CANDIDATES
) -> list[Sampled]:
    """Choose one token per row; see the twin.

    Args:
        logits: (R, V) float32, contiguous; the same afterwards.
        specs: one per row.
        num_candidates: see `draw`.
    """
    masks = [_mask(spec, logits.shape[1]) for spec in specs]
    drawn_from = _masked(logits, masks)
    entries = penalties(specs, masks, logits.shape[1], logits.device)
    kept = None if entries is None else penalise(drawn_from, entries)
    chosen = draw(drawn_from, draw_rows(specs, logits.device), num_candidates).tolist()
    for row_idx, token_id in enumerate(chosen):
        if token_id == UNDECIDED:
            row = drawn_from[row_idx : row_idx + 1].cpu()
            (chosen[row_idx],) = drawn(row, [draw_of(0, specs[row_idx])])
    if entries is not None and kept is not None and drawn_from is logits:
        restore(logits, entries, kept)
    return _results(logits, specs, chosen)


def draw_rows(specs: Sequence[SampleSpec], device: torch.device) -> DrawRows:
    """Bring what `draw` has to know to the device, in one transfer."""
    cut = [idx for idx, spec in enumerate(specs) if not spec.is_greedy and is_truncated(spec)]
    host = np.zeros((6, len(specs)), dtype=np.float64)
    for idx, spec in enumerate(specs):
        has_top_p = 0.0 < spec.top_p < 1.0
        host[:5, idx] = (
            0.0 if spec.is_greedy else spec.temperature,
            min(spec.top_k, np.iinfo(np.int32).max),
            spec.top_p if has_top_p else 1.0,
            spec.min_p,
            uniform(spec.seed, spec.choice_idx, spec.position),
        )
    host[5, : len(cut)] = cut
    rows = torch.from_numpy(host).to(device)
    floats = rows[:4].float()
    return DrawRows(
        temperature=floats[0],
        top_k=rows[1].int(),
        top_p=floats[2],
        min_p=floats[3],
        uniform=rows[4],
        cut=rows[5, : len(cut)].int(),
    )


def penalties(
    specs: Sequence[SampleSpec],
    masks: Sequence[torch.Tensor | None],
    vocab: int,
    device: torch.device,
) -> Penalties | None:
    """Say how single logits change; None = none does.

    Args:
        specs: one per row.
        masks: what else limits a row; a masked row's forbidden ids are in its mask.
        vocab: width of a row.
        device: where to.
    """
    found = [
        _entries(idx, spec, vocab, is_masked=mask is not None)
        for idx, (spec, mask) in enumerate(zip(specs, masks, strict=True))
    ]
    entries = [entry for row in found for entry in row]
    if not entries:
        return None
    # Ids are exact in float64, so one transfer carries all.
    values = torch.tensor(entries, dtype=torch.float64).t().contiguous().to(device)
    rows, ids = values[:2].int()
    repetition, subtracted, added = values[2:].float()
    return Penalties(rows, ids, repetition, subtracted, added)


def _entries(
    row_idx: int, spec: SampleSpec, vocab: int, *, is_masked: bool
) -> list[tuple[float, ...]]:
    """Return (row, id, repetition, subtracted, added) for each logit of a row that changes."""
    has_repetition = spec.repetition_penalty not in (0.0, 1.0)
    has_counts = bool(spec.frequency_penalty or spec.presence_penalty)
    seen = {*spec.prompt_counts, *spec.output_counts} if has_repetition else set()
    counted = spec.output_counts if has_counts else {}
    forbidden = set() if is_masked else {*spec.forbidden_token_ids}
    if len(forbidden) >= vocab:
        forbidden = set()
    return [
        (
            row_idx,
            token_id,
            spec.repetition_penalty if token_id in seen else 1.0,
            _subtracted(spec, counted[token_id]) if token_id in counted else 0.0,
            _OFF if token_id in forbidden else spec.logit_bias.get(token_id, 0.0),
        )
        for token_id in sorted({*seen, *counted, *spec.logit_bias, *forbidden})
    ]


def _subtracted(spec: SampleSpec, count: int) -> float:
    # In the twin's steps, all of them float32.
    frequency, presence = np.float32(spec.frequency_penalty), np.float32(spec.presence_penalty)
    return float(frequency * np.float32(count) + presence)


def _mask(spec: SampleSpec, vocab: int) -> torch.Tensor | None:
    """Return what a row may choose from, (V,) bool; None = only single ids are forbidden."""
    if spec.allowed_mask is None and not spec.allowed_token_ids:
        return None
    return allowed_ids(spec, vocab)


def _masked(logits: torch.Tensor, masks: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the logits, or a copy in which masked rows have what is hidden at minus infinity."""
    rows = [idx for idx, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    masked = torch.stack([masks[idx] for idx in rows])  # type: ignore[misc]  # none is None
    allowed[torch.tensor(rows, device=logits.device)] = masked.to(logits.device)
    return logits.masked_fill(~allowed, _OFF)


def _results(
    logits: torch.Tensor, specs: Sequence[SampleSpec], chosen: Sequence[int]
) -> list[Sampled]:
    results = [Sampled(token_id) for token_id in chosen]
    rows = [idx for idx, spec in enumerate(specs) if spec.num_top_logprobs is not None]
    if rows:
        numbers = [specs[idx].num_top_logprobs or 0 for idx in rows]
        wanted = with_logprobs(logits[rows], [chosen[idx] for idx in rows], numbers)
        for idx, sampled in zip(rows, wanted, strict=True):
            results[idx] = sampled
    return results

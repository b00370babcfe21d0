"""From logits to tokens: penalties, bias, masks, truncation, and the choice itself.

Order: repetition penalty (arXiv 1909.05858, section 4.1), frequency and presence penalty, logit
bias, allowed and forbidden ids; then the greedy choice, or temperature, top-k, top-p (arXiv
1904.09751), min-p (arXiv 2407.01082) and a draw.

Randomness is counter-based: the draw for an output token is a function of (seed, choice_idx,
position) alone, see `uniform`. It picks the token by inverting the distribution function over token
ids in ascending order. So a row's token does not depend on its batch, and a stream that moves to
another worker goes on as if it had stayed.

Log probabilities are those of the raw logits, before any step above: they say what the model
thinks, whatever the sampler was told, and so compare between requests (as vLLM does by default).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace_worker.kernels.draws import Draw, Drawer

# Lower values are written instead of minus infinity and NaN: JSON knows neither.
MIN_LOGPROB = -1e9
# Below this, dividing by the temperature says nothing more than "the best".
GREEDY_TEMPERATURE = 1e-5
# Top-p looks at this many candidates before it sorts the whole vocabulary.
_FIRST_CANDIDATES = 512
_UNIFORM_BITS = 53
# Rows whose log probabilities are computed at once: of a long prompt they would not fit in memory.
_LOGPROB_ROWS = 64
# Higher logits, which a broken model may give, count as this; HIGHEST of kernels/cpu/sample.c.
_HIGHEST = 1e30
_NO_COUNTS: Mapping[int, int] = {}
_NO_BIAS: Mapping[int, float] = {}


@dataclass(frozen=True)
class SampleSpec:
    """How one row is sampled. Off values are the defaults; 0 is also off for top_p and penalties.

    Attributes:
        temperature: 0 = greedy; of equal logits the lowest id wins.
        top_p: keep the likeliest tokens that together reach this probability.
        top_k: keep this many likeliest tokens.
        min_p: keep tokens at least this likely relative to the likeliest.
        frequency_penalty: subtracted per occurrence in the output so far.
        presence_penalty: subtracted once for a token in the output so far.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or
            output.
        output_counts: occurrences by id in the output so far; read only with penalties.
        prompt_counts: occurrences by id in the prompt; read only with a repetition penalty.
        logit_bias: added to the logits, by id.
        allowed_token_ids: the only ids that may come; empty = all.
        allowed_mask: (V,) bool, the ids that a constraint lets come; None = all. Where it leaves
            none of `allowed_token_ids`, those are not heeded.
        forbidden_token_ids: ids that may not come (end tokens before min_tokens). Ignored where
            nothing else would be left.
        seed: of the request, 64 bits.
        choice_idx: which of the request's choices.
        position: output tokens of the choice before this one, those before a resume included.
        num_top_logprobs: None = no log probabilities; 0 = of the chosen token only.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    output_counts: Mapping[int, int] = field(default_factory=lambda: _NO_COUNTS)
    prompt_counts: Mapping[int, int] = field(default_factory=lambda: _NO_COUNTS)
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    allowed_token_ids: Sequence[int] = ()
    allowed_mask: torch.Tensor | None = None
    forbidden_token_ids: Sequence[int] = ()
    seed: int = 0
    choice_idx: int = 0
    position: int = 0
    num_top_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Something besides temperature and truncation applies."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty not in (0.0, 1.0)
            or self.logit_bias
            or self.allowed_token_ids
            or self.allowed_mask is not None
            or self.forbidden_token_ids
        )


@dataclass(frozen=True)
class Sampled:
    """The token of one row.

    Attributes:
        token_id: the choice.
        logprob: its log probability, finite; None if not asked for.
        top: likeliest tokens with their log probabilities, likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, choice_idx: int, position: int) -> float:
    """Return the draw in [0, 1) of one output token.

    BLAKE2b (RFC 7693) of the three as little-endian uint64, uint32, uint64, personalised with
    "headrace-sample1"; the top 53 bits of its first 8 bytes as a fraction.
    """
    packed = struct.pack("<QIQ", seed & (2**64 - 1), choice_idx, position)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"headrace-sample1").digest()
    return float(int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)) / 2.0**_UNIFORM_BITS


def drawn(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw tokens from (R, V) logits; the twin of `NativeKernels.draw`."""
    return [_draw(logits[each.row], each) for each in draws]


@torch.inference_mode()
def sample(
    logits: torch.Tensor, specs: Sequence[SampleSpec], drawer: Drawer = drawn
) -> list[Sampled]:
    """Choose one token per row.

    Args:
        logits: (R, V) float32; not changed.
        specs: one per row; ids in them must be in range (not checked here).
        drawer: draws where the choice is not greedy. The backends' agree but for the last bits of
            probabilities, so on all but about one draw in a million.

    Returns:
        One result per row.
    """
    adjusted = _adjusted(logits, specs)
    draws = [draw_of(row_idx, spec) for row_idx, spec in enumerate(specs) if not spec.is_greedy]
    if len(draws) == len(specs):
        chosen = drawer(adjusted, draws)
    else:
        chosen = _likeliest_ids(adjusted).tolist()
        for draw, token_id in zip(draws, drawer(adjusted, draws) if draws else (), strict=True):
            chosen[draw.row] = token_id
    results = [Sampled(token_id) for token_id in chosen]
    for row_idx, spec in enumerate(specs):
        if spec.num_top_logprobs is not None:
            results[row_idx] = with_logprobs(
                logits[row_idx : row_idx + 1], [chosen[row_idx]], [spec.num_top_logprobs]
            )[0]
    return results


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[Sampled]:
    """Return the log probabilities of given tokens, e.g. of a prompt; logits: (R, V)."""
    return with_logprobs(logits, token_ids, [num_top] * len(token_ids))


def with_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[Sampled]:
    """Return given tokens with their log probabilities and those of the likeliest.

    Args:
        logits: (R, V) float32, on any device; brought over a few rows at a time.
        token_ids: one per row.
        num_top: how many likeliest tokens each row wants.
    """
    results: list[Sampled] = []
    for start in range(0, len(token_ids), _LOGPROB_ROWS):
        part = slice(start, start + _LOGPROB_ROWS)
        results += _with_logprobs(logits[part], token_ids[part], num_top[part])
    return results


def _with_logprobs(
    rows: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[Sampled]:
    logprobs = torch.nan_to_num(rows.log_softmax(dim=-1), nan=MIN_LOGPROB, neginf=MIN_LOGPROB)
    logprobs.clamp_(min=MIN_LOGPROB)
    ids = torch.tensor(token_ids, device=rows.device)[:, None]
    chosen = logprobs.gather(1, ids).squeeze(1).tolist()
    top = logprobs.topk(min(max(num_top), rows.shape[1]), dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        Sampled(token_id, logprob, tuple(zip(best[:number], values[:number], strict=True)))
        for token_id, logprob, number, (best, values) in zip(
            token_ids, chosen, num_top, pairs, strict=True
        )
    ]


def _adjusted(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Apply penalties, bias and masks to a copy, or return the logits where there is nothing to."""
    changed = [i for i, spec in enumerate(specs) if spec.changes_logits]
    if not changed:
        return logits
    adjusted = logits.clone()
    for row_idx in changed:
        _penalise(adjusted[row_idx], specs[row_idx])
        _mask(adjusted[row_idx], specs[row_idx])
    return adjusted


def _penalise(row: torch.Tensor, spec: SampleSpec) -> None:
    repetition = spec.repetition_penalty
    if repetition not in (0.0, 1.0):
        seen = torch.tensor([*{*spec.prompt_counts, *spec.output_counts}], dtype=torch.int64)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if spec.output_counts and (spec.frequency_penalty or spec.presence_penalty):
        ids = torch.tensor([*spec.output_counts], dtype=torch.int64)
        counts = torch.tensor([*spec.output_counts.values()], dtype=torch.float32)
        row[ids] -= spec.frequency_penalty * counts + spec.presence_penalty
    if spec.logit_bias:
        ids = torch.tensor([*spec.logit_bias], dtype=torch.int64)
        row[ids] += torch.tensor([*spec.logit_bias.values()], dtype=torch.float32)


def allowed_ids(spec: SampleSpec, vocab: int) -> torch.Tensor | None:
    """Return what may come, (V,) bool on the CPU; None = everything."""
    allowed = spec.allowed_mask
    if spec.allowed_token_ids:
        allowed = _narrowed(allowed, _chosen(vocab, spec.allowed_token_ids))
    if spec.forbidden_token_ids:
        allowed = _narrowed(allowed, ~_chosen(vocab, spec.forbidden_token_ids))
    return allowed


def _mask(row: torch.Tensor, spec: SampleSpec) -> None:
    allowed = allowed_ids(spec, len(row))
    if allowed is not None:
        row.masked_fill_(~allowed, float("-inf"))


def _mended(logits: torch.Tensor) -> torch.Tensor:
    """Broken logits must spoil no more than their own row, and in it count as impossible."""
    mended = logits.nan_to_num(nan=float("-inf"), posinf=_HIGHEST, neginf=float("-inf"))
    return mended.clamp_(max=_HIGHEST)


def _chosen(vocab: int, token_ids: Sequence[int]) -> torch.Tensor:
    chosen = torch.zeros(vocab, dtype=torch.bool)
    chosen[torch.tensor([*token_ids], dtype=torch.int64)] = True
    return chosen


def _narrowed(allowed: torch.Tensor | None, further: torch.Tensor) -> torch.Tensor | None:
    """Return what both allow; where that is nothing, what the first allows."""
    both = further if allowed is None else allowed & further
    return both if bool(both.any()) else allowed


def _likeliest_ids(logits: torch.Tensor) -> torch.Tensor:
    best = logits.argmax(dim=-1)
    # NaN is the largest to argmax.
    if logits.gather(1, best[:, None]).isfinite().all():
        return best
    return _mended(logits).argmax(dim=-1)


def draw_of(row_idx: int, spec: SampleSpec) -> Draw:
    """Say how a row is drawn that is not greedy."""
    draw = uniform(spec.seed, spec.choice_idx, spec.position)
    return Draw(row_idx, spec.temperature, spec.top_p, spec.min_p, spec.top_k, draw)


def _draw(row: torch.Tensor, draw: Draw) -> int:
    # NaN and minus infinity, too, are not in between.
    if not -_HIGHEST <= float(row.max()) <= _HIGHEST:
        row = _mended(row)
    # A row without any possible token is NaN here.
    probs = ((row - row.max()) / draw.temperature).softmax(dim=-1).nan_to_num_()
    ids = _kept_ids(probs, draw)
    if ids is not None:
        probs = probs[ids]
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = draw.uniform * float(cumulative[-1])
    # The first place whose cumulated probability exceeds the target; a token of probability 0 adds
    # nothing and is passed over.
    place = int(torch.searchsorted(cumulative, target, right=True))
    place = min(place, len(cumulative) - 1)
    return place if ids is None else int(ids[place])


def _kept_ids(probs: torch.Tensor, spec: Draw) -> torch.Tensor | None:
    """Return the ids, ascending, that truncation leaves; None = all.

    Of equally likely tokens at the border those with the lowest ids stay.
    """
    if not is_truncated(spec):
        return None
    has_top_p = 0.0 < spec.top_p < 1.0
    values = _likeliest(probs, spec, has_top_p=has_top_p)
    keep = torch.ones(len(values), dtype=torch.bool)
    if has_top_p:
        # Top-p counts within what top-k left.
        total = float(values.sum(dtype=torch.float64)) if spec.top_k else 1.0
        before = values.cumsum(dim=-1, dtype=torch.float64) - values
        keep &= before < spec.top_p * total
    if spec.min_p:
        keep &= values >= spec.min_p * values[0]
    num_kept = max(1, int(keep.sum()))
    border = values[num_kept - 1]
    ids = (probs >= border).nonzero().squeeze(1)
    if len(ids) == num_kept:
        return ids
    above, level = ids[probs[ids] > border], ids[probs[ids] == border]
    return torch.cat((above, level[: num_kept - len(above)])).sort().values


def is_truncated(spec: SampleSpec | Draw) -> bool:
    """Whether less than all tokens may be drawn."""
    return bool(spec.top_k or 0.0 < spec.top_p < 1.0 or spec.min_p)


def _likeliest(probs: torch.Tensor, spec: Draw, *, has_top_p: bool) -> torch.Tensor:
    """Return the largest probabilities, descending: as many as decide the truncation."""
    if spec.top_k:
        return probs.topk(min(spec.top_k, len(probs))).values
    values = probs.topk(min(_FIRST_CANDIDATES, len(probs))).values
    reached = float(values.sum(dtype=torch.float64))
    if (has_top_p and reached >= spec.top_p) or values[-1] < spec.min_p * values[0]:
        return values
    # Ten times as fast as torch.sort, which also carries the ids.
    return torch.from_numpy(np.sort(probs.numpy())[::-1].copy())

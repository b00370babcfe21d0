"""From logits to tokens: each option against its definition, draws against their frequencies."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_worker.sampling import (
    MIN_LOGPROB,
    SampleSpec,
    sample,
    token_logprobs,
    uniform,
)

V = 2000
# uniform(0, 0, 0) and uniform(2**64 - 1, 3, 1000).
UNIFORM_GOLDEN = (0.9788415082761062, 0.8522463452881842)
INF = float("inf")


def logits_of(seed: int, num_rows: int = 1, vocab: int = V) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def one(logits: torch.Tensor, spec: SampleSpec) -> int:
    return sample(logits.reshape(1, -1), [spec])[0].token_id


def draws(row: torch.Tensor, spec: SampleSpec, num: int) -> Counter[int]:
    """Sample one row at *num* positions."""
    specs = [replace(spec, position=i) for i in range(num)]
    return Counter(result.token_id for result in sample(row.expand(num, -1), specs))


def expected_probs(row: torch.Tensor, spec: SampleSpec) -> np.ndarray[Any, Any]:
    """Compute the truncated distribution by the definitions, with a full sort in float64."""
    probs = (row.double().numpy() / spec.temperature).astype(np.float64)
    probs = np.exp(probs - probs.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    keep = np.zeros(len(probs), dtype=bool)
    total, reached = 0.0, probs[order[: spec.top_k or None]].sum()
    for rank, token_id in enumerate(order):
        if spec.top_k and rank >= spec.top_k:
            break
        if 0 < spec.top_p < 1 and total >= spec.top_p * reached and rank:
            break
        if probs[token_id] < spec.min_p * probs[order[0]]:
            break
        keep[token_id] = True
        total += probs[token_id]
    probs[~keep] = 0
    return probs / probs.sum()


def test_greedy_takes_the_best_and_the_lowest_id_of_equals() -> None:
    """Temperature 0 is the maximum; ties go to the lowest id, in every row."""
    logits = torch.zeros(3, V)
    logits[0, 700] = logits[0, 300] = 5.0
    logits[2, V - 1] = 1e-6
    assert [r.token_id for r in sample(logits, [SampleSpec()] * 3)] == [300, 0, V - 1]


@pytest.mark.parametrize(
    "spec",
    [
        SampleSpec(temperature=1.0),
        SampleSpec(temperature=0.5),
        SampleSpec(temperature=2.5),
        SampleSpec(temperature=1.0, top_k=5),
        SampleSpec(temperature=1.0, top_p=0.7),
        SampleSpec(temperature=1.5, top_p=0.9, top_k=12),
        SampleSpec(temperature=1.0, min_p=0.1),
        SampleSpec(temperature=1.3, min_p=0.05, top_p=0.95, top_k=30),
    ],
)
def test_frequencies_match_the_distribution(spec: SampleSpec) -> None:
    """2,000 draws fit the truncated softmax (chi-square, 6 sigma) and never leave its support."""
    row, num = logits_of(1, vocab=40)[0], 2000
    probs = expected_probs(row, spec)
    counts = draws(row, replace(spec, seed=123), num)
    observed = np.array([counts[i] for i in range(len(probs))], dtype=float)
    assert observed[probs == 0].sum() == 0
    is_common = probs * num >= 5
    rest = [observed[~is_common].sum(), probs[~is_common].sum() * num]
    chi_square = float(
        ((observed[is_common] - probs[is_common] * num) ** 2 / (probs[is_common] * num)).sum()
    )
    chi_square += (rest[0] - rest[1]) ** 2 / max(rest[1], 1.0)
    freedom = int(is_common.sum())
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 6


@pytest.mark.parametrize(
    "spec", [SampleSpec(1.0, top_k=3), SampleSpec(1.0, top_p=0.25), SampleSpec(1.0, 0.5, 6)]
)
def test_of_equal_tokens_at_the_border_the_lowest_ids_stay(spec: SampleSpec) -> None:
    """Truncation inside a run of equally likely tokens is decided by id, not by chance."""
    row = torch.zeros(12)
    assert set(draws(row, spec, 100)) == {0, 1, 2}


@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
@settings(max_examples=60)
def test_draws_stay_in_the_support(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Any mix of truncations keeps exactly the tokens that the definitions keep."""
    row = logits_of(seed)[0]
    spec = SampleSpec(temperature, top_p, top_k, min_p, seed=seed)
    # The float64 oracle may place a token that sits on the border on its other side.
    probs = expected_probs(row, spec)
    allowed = {int(i) for i in np.flatnonzero(probs)}
    counts = draws(row, spec, 20)
    assert len(set(counts) - allowed) <= 1
    assert sum(counts[i] for i in set(counts) - allowed) <= 1


@given(seed=st.integers(0, 2**63), order=st.permutations(range(6)))
@settings(max_examples=25)
def test_result_is_independent_of_the_batch(seed: int, order: list[int]) -> None:
    """A row has the same token alone, in a batch, and in a batch in another order."""
    logits = logits_of(seed % 1000, 6)
    specs = [
        SampleSpec(temperature=1.0, seed=seed),
        SampleSpec(),
        SampleSpec(temperature=0.8, top_p=0.9, seed=seed, position=7),
        SampleSpec(temperature=1.0, logit_bias={3: 4.0}, seed=seed, choice_idx=1),
        SampleSpec(temperature=1.2, top_k=40, num_top_logprobs=2),
        SampleSpec(frequency_penalty=1.0, output_counts={int(logits[5].argmax()): 3}),
    ]
    alone = [sample(logits[i : i + 1], [specs[i]])[0] for i in range(6)]
    assert sample(logits, specs) == alone
    shuffled = sample(logits[order], [specs[i] for i in order])
    assert shuffled == [alone[i] for i in order]


def test_seed_choice_and_position_each_change_the_draw() -> None:
    """Equal counters reproduce; any other counter is another draw; the logits are untouched."""
    row = logits_of(5)[0]
    kept = row.clone()
    spec = SampleSpec(temperature=2.0, seed=9, logit_bias={1: 2.0}, allowed_token_ids=range(V))
    first = draws(row, spec, 50)
    assert draws(row, spec, 50) == first
    assert draws(row, replace(spec, seed=10), 50) != first
    assert draws(row, replace(spec, choice_idx=1), 50) != first
    assert torch.equal(row, kept)


def test_uniform_is_fixed_for_ever() -> None:
    """The draws are part of the contract: a resumed stream may run on a newer worker."""
    assert uniform(0, 0, 0) == UNIFORM_GOLDEN[0]
    assert uniform(2**64 - 1, 3, 1000) == UNIFORM_GOLDEN[1]
    values = np.array([uniform(42, i % 4, i) for i in range(20_000)])
    assert 0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1
    histogram = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 19 + 6 * math.sqrt(38)


def test_frequency_and_presence_penalties_subtract() -> None:
    """A token seen n times loses n * frequency + presence, others nothing."""
    logits = torch.tensor([5.0, 4.0, 3.0, 2.0])
    spec = SampleSpec(output_counts={0: 3, 1: 1}, frequency_penalty=0.5, presence_penalty=0.4)
    assert one(logits, replace(spec, frequency_penalty=0.4)) == 0  # 3.4, 3.2, 3.0
    assert one(logits, replace(spec, frequency_penalty=0.55)) == 1  # 2.95, 3.05, 3.0
    assert one(logits, replace(spec, frequency_penalty=0.7)) == 2  # 2.5, 2.9, 3.0
    assert one(logits, replace(spec, frequency_penalty=-1.0, presence_penalty=0.0)) == 0


def test_repetition_penalty_covers_prompt_and_output() -> None:
    """Positive logits are divided, negative multiplied, once each; 0 and 1 are off."""
    logits = torch.tensor([4.0, 3.5, 3.0])
    spec = SampleSpec(prompt_counts={0: 9}, output_counts={1: 2}, repetition_penalty=2.0)
    assert one(logits, spec) == 2
    assert one(-logits, replace(spec, prompt_counts={2: 1})) == 0
    for off in (0.0, 1.0):
        assert one(logits, replace(spec, repetition_penalty=off)) == 0


def test_logit_bias_is_added() -> None:
    """A bias moves the choice and can ban a token."""
    logits = torch.tensor([1.0, 2.0, 3.0])
    assert one(logits, SampleSpec(logit_bias={0: 5.0})) == 0
    assert one(logits, SampleSpec(logit_bias={2: -100.0})) == 1


def test_only_allowed_tokens_come() -> None:
    """Nothing outside the allowed ids is drawn, at any temperature."""
    row = logits_of(3)[0]
    for temperature in (0.0, 1.0, 100.0):
        spec = SampleSpec(temperature, allowed_token_ids=[5, 9, 11])
        assert set(draws(row, spec, 30)) <= {5, 9, 11}


def test_forbidden_tokens_do_not_come_unless_nothing_else_may() -> None:
    """End tokens before min_tokens are left out; where only they are allowed they come."""
    logits = torch.tensor([1.0, 9.0, 3.0])
    assert one(logits, SampleSpec(forbidden_token_ids=[1])) == 2
    assert one(logits, SampleSpec(temperature=5.0, forbidden_token_ids=[1, 2])) == 0
    assert one(logits, SampleSpec(forbidden_token_ids=[1], allowed_token_ids=[1])) == 1
    assert one(logits, SampleSpec(forbidden_token_ids=[1, 2], allowed_token_ids=[1, 0])) == 0


def test_logprobs_are_of_the_raw_logits() -> None:
    """Bias, temperature and truncation leave the log probabilities alone."""
    row = logits_of(8)[0]
    expected = row.double().log_softmax(-1)
    spec = SampleSpec(1.7, top_k=1, logit_bias={4: 50.0}, num_top_logprobs=3)
    result = sample(row[None], [spec])[0]
    assert result.token_id == 4
    assert result.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert [token_id for token_id, _ in result.top] == expected.topk(3).indices.tolist()
    values = expected.topk(3).values.tolist()
    assert [value for _, value in result.top] == pytest.approx(values, abs=1e-5)


def test_logprobs_only_on_demand() -> None:
    """None = none at all; 0 = of the chosen token only."""
    logits = logits_of(1, 2)
    none, chosen = sample(logits, [SampleSpec(), SampleSpec(num_top_logprobs=0)])
    assert (none.logprob, none.top) == (None, ())
    assert chosen.logprob is not None
    assert chosen.top == ()


@pytest.mark.parametrize("bad", [-INF, float("nan")])
def test_logprobs_are_always_finite(bad: float) -> None:
    """Minus infinity and NaN become the lowest value that JSON can carry."""
    logits = torch.tensor([[bad, 1.0, bad]])
    (result,) = token_logprobs(logits, [0], 3)
    assert result.logprob == MIN_LOGPROB
    assert all(math.isfinite(value) for _, value in result.top)


def test_broken_logits_do_not_stop_the_step() -> None:
    """A row of NaN gives some token in range; its neighbour is right."""
    logits = logits_of(2, 2)
    logits[0] = float("nan")
    specs = [SampleSpec(temperature=1.0, top_p=0.5), SampleSpec()]
    broken, right = sample(logits, specs)
    assert 0 <= broken.token_id < V
    assert right.token_id == int(logits[1].argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fields", [{}, {"logit_bias": {3: 1.0}}, {"top_k": 2}], ids=str)
def test_a_nan_among_sound_logits_is_impossible(temperature: float, fields: dict[str, Any]) -> None:
    """The rest of the row is drawn from as if the broken logit were minus infinity."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    broken, masked = logits.clone(), logits.clone()
    broken[0, [7, 30]], masked[0, [7, 30]] = float("nan"), -INF
    for seed in range(5):
        spec = SampleSpec(temperature=temperature, seed=seed, **fields)
        assert sample(broken, [spec]) == sample(masked, [spec])


def test_log_probabilities_in_slices_are_those_of_each_row() -> None:
    """More rows than one slice holds, each with a number of its own."""
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(3))
    ids = [idx % 40 for idx in range(150)]
    together = token_logprobs(logits, ids, 3)
    alone = [token_logprobs(logits[i : i + 1], ids[i : i + 1], 3)[0] for i in range(150)]
    assert together == alone

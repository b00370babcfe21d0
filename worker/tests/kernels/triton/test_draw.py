"""Drawing without a sort: the tokens of `headrace_worker.sampling`, or an honest "undecided"."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from headrace_worker.kernels.triton import sampler
from headrace_worker.kernels.triton import sampling as kernels
from headrace_worker.sampling import SampleSpec, sample

# No multiple of a tile.
V = 2100


def randn(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def rows_of(specs: list[SampleSpec]) -> kernels.DrawRows:
    return sampler.draw_rows(specs, torch.device("cpu"))


def specs_of(number: int, **fields: Any) -> list[SampleSpec]:
    return [SampleSpec(seed=seed, position=7, **fields) for seed in range(number)]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 0.8, "top_k": 1},
        {"temperature": 1.3, "top_k": 8},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_the_same_tokens(fields: dict[str, Any]) -> None:
    """Every kind of truncation, over several seeds in one batch."""
    specs = specs_of(5, **fields)
    logits = 3 * randn(1, len(specs), V)
    chosen = kernels.draw(logits, rows_of(specs), 64).tolist()
    expected = [result.token_id for result in sample(logits, specs)]
    assert len({*expected}) > 1
    assert chosen == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 40, "min_p": 0.1},
        {"top_k": 40},
    ],
    ids=str,
)
def test_a_top_k_beyond_the_candidates_is_not_guessed(fields: dict[str, Any]) -> None:
    """There are fewer tiles than top-k wants: the token is right, or left to the caller."""
    specs = specs_of(8, temperature=1.5, **fields)
    logits = 2 * randn(11, len(specs), V)
    chosen = kernels.draw(logits, rows_of(specs), 64).tolist()
    expected = [result.token_id for result in sample(logits, specs)]
    decided = [pair for pair in zip(chosen, expected, strict=True) if pair[0] != kernels.UNDECIDED]
    assert all(one == two for one, two in decided)
    result = [it.token_id for it in sampler.sample(logits, specs, 64)]
    assert result == expected


def test_mixed_rows_do_not_disturb_one_another() -> None:
    """Greedy, plain and truncated rows in one batch; NaN and masked logits are never drawn."""
    specs = [
        SampleSpec(temperature=0.0),
        SampleSpec(temperature=1.0, seed=1),
        SampleSpec(temperature=1.0, seed=2, top_k=5),
        SampleSpec(temperature=0.7, seed=3, top_p=0.5),
        SampleSpec(temperature=1.0, seed=4),
    ]
    logits = 4 * randn(2, len(specs), V)
    logits[:, ::3] = float("-inf")
    expected = [result.token_id for result in sample(logits, specs)]
    assert kernels.draw(logits, rows_of(specs), 64).tolist() == expected
    logits[4, 1::3] = float("nan")
    assert int(kernels.draw(logits, rows_of(specs), 64)[4]) % 3 == 2


def test_of_equal_logits_the_lowest_id_stays() -> None:
    """At the border of a truncation and for the best, also where a whole row is equal."""
    specs = [SampleSpec(temperature=0.0), *specs_of(3, temperature=1.0, top_k=3)]
    logits = torch.zeros(len(specs), V)
    logits[:, [40, 900, 300, 1999]] = 5.0
    chosen = kernels.draw(logits, rows_of(specs), 64).tolist()
    assert chosen == [result.token_id for result in sample(logits, specs)]
    assert chosen[0] == 40
    assert {*chosen[1:]} <= {40, 300, 900}


def test_what_the_candidates_cannot_decide_is_said() -> None:
    """A flat distribution with top-p near one would need a sort: the caller is told."""
    flat = 0.01 * randn(3, 1, V)
    rows = rows_of([SampleSpec(temperature=1.0, top_p=0.999, seed=5)])
    assert kernels.draw(flat, rows, 64).tolist() == [kernels.UNDECIDED]
    too_many = rows_of([SampleSpec(temperature=1.0, top_k=V - 1, seed=5)])
    assert kernels.draw(flat, too_many, 64).tolist() == [kernels.UNDECIDED]


def test_penalties_and_bias() -> None:
    """Repetition divides or multiplies, then penalties and bias; taken back they leave no trace."""
    spec = SampleSpec(
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        output_counts=Counter({3: 2, 900: 1}),
        prompt_counts=Counter({7: 1}),
        logit_bias={3: 1.0, 11: -2.0},
    )
    logits = randn(4, 2, V)
    before, expected = logits.clone(), logits.clone()
    for token_id in (3, 7, 900):
        value = expected[1, token_id]
        expected[1, token_id] = value / 1.5 if value > 0 else value * 1.5
    expected[1, 3] += 1.0 - 2 * 0.5 - 0.25
    expected[1, 900] -= 0.5 + 0.25
    expected[1, 11] -= 2.0
    entries = sampler.penalties([SampleSpec(), spec], [None, None], V, logits.device)
    assert entries is not None
    kept = kernels.penalise(logits, entries)
    torch.testing.assert_close(logits, expected)
    assert int(logits[1].argmax()) == sample(before[1:], [spec])[0].token_id
    kernels.restore(logits, entries, kept)
    assert torch.equal(logits, before)


RANDOM: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.01},
    {"temperature": 1.2, "top_p": 0.5},
    # Beyond what the candidates decide: drawn by the twin.
    {"temperature": 1.0, "top_p": 0.9999},
]
CHANGES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "prompt_counts": Counter(range(0, V, 3))},
    {"frequency_penalty": 0.3, "presence_penalty": 0.7, "output_counts": Counter([5, 5, 5, 2099])},
    {"logit_bias": {1: 4.0, 2: -100.0, 2098: 5.5}},
    {"forbidden_token_ids": (1, 17, 2098)},
    {"allowed_token_ids": (4, 5, 6, 700)},
    {"allowed_mask": torch.arange(V) % 5 == 1, "forbidden_token_ids": (1,)},
    # Nothing would be left: the narrower wish is passed over.
    {"allowed_mask": torch.arange(V) == 8, "allowed_token_ids": (3,), "forbidden_token_ids": (8,)},
    {"allowed_token_ids": (1999,), "forbidden_token_ids": (1999,)},
]


@pytest.mark.parametrize("random", RANDOM, ids=str)
def test_the_sampler_says_what_the_torch_path_says(random: dict[str, Any]) -> None:
    """Every parameter, all rows in one batch, for the same seeds and positions, logprobs too."""
    specs = [
        SampleSpec(
            seed=31 * idx, position=idx, choice_idx=idx % 2, **random, **changes,
            num_top_logprobs=None if idx % 3 else idx,
        )
        for idx, changes in enumerate(CHANGES)
    ]  # fmt: skip
    logits = 2 * randn(7, len(specs), V)
    before = logits.clone()
    result, expected = sampler.sample(logits, specs, 64), sample(logits, specs)
    assert torch.equal(logits, before)
    assert [it.token_id for it in result] == [it.token_id for it in expected]
    assert result == expected


def test_rows_without_masks_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits that are drawn from are those of the model, not a copy."""
    seen: list[int] = []
    draw = kernels.draw
    monkeypatch.setattr(
        sampler, "draw", lambda logits, *args: seen.append(logits.data_ptr()) or draw(logits, *args)
    )
    logits = randn(8, 2, V)
    sampler.sample(logits, [SampleSpec(logit_bias={3: 9.0}), SampleSpec(temperature=1.0)])
    assert seen == [logits.data_ptr()]


BROKEN = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("bad", BROKEN, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_stay_in_their_row(bad: float, temperature: float) -> None:
    """One broken logit, a row of them, and a sound row: the torch path's choices, in range."""
    specs = [SampleSpec(temperature=temperature, seed=seed, top_k=seed) for seed in range(3)]
    logits = randn(9, 3, V)
    expected_last = sample(logits[2:], specs[2:])[0].token_id
    logits[0, 100] = bad
    logits[1] = bad
    result = [it.token_id for it in sampler.sample(logits, specs, 64)]
    twin = [it.token_id for it in sample(logits, specs)]
    assert result[2] == twin[2] == expected_last
    assert all(0 <= token_id < V for token_id in (*result, *twin))
    assert result[0] == twin[0]
    assert (result[0] == 100) == (bad == float("inf"))

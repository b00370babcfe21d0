"""Drawing without a sort: the tokens of `headrace_worker.sampling`, or an honest "undecided"."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from headrace_worker.kernels.triton import sampling as kernels
from headrace_worker.sampling import SampleSpec, sample, uniform

# No multiple of a tile.
V = 2100


def randn(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def rows_of(specs: list[SampleSpec]) -> kernels.DrawRows:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(spec, name) for spec in specs], dtype=dtype)

    draws = [uniform(spec.seed, spec.choice_idx, spec.position) for spec in specs]
    return kernels.DrawRows(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        uniform=torch.tensor(draws, dtype=torch.float64),
    )


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
    """Repetition divides or multiplies, then what is to be added is added; others stay."""
    spec = SampleSpec(
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        output_counts=Counter({3: 2, 900: 1}),
        prompt_counts=Counter({7: 1}),
        logit_bias={3: 1.0, 11: -2.0},
    )
    logits = randn(4, 2, V)
    expected = logits.clone()
    for token_id in (3, 7, 900):
        value = expected[1, token_id]
        expected[1, token_id] = value / 1.5 if value > 0 else value * 1.5
    expected[1, 3] += 1.0 - 2 * 0.5 - 0.25
    expected[1, 900] -= 0.5 + 0.25
    expected[1, 11] -= 2.0
    ids = torch.tensor([3, 7, 900, 11], dtype=torch.int32)
    repetition = torch.tensor([1.5, 1.5, 1.5, 1.0])
    added = torch.tensor([1.0 - 1.25, 0.0, -0.75, -2.0])
    best = sample(logits[1:], [spec])[0].token_id
    kernels.penalise(logits, torch.ones(4, dtype=torch.int32), ids, repetition, added)
    torch.testing.assert_close(logits, expected)
    assert int(logits[1].argmax()) == best

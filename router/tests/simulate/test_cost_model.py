"""The cost of steps, given and fitted."""

import json
from pathlib import Path
from random import Random

import pytest

from headrace_router.simulate.cost_model import CostModel, FitError, StepRecord, fit, read_step_log


def steps(costs: CostModel, count: int = 400) -> list[StepRecord]:
    random, made = Random(1), []
    for _ in range(count):
        context = random.randrange(200_000)
        start, tokens = random.randrange(60_000), random.choice([0, 0, 300, 2048])
        duration_s = costs.step_s(context, costs.prefill_s(start, tokens))
        positions = tokens * start + tokens * tokens / 2
        made.append(StepRecord(duration_s * random.uniform(0.98, 1.02), context, tokens, positions))
    return made


def test_later_tokens_of_a_prompt_cost_more() -> None:
    """And chunks add up to the whole."""
    costs = CostModel()
    assert costs.prefill_s(50_000, 1000) > 1.5 * costs.prefill_s(0, 1000)
    parts = costs.prefill_s(0, 700) + costs.prefill_s(700, 1300)
    assert parts == pytest.approx(costs.prefill_s(0, 2000))
    assert costs.cold_prefill_s(4097, 2048) == pytest.approx(0.045 + costs.prefill_s(0, 4097))


@pytest.mark.parametrize(
    "costs", [CostModel(), CostModel(0.002, 1e-6, 2e-3, 4000.0)], ids=["gpu", "cpu"]
)
def test_a_log_of_steps_tells_the_costs(costs: CostModel) -> None:
    """Within what two per cent of noise allow."""
    found = fit(steps(costs))
    assert found.base_s == pytest.approx(costs.base_s, rel=0.1)
    assert found.context_token_s == pytest.approx(costs.context_token_s, rel=0.1)
    assert found.prefill_token_s == pytest.approx(costs.prefill_token_s, rel=0.1)
    assert found.attention_tokens == pytest.approx(costs.attention_tokens, rel=0.1)


def test_costs_are_never_negative() -> None:
    """A log in which longer contexts happened to be faster gives no negative cost."""
    made = [
        StepRecord(0.01 + 1e-4 * tokens - 1e-9 * context, context, tokens)
        for tokens in (0, 100, 1000)
        for context in (0, 5000, 50_000)
    ]
    found = fit(made)
    assert found.context_token_s == 0.0
    assert found.prefill_token_s == pytest.approx(1e-4, rel=0.05)
    assert found.prefill_s(1000, 10) == pytest.approx(10 * found.prefill_token_s)


@pytest.mark.parametrize("count", [0, 1, 50])
def test_a_log_that_tells_nothing_is_refused(count: int) -> None:
    """Fifty equal steps are one."""
    with pytest.raises(FitError):
        fit([StepRecord(0.01, 100, 0)] * count)


def test_logs_are_json_lines(tmp_path: Path) -> None:
    """And mistakes are named with their line."""
    path = tmp_path / "steps.jsonl"
    row = {"duration_s": 0.1, "context_tokens": 5, "prefill_tokens": 3}
    path.write_text(json.dumps(row) + "\n")
    assert read_step_log(path) == [StepRecord(0.1, 5, 3)]
    path.write_text(json.dumps(row) + "\n[1]\n")
    with pytest.raises(FitError, match="line 2"):
        read_step_log(path)

"""Pace: chunks of prompts as large as running streams bear, on devices of any cost."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.blocks import chain_key
from headrace_worker.engine.pace import LEAST_TOKENS, Pace
from headrace_worker.engine.request import Priority, Request, SamplingParams, StopParams

BUDGET = 256
RATIO = 2.0
_keys = count(1)


def stream(**more) -> Request:
    return Request(
        key=next(_keys),
        request_id="r",
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        stopping=StopParams(),
        seed=0,
        chain_key=chain_key("m"),
        **more,
    )


def run(pace: Pace, streams: list[Request], cost_s, num_steps: int) -> list[tuple[int, float]]:
    """Take a long prompt's chunks beside *streams*; return each step's chunk and duration."""
    steps = []
    for _ in range(num_steps):
        tokens = pace.most_prompt_tokens(streams)
        duration_s = cost_s(tokens, len(streams))
        pace.note(tokens, len(streams), duration_s)
        steps.append((tokens, duration_s))
    return steps


def test_prompts_have_the_whole_budget_while_no_stream_minds():
    """Without streams, or with none but those of the class batch."""
    pace = Pace(RATIO, BUDGET)
    assert pace.most_prompt_tokens([]) == BUDGET
    assert pace.most_prompt_tokens([stream(priority=Priority.BATCH)]) == BUDGET
    assert pace.most_prompt_tokens([stream(priority=Priority.BATCH, tpot_slo_s=0.01)]) < BUDGET


@given(
    fixed_s=st.floats(0, 0.03),
    token_s=st.floats(1e-5, 3e-3),
    decode_s=st.floats(1e-3, 0.05),
    num_streams=st.integers(1, 9),
)
@settings(max_examples=30)
def test_steps_stay_within_the_ratio_and_use_it(fixed_s, token_s, decode_s, num_streams):
    """Whatever a chunk costs: no longer than allowed unless it is the least, and not much less.

    A size may add half as much again as is allowed when only one smaller one is known: the second,
    and the next one once the others are forgotten.
    """
    pace = Pace(RATIO, BUDGET)

    def cost_s(tokens, streams):
        return decode_s * (1 + 0.1 * streams) + (fixed_s + token_s * tokens if tokens else 0.0)

    usual_s = cost_s(0, num_streams)
    steps = run(pace, [stream() for _ in range(num_streams)], cost_s, 80)
    for idx, (tokens, duration_s) in enumerate(steps):
        hope = 1.5001 if idx > 60 or tokens <= LEAST_TOKENS * 3 // 2 else 1.0001
        assert tokens <= LEAST_TOKENS or duration_s <= (1 + hope * (RATIO - 1)) * usual_s
    late = [duration_s for tokens, duration_s in steps[40:] if tokens > LEAST_TOKENS]
    assert sum(duration_s > 1.0001 * RATIO * usual_s for duration_s in late) <= 1
    largest = steps[-1][0]
    assert largest == BUDGET or cost_s(2 * largest, num_streams) > RATIO * usual_s
    assert sum(tokens == 0 for tokens, _ in steps) <= 3


def test_the_most_impatient_stream_decides():
    """A wanted time per token overrides the ratio, both ways, and the least one counts."""
    pace = Pace(RATIO, BUDGET)

    def cost_s(tokens, streams):
        return 0.01 + 0.001 * tokens

    patient, hasty = stream(tpot_slo_s=0.2), stream(tpot_slo_s=0.035)
    assert run(pace, [patient], cost_s, 20)[-1][0] == 128
    assert run(pace, [patient, hasty], cost_s, 20)[-1][0] == 24
    assert run(pace, [stream(tpot_slo_s=0.001)], cost_s, 20)[-1][0] == LEAST_TOKENS


def test_one_slow_step_changes_little_and_a_slower_device_is_noticed():
    """Chunks come back after a hiccup, and shrink if all steps with prompts become slower."""
    pace = Pace(RATIO, BUDGET)
    slow = {"factor": 1.0}

    def cost_s(tokens, streams):
        return 0.05 + 0.001 * tokens * slow["factor"]

    usual = run(pace, [stream()], cost_s, 50)[-1][0]
    assert usual == 48
    slow["factor"] = 20.0
    run(pace, [stream()], cost_s, 1)
    slow["factor"] = 1.0
    assert run(pace, [stream()], cost_s, 5)[-1][0] == usual
    slow["factor"] = 30.0
    assert run(pace, [stream()], cost_s, 50)[-1][0] == LEAST_TOKENS


def test_a_first_chunk_beside_streams_is_the_least():
    """What is known of whole budgets without streams says nothing good of small chunks."""
    pace = Pace(RATIO, BUDGET)
    pace.note(BUDGET, 0, 0.3)
    pace.note(0, 1, 0.01)
    assert pace.most_prompt_tokens([stream()]) == LEAST_TOKENS


def test_a_small_chunk_that_seems_free_says_nothing_of_large_ones():
    """Beside steps that vary a chunk may seem to add nothing: sizes grow one after the other."""
    pace = Pace(RATIO, BUDGET)
    pace.note(0, 1, 0.012)
    pace.note(LEAST_TOKENS, 1, 0.007)
    assert pace.most_prompt_tokens([stream()]) == LEAST_TOKENS * 3 // 2
    pace.note(BUDGET, 1, 0.012 + 0.3)
    token_s = 0.3 / BUDGET
    assert pace.most_prompt_tokens([stream()]) * token_s <= 0.012


@pytest.mark.parametrize("budget", [1, 16, 17, 100])
def test_small_budgets_are_not_exceeded(budget):
    """The budget of a step bounds every chunk, the least one too."""
    pace = Pace(RATIO, budget)
    for tokens, _ in run(pace, [stream(tpot_slo_s=9.0)], lambda tokens, _: 0.01, 10):
        assert tokens <= budget

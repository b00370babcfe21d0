"""Step rates: tokens per second over the last steps."""

import pytest

from headrace_worker.engine.rates import StepRates


def test_rates_are_tokens_over_time_and_zero_before_any_step():
    """Prefill and decode are measured over the steps that had any of it."""
    rates = StepRates()
    assert (rates.prefill_tokens_per_s, rates.decode_tokens_per_s) == (0.0, 0.0)
    rates.add(200, 0, 1.0)
    rates.add(0, 4, 0.1)
    rates.add(100, 2, 1.0)
    assert rates.prefill_tokens_per_s == pytest.approx(150.0)
    assert rates.decode_tokens_per_s == pytest.approx(6 / 1.1)


def test_old_steps_are_forgotten():
    """A change of speed shows after the window."""
    rates = StepRates()
    rates.add(0, 1, 100.0)
    for _ in range(64):
        rates.add(0, 1, 0.01)
    assert rates.decode_tokens_per_s == pytest.approx(100.0)


def test_the_tail_of_a_cached_prompt_does_not_count_as_prefill() -> None:
    """A step that computes 18 tokens costs a whole reading of the weights."""
    rates = StepRates()
    rates.add(18, 0, 0.6)
    assert rates.prefill_tokens_per_s == 0.0
    rates.add(256, 0, 1.0)
    assert rates.prefill_tokens_per_s == pytest.approx(256.0)


def test_steps_that_only_decode_are_told_apart() -> None:
    """A chunk of prefill beside them hides what a stream costs."""
    rates = StepRates()
    assert (rates.decode_step_s, rates.decode_step_streams) == (0.0, 0.0)
    rates.add(0, 2, 0.02)
    rates.add(2048, 4, 0.5)
    rates.add(0, 4, 0.03)
    assert rates.decode_step_s == pytest.approx(0.025)
    assert rates.decode_step_streams == pytest.approx(3.0)


def test_one_slow_step_is_no_slow_device() -> None:
    """The first prompt of a worker's life takes long for reasons that do not come back."""
    rates = StepRates()
    rates.add(256, 0, 20.0)
    for _ in range(2):
        rates.add(256, 0, 1.0)
    assert rates.prefill_tokens_per_s == pytest.approx(256.0)


def test_a_chunk_cut_short_for_streams_is_no_slow_device() -> None:
    """Beside many streams a prompt gets a few tokens a step; told only while nothing else is."""
    rates = StepRates()
    rates.add(8, 20, 0.4, goes_on=True)
    assert rates.prefill_tokens_per_s == pytest.approx(20.0)
    rates.add(256, 0, 1.0)
    for _ in range(5):
        rates.add(8, 20, 0.4, goes_on=True)
    assert rates.prefill_tokens_per_s == pytest.approx(256.0)

"""Predicted seconds of prefill."""

import math
from random import Random

import pytest

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport
from headrace_router.prediction import PrefillPredictor

A, B, C = (ReplicaKey(name, 1) for name in "abc")


def measure(predictor: PrefillPredictor, key: ReplicaKey, *rates: float) -> None:
    for rate in rates:
        predictor.observe_report(key, LoadReport(prefill_tokens_per_s=rate))


def token_s(predictor: PrefillPredictor, key: ReplicaKey) -> float:
    replicas = [A, B, C]
    return predictor.token_times_s(replicas)[1][replicas.index(key)]


def test_a_measured_rate_beats_the_default() -> None:
    """Until a worker has measured, a default must do."""
    predictor = PrefillPredictor(1000)
    measure(predictor, A, 0)
    assert token_s(predictor, A) == pytest.approx(0.001)
    measure(predictor, A, 250)
    assert token_s(predictor, A) == pytest.approx(0.004)


def test_a_replica_that_has_not_measured_is_taken_for_one_like_its_peers() -> None:
    """Else a fresh replica would look faster than the one that holds the prefix."""
    predictor = PrefillPredictor(1000)
    measure(predictor, A, 30)
    assert token_s(predictor, B) == pytest.approx(1 / 30)


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_none_teaches_nothing(figure: float) -> None:
    """One worker's mistake would otherwise blind the router to all of them."""
    predictor = PrefillPredictor(1000)
    measure(predictor, A, 250)
    measure(predictor, B, 250, figure, figure)
    predictor.observe(B, 1.0, figure)
    predictor.observe(B, figure, 1.0)
    assert token_s(predictor, A) == token_s(predictor, B) == pytest.approx(0.004)


def test_noise_does_not_set_equal_replicas_apart() -> None:
    """Rates that swing by half around one value mean one value."""
    predictor, random = PrefillPredictor(1000), Random(1)
    for _ in range(300):
        for key in (A, B, C):
            measure(predictor, key, 1000 * random.uniform(0.5, 1.5))
    assert token_s(predictor, A) == token_s(predictor, B) == token_s(predictor, C)


def test_a_slower_device_is_told_apart() -> None:
    """Half the rate is no noise."""
    predictor = PrefillPredictor(1000)
    for key, rate in ((A, 1000), (B, 1000), (C, 200)):
        measure(predictor, key, *[rate + idx / 10 for idx in range(300)])
    assert token_s(predictor, C) > 3 * token_s(predictor, A)


def test_one_bad_first_figure_does_not_brand_a_replica() -> None:
    """Measured once while everything started, told for ever since: its peers know better."""
    predictor = PrefillPredictor(1000)
    measure(predictor, A, *[1000 + idx for idx in range(100)])
    measure(predictor, B, *[7] * 500)
    assert token_s(predictor, B) == token_s(predictor, A) == pytest.approx(0.001, rel=0.1)


def test_the_first_observations_tell_most() -> None:
    """A rate that is wrong by far is nearly right after three requests."""
    predictor = PrefillPredictor(1000)
    measure(predictor, A, 40)
    for _ in range(4):
        predictor.observe(A, 400 * token_s(predictor, A), 0.6)
    assert 400 * token_s(predictor, A) == pytest.approx(0.6, rel=1.0)


def test_learns_from_what_really_happened() -> None:
    """A replica that takes twice the time predicted is predicted so in the end; others are not."""
    predictor = PrefillPredictor(1000)
    for key in (A, B, C):
        measure(predictor, key, 1000)
        measure(predictor, key, 1001, 1000)
    for _ in range(300):
        predictor.observe(A, 1000 * token_s(predictor, A), 4.0)
        predictor.observe(B, 1000 * token_s(predictor, B), 1.0)
    assert 1000 * token_s(predictor, A) == pytest.approx(4.0, rel=0.2)
    assert 1000 * token_s(predictor, B) == pytest.approx(1.0, rel=0.2)


def test_one_slow_prefill_does_not_brand_its_replica() -> None:
    """Six times slower, beside a burst of streams: the machine was slow, not this replica."""
    predictor = PrefillPredictor(1000)
    for key in (A, B, C):
        measure(predictor, key, 150)
    predictor.observe(A, 400 * token_s(predictor, A), 2.7)
    predictor.observe(B, 400 * token_s(predictor, B), 16.0)
    assert token_s(predictor, A) == token_s(predictor, B) == token_s(predictor, C)
    assert 400 * token_s(predictor, A) < 6.0


def test_one_outlier_cannot_ruin_the_prediction() -> None:
    """Correction is bounded, however far off observations are."""
    predictor = PrefillPredictor(1000)
    for _ in range(1000):
        predictor.observe(A, 0.1, 1e6)
    assert token_s(predictor, A) <= 0.032 * 1.001


def test_tiny_prefills_teach_nothing() -> None:
    """Where fixed costs dominate, the rate cannot be seen."""
    predictor = PrefillPredictor(1000)
    predictor.observe(A, 0.001, 0.5)
    predictor.observe(A, 0.5, 0.0)
    assert token_s(predictor, A) == pytest.approx(0.001)


def test_forgets_replicas_that_are_gone() -> None:
    """Memory does not grow with restarts."""
    predictor = PrefillPredictor(1000)
    measure(predictor, A, 100)
    predictor.observe(A, 0.1, 0.2)
    predictor.forget({B})
    assert token_s(predictor, A) == token_s(predictor, C)

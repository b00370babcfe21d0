"""Predicted seconds of prefill."""

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
    return predictor.token_s(key, predictor.usual_token_s([A, B, C]))


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
    for key, rate in ((A, 1000), (B, 1000), (C, 500)):
        measure(predictor, key, *[rate] * 10)
    assert token_s(predictor, A) == pytest.approx(0.001)
    assert token_s(predictor, C) == pytest.approx(0.002)


def test_learns_from_what_really_happened() -> None:
    """A replica that takes twice the time predicted is predicted so in the end; others are not."""
    predictor = PrefillPredictor(1000)
    for key in (A, B, C):
        measure(predictor, key, 1000)
    for _ in range(300):
        predictor.observe(A, 1000 * token_s(predictor, A), 2.0)
    assert 1000 * token_s(predictor, A) == pytest.approx(2.0, rel=0.05)
    assert token_s(predictor, B) == pytest.approx(0.001)


def test_one_outlier_cannot_ruin_the_prediction() -> None:
    """Correction is bounded, however far off observations are."""
    predictor = PrefillPredictor(1000)
    for _ in range(1000):
        predictor.observe(A, 0.1, 1e6)
    assert token_s(predictor, A) <= 0.004 * 1.001


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
    assert token_s(predictor, A) == pytest.approx(0.001)

"""Predicted seconds of prefill."""

import pytest

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport
from headrace_router.prediction import PrefillPredictor

A, B = ReplicaKey("a", 1), ReplicaKey("b", 1)


def test_a_measured_rate_beats_the_default() -> None:
    """Until the worker has measured, a default must do."""
    predictor = PrefillPredictor(1000)
    assert predictor.seconds_per_token(A, LoadReport(), 1000) == pytest.approx(0.001)
    measured = LoadReport(prefill_tokens_per_s=250)
    assert predictor.seconds_per_token(A, measured, 1000) == pytest.approx(0.004)


def test_a_replica_that_has_not_measured_is_taken_for_one_like_its_peers() -> None:
    """Else a fresh replica would look faster than the one that holds the prefix."""
    predictor = PrefillPredictor(1000)
    reports = [LoadReport(prefill_tokens_per_s=rate) for rate in (0, 30, 50, 40)]
    assert predictor.usual_rate(reports) == 40
    assert predictor.usual_rate([LoadReport()]) == 1000
    assert predictor.seconds_per_token(A, LoadReport(), 40) == pytest.approx(1 / 40)


def test_learns_from_what_really_happened() -> None:
    """A replica that takes twice the time predicted is predicted so in the end; others are not."""
    predictor = PrefillPredictor(1000)
    for _ in range(100):
        predicted_s = 100 * predictor.seconds_per_token(A, LoadReport(), 1000)
        predictor.observe(A, predicted_s, 0.2)
    assert 100 * predictor.seconds_per_token(A, LoadReport(), 1000) == pytest.approx(0.2, rel=0.05)
    assert predictor.seconds_per_token(B, LoadReport(), 1000) == pytest.approx(0.001)


def test_one_outlier_cannot_ruin_the_prediction() -> None:
    """Correction is bounded, however far off observations are."""
    predictor = PrefillPredictor(1000)
    for _ in range(1000):
        predictor.observe(A, 0.1, 1e6)
    assert predictor.seconds_per_token(A, LoadReport(), 1000) <= 0.004 * 1.001


def test_tiny_prefills_teach_nothing() -> None:
    """Where fixed costs dominate, the rate cannot be seen."""
    predictor = PrefillPredictor(1000)
    predictor.observe(A, 0.001, 0.5)
    predictor.observe(A, 0.5, 0.0)
    assert predictor.seconds_per_token(A, LoadReport(), 1000) == pytest.approx(0.001)


def test_forgets_replicas_that_are_gone() -> None:
    """Memory does not grow with restarts."""
    predictor = PrefillPredictor(1000)
    predictor.observe(A, 0.1, 0.2)
    predictor.forget({B})
    assert predictor.seconds_per_token(A, LoadReport(), 1000) == pytest.approx(0.001)

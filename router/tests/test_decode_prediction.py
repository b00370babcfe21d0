"""Seconds of decode, learned from reports."""

import math

import pytest

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport
from headrace_router.decode_prediction import UNKNOWN, DecodePredictor

A, B = ReplicaKey("a", 1), ReplicaKey("b", 1)


def feed(decode: DecodePredictor, base_s: float, slope_s: float, streams: list[int]) -> None:
    for count in streams:
        step_s = base_s + slope_s * count
        decode.observe(A, LoadReport(decode_step_streams=count, decode_step_s=step_s))


@pytest.mark.parametrize(("base_s", "slope_s"), [(0.015, 0.0004), (0.001, 0.02)])
def test_learns_what_one_more_stream_costs(base_s: float, slope_s: float) -> None:
    """Hardly anything on a GPU, nearly everything on a CPU."""
    decode = DecodePredictor()
    feed(decode, base_s, slope_s, [1, 8, 3, 12, 5, 2] * 40)
    step = decode.step(A, UNKNOWN)
    assert step.slope_s == pytest.approx(slope_s, rel=0.3)
    assert step.base_s + 10 * step.slope_s == pytest.approx(base_s + 10 * slope_s, rel=0.05)


def test_one_point_is_split_in_halves() -> None:
    """Before there is variety, a stream is taken to cost something."""
    decode = DecodePredictor()
    feed(decode, 0.02, 0.0, [1])
    assert decode.step(A, UNKNOWN) == pytest.approx((0.01, 0.01))


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_none_teaches_nothing(figure: float) -> None:
    decode = DecodePredictor()
    feed(decode, 0.01, 0.001, [4, 8, 16])
    learned = decode.usual_step([A])
    decode.observe(A, LoadReport(decode_step_streams=figure, decode_step_s=0.01))
    decode.observe(A, LoadReport(decode_step_streams=5, decode_step_s=figure))
    assert decode.usual_step([A]) == learned


def test_a_fresh_replica_is_like_its_peers() -> None:
    """An optimistic constant would send everything to whoever has not generated yet."""
    decode = DecodePredictor()
    assert decode.usual_step([A, B]) == UNKNOWN
    feed(decode, 0.02, 0.0, [1])
    usual = decode.usual_step([A, B])
    assert decode.step(B, usual) == decode.step(A, UNKNOWN)
    decode.forget({B})
    assert decode.usual_step([A, B]) == UNKNOWN


def test_outputs_are_as_long_as_they_usually_are() -> None:
    """Callers ask for thousands of tokens and take few."""
    decode = DecodePredictor()
    assert decode.output_tokens("m") == 256
    for _ in range(400):
        decode.observe_output("m", 20)
    assert decode.output_tokens("m") == pytest.approx(20, abs=1)
    assert decode.output_tokens("other") == 256

"""The timeline: a browser can read it, its window is bounded, and it says what steps did."""

import json

import pytest

from headrace_common.clock import SystemClock
from headrace_testing import byte_tokenizer
from headrace_testing.toy_model import toy_model
from headrace_worker.engine.direct import DirectEngine, limits_for
from headrace_worker.engine.profile import MAX_STEPS, Timeline
from headrace_worker.engine.request import Request, SamplingParams, StopParams

PHASES = {"step", "schedule", "model", "sample", "detokenise", "hand out"}


def generate(engine: DirectEngine, num_tokens: int) -> None:
    engine.submit(
        Request(
            key=1,
            request_id="r",
            prompt_token_ids=byte_tokenizer.encode("the wheel"),
            sampling=SamplingParams(temperature=0.0),
            stopping=StopParams(max_tokens=num_tokens),
            seed=0,
            chain_key=b"k" * 32,
            accepted_s=SystemClock().now_s(),
        )
    )
    while not engine.next()[1].is_last:
        pass


def events(path):
    trace = json.loads(path.read_text(encoding="utf-8"))
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"headrace worker", "engine"}
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_says_what_each_step_did_and_when(tmp_path):
    """Phases lie within their step, in order, with the step's sizes; the window is kept."""
    path = tmp_path / "trace.json"
    made = toy_model(200, 32)
    engine = DirectEngine(made, limits_for(made))
    engine.engine.record(Timeline(path, num_steps=3, skipped_steps=1))
    with engine:
        generate(engine, 6)
    noted = events(path)
    steps = [event for event in noted if event["name"] == "step"]
    assert [event["args"]["step"] for event in steps] == [1, 2, 3]
    assert {event["name"] for event in noted} == PHASES
    for step in steps:
        assert step["args"]["decode_tokens"] == step["args"]["tokens"] == 1
        parts = [e for e in noted if e["args"]["step"] == step["args"]["step"] and e is not step]
        assert len(parts) == len(PHASES) - 1
        for part in parts:
            assert part["ts"] >= step["ts"]
            assert part["ts"] + part["dur"] <= step["ts"] + step["dur"]
        begins = [part["ts"] for part in parts]
        assert begins == sorted(begins)


def test_an_engine_that_ends_early_writes_what_there_is(tmp_path):
    """A window that is not full is written at the end."""
    path = tmp_path / "trace.json"
    made = toy_model(200, 32)
    engine = DirectEngine(made, limits_for(made))
    engine.engine.record(Timeline(path, num_steps=100))
    with engine:
        generate(engine, 2)
    prefill = next(event for event in events(path) if event["name"] == "model")
    assert prefill["args"]["tokens"] == 9
    assert prefill["args"]["admitted"] == 1


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    """It is said in the log; requests notice nothing."""
    made = toy_model(200, 32)
    engine = DirectEngine(made, limits_for(made))
    engine.engine.record(Timeline(tmp_path / "none" / "trace.json", num_steps=1))
    with engine:
        generate(engine, 4)
    assert "could not be written" in caplog.text


def test_its_window_is_bounded(tmp_path):
    """Memory is."""
    with pytest.raises(ValueError, match="1 to"):
        Timeline(tmp_path / "trace.json", MAX_STEPS + 1)

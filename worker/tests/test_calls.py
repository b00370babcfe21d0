"""Calls: slow callers get merged events, the end is told once, drains see who is still there."""

import asyncio

import pytest

from headrace_common.errors import Internal, ReplicaDraining
from headrace_worker.calls import Calls
from headrace_worker.drain import Drain
from headrace_worker.engine.output import ChoiceOutput, RequestOutput, Times, Usage
from headrace_worker.engine.request import Finish, Request, SamplingParams, StopParams
from headrace_worker.sampling import Sampled


def request(key=1) -> Request:
    return Request(key, f"r{key}", [1], SamplingParams(), StopParams(), 0, b"k")


def step(key=1, text="a", *, choice_idx=0, made=1, **more) -> RequestOutput:
    part = ChoiceOutput(choice_idx, [Sampled(made)], text, more.pop("finish", None))
    return RequestOutput(key, Usage(1, 0, made), [part], **more)


@pytest.fixture
def ended():
    return []


@pytest.fixture
def calls(ended):
    return Calls(lambda call, output: ended.append((call.request.key, output.usage)))


async def test_what_a_slow_caller_did_not_take_is_merged(calls):
    """Tokens and text add up, usage is the latest, choices stay apart."""
    call = calls.open(request())
    calls.dispatch([step(text="a", queue_s=0.5)])
    calls.dispatch([step(text="b", made=2), step(key=99)])
    calls.dispatch([step(text="x", choice_idx=1, made=3)])
    last = step(text="c", made=4, finish=Finish.STOP, is_last=True, times=Times(0, 0, 0, 0))
    calls.dispatch([last])
    output = await call.take()
    texts = {part.choice_idx: part.text for part in output.choices}
    assert texts == {0: "abc", 1: "x"}
    assert [t.token_id for t in output.choices[0].tokens] == [1, 2, 4]
    assert output.choices[0].finish is Finish.STOP
    assert (output.queue_s, output.usage, output.is_last) == (0.5, Usage(1, 0, 4), True)


async def test_a_fast_caller_gets_each_step(calls):
    """What was taken is not given again."""
    call = calls.open(request())
    taken = []
    for text in "ab":
        calls.dispatch([step(text=text)])
        taken.append((await call.take()).choices[0].text)
    assert taken == ["a", "b"]


async def test_the_end_is_told_once_even_if_the_caller_left(calls, ended):
    """The usage of an abandoned request is still accounted for."""
    call = calls.open(request())
    assert calls.close(call) is True
    calls.dispatch([step(made=3, is_last=True)])
    calls.dispatch([step(made=4, is_last=True)])
    assert ended == [(1, Usage(1, 0, 3))]
    assert calls.close(call) is False


async def test_tokens_come_before_the_error(calls):
    """What was made before a failure is handed out with it."""
    call = calls.open(request())
    calls.dispatch([step(text="a")])
    call.fail(ReplicaDraining("go"))
    calls.dispatch([step(text="b")])
    calls.dispatch([RequestOutput(1, Usage(1, 0, 1), error=Internal(), is_last=True)])
    output = await call.take()
    assert output.choices[0].text == "ab"
    assert isinstance(output.error, ReplicaDraining)


async def test_a_call_that_is_complete_does_not_fail(calls):
    """The regular end that waits for its caller stays regular."""
    call = calls.open(request())
    calls.dispatch([step(text="a", is_last=True)])
    call.fail(ReplicaDraining("go"))
    assert (await call.take()).error is None


async def test_a_drain_waits_for_running_calls(calls):
    """All finish within the grace: nothing is moved, nothing new is let in."""
    drain = Drain(calls)
    drain.check_admits()
    call = calls.open(request())
    draining = asyncio.create_task(drain.drain(5.0))
    await asyncio.sleep(0)
    with pytest.raises(ReplicaDraining):
        drain.check_admits()
    assert not draining.done()
    calls.close(call)
    result = await draining
    assert (result.num_finished, result.num_moved) == (1, 0)


async def test_a_drain_moves_what_outlasts_the_grace(calls):
    """Each remaining call ends with REPLICA_DRAINING."""
    call = calls.open(request())
    draining = asyncio.create_task(Drain(calls).drain(0.01))
    output = await call.take()
    assert isinstance(output.error, ReplicaDraining)
    calls.close(call)
    result = await draining
    assert (result.num_finished, result.num_moved) == (0, 1)

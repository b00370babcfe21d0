"""A constraint in the engine: its state follows the tokens, its end is the answer's, its failure is
its own."""

import threading

import pytest
import torch

from headrace_common.blocks import chain_key
from headrace_common.clock import SystemClock
from headrace_common.errors import Internal, InvalidRequest
from headrace_testing import byte_tokenizer
from headrace_testing.toy_runner import END_ID, ToyRunner
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.request import Finish, Request, SamplingParams, StopParams
from headrace_worker.engine.scheduler import SchedulerLimits
from headrace_worker.engine.token_table import TokenTable

TABLE = TokenTable.from_json(byte_tokenizer.tokenizer_json())


class OneText:
    """A constraint and its matcher in one: any of the letters given, as many times as given."""

    def __init__(self, letters, length, *, breaks_at=None):
        self.letters, self.length, self.breaks_at = letters, length, breaks_at
        self.seen = ""

    def begin(self):
        return OneText(self.letters, self.length, breaks_at=self.breaks_at)

    def mask(self):
        if self.breaks_at == len(self.seen):
            raise InvalidRequest("too complex", param="constraint")
        mask = torch.zeros(byte_tokenizer.VOCAB_SIZE, dtype=torch.bool)
        mask[list(self.letters.encode())] = True
        return mask

    def accept(self, token_id):
        if chr(token_id) not in self.letters:
            raise InvalidRequest("does not fit", param="constraint")
        self.seen += chr(token_id)

    @property
    def is_complete(self):
        return len(self.seen) >= self.length


def run(*requests, num_blocks=64):
    """Run requests to their ends; return outputs by key."""
    outputs = {request.key: [] for request in requests}
    over = threading.Semaphore(0)

    def take(step):
        for output in step:
            outputs[output.key].append(output)
            if output.is_last:
                over.release()

    engine = Engine(
        ToyRunner(num_blocks, 4),
        num_blocks,
        SchedulerLimits(16, 8, 32, 200, 4),
        TABLE,
        BlockEventLog(),
        take,
        SystemClock(),
        lambda _facts: None,
    )
    engine.start()
    for request in requests:
        engine.submit(request)
    for _ in requests:
        assert over.acquire(timeout=10)
    engine.stop()
    assert engine.load.kv_used_tokens == 0
    return outputs


def request(key=1, *, constraint, temperature=1.0, stopping=None, **more):
    return Request(
        key=key,
        request_id=f"req_{key}",
        prompt_token_ids=byte_tokenizer.encode("prompt"),
        sampling=SamplingParams(temperature=temperature),
        stopping=stopping or StopParams(max_tokens=50, end_token_ids=frozenset([END_ID])),
        seed=7,
        chain_key=chain_key("m"),
        constraint=constraint,
        **more,
    )


def text(outputs, choice_idx=0):
    parts = [part for output in outputs for part in output.choices]
    return "".join(part.text for part in parts if part.choice_idx == choice_idx)


def finish(outputs, choice_idx=0):
    parts = [part for output in outputs for part in output.choices]
    return [part.finish for part in parts if part.choice_idx == choice_idx][-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_only_what_is_allowed_comes_and_its_end_is_the_end(temperature):
    """Without an end token, and whatever ignore_eos and min_tokens say."""
    stopping = StopParams(max_tokens=50, min_tokens=20)
    wanted = request(
        constraint=OneText("xyz", 9), temperature=temperature, stopping=stopping, num_choices=3
    )
    outputs = run(wanted)[1]
    for choice_idx in range(3):
        assert len(text(outputs, choice_idx)) == 9
        assert set(text(outputs, choice_idx)) <= set("xyz")
        assert finish(outputs, choice_idx) is Finish.STOP


def test_a_resumed_stream_goes_on_in_the_constraint():
    """The state is rebuilt from the tokens: the same text, and one that was whole is told so."""
    whole = text(run(request(constraint=OneText("abcd", 12)))[1])
    for at in (1, 7, 11):
        resume = {0: byte_tokenizer.encode(whole[:at])}
        outputs = run(request(constraint=OneText("abcd", 12), resume=resume))[1]
        assert text(outputs) == whole[at:]
    outputs = run(
        request(constraint=OneText("abcd", 12), resume={0: byte_tokenizer.encode(whole)})
    )[1]
    assert (text(outputs), finish(outputs)) == ("", Finish.STOP)


def test_a_constraint_that_fails_ends_its_own_request_only():
    """When no mask can be made, or a resumed token does not fit; batch mates go on."""
    outputs = run(
        request(1, constraint=OneText("ab", 9, breaks_at=4), num_choices=2),
        request(2, constraint=OneText("ab", 9)),
        request(3, constraint=OneText("ab", 9), resume={0: byte_tokenizer.encode("zz")}),
    )
    assert isinstance(outputs[1][-1].error, InvalidRequest)
    assert isinstance(outputs[3][-1].error, InvalidRequest)
    assert len(text(outputs[2])) == 9
    assert outputs[2][-1].error is None


def test_a_constraint_that_cannot_begin_ends_its_own_request_only():
    """A mistake behind the constraint is told to whoever asked, and to nobody else."""
    broken = OneText("ab", 9)
    broken.begin = lambda: 1 / 0
    outputs = run(
        request(1, constraint=OneText("ab", 9)),
        request(2, constraint=broken),
        request(3, constraint=OneText("ab", 9)),
    )
    assert isinstance(outputs[2][-1].error, Internal)
    assert [len(text(outputs[key])) for key in (1, 3)] == [9, 9]


class FailsAt:
    """A constraint whose matchers raise *error* in *method*, from the choice's turn on."""

    def __init__(self, error, method, choice_idx):
        self.error, self.method, self.choice_idx = error, method, choice_idx
        self.num_begun = 0

    def begin(self):
        matcher = OneText("ab", 9)
        if self.num_begun == self.choice_idx:
            setattr(matcher, self.method, self.fail)
        self.num_begun += 1
        return matcher

    def fail(self, *_args):
        raise self.error


@pytest.mark.parametrize("error", [InvalidRequest("no", param="constraint"), ZeroDivisionError()])
@pytest.mark.parametrize(("method", "num_tokens"), [("mask", 0), ("accept", 1)])
def test_what_fails_in_one_choice_ends_the_request_and_its_count(error, method, num_tokens):
    """Of the step in which it fails only what was handed out is counted; batch mates go on."""
    outputs = run(
        request(1, constraint=FailsAt(error, method, 1), num_choices=4),
        request(2, constraint=OneText("ab", 9)),
    )
    told = InvalidRequest if isinstance(error, InvalidRequest) else Internal
    assert isinstance(outputs[1][-1].error, told)
    parts = [part for output in outputs[1] for part in output.choices]
    assert sum(len(part.tokens) for part in parts) == num_tokens
    assert outputs[1][-1].usage.output_tokens == num_tokens
    assert (len(text(outputs[2])), outputs[2][-1].error) == (9, None)


def test_stop_strings_and_max_tokens_cut_as_ever():
    """The client asked for both."""
    stopping = StopParams(max_tokens=50, stop=("aa",))
    outputs = run(request(constraint=OneText("a", 9), stopping=stopping))[1]
    assert (text(outputs), finish(outputs)) == ("", Finish.STOP)
    stopping = StopParams(max_tokens=3)
    outputs = run(request(constraint=OneText("a", 9), stopping=stopping))[1]
    assert (text(outputs), finish(outputs)) == ("aaa", Finish.LENGTH)

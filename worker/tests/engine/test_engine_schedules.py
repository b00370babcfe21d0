"""Random schedules of everything at once: each request says what it says alone, or a part of it.

The engine is turned by hand, so that aborts fall into every state and a failure repeats.
"""

from dataclasses import dataclass, field, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.blocks import chain_key
from headrace_common.clock import SystemClock
from headrace_testing import byte_tokenizer
from headrace_testing.toy_runner import END_ID, ToyRunner
from headrace_worker.engine.block_events import BlockEventLog, Cleared, Removed, Stored
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.pooling import Pooling
from headrace_worker.engine.request import Finish, Priority, Request, SamplingParams, StopParams
from headrace_worker.engine.scheduler import SchedulerLimits
from headrace_worker.engine.token_table import TokenTable

SIZE = 4
TABLE = TokenTable.from_json(byte_tokenizer.tokenizer_json())
# One request of the longest kind fits, hardly more.
NUM_BLOCKS, CONTEXT_TOKENS = 12, 44
MOST_TURNS = 3000


class Letters:
    """A constraint and its matcher in one: so many of the letters a to p, each not the last one."""

    def __init__(self, length, last=None):
        self.left, self.last = length, last

    def begin(self):
        return Letters(self.left)

    def mask(self):
        mask = torch.zeros(byte_tokenizer.VOCAB_SIZE, dtype=torch.bool)
        mask[97:113] = True
        if self.last is not None:
            mask[self.last] = False
        return mask

    def accept(self, token_id):
        assert self.mask()[token_id]
        self.left, self.last = self.left - 1, token_id

    @property
    def is_complete(self):
        return self.left == 0


@dataclass(frozen=True)
class Wish:
    """A request, how much of it was made elsewhere, and when it comes and is aborted."""

    prompt: str
    stopping: StopParams
    sampling: SamplingParams
    seed: int
    num_choices: int = 1
    priority: Priority = Priority.STANDARD
    num_top_logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    skip_prefix_cache: bool = False
    constrained_to: int | None = None
    pooling: Pooling | None = None
    resumed: tuple[int, ...] = (0, 0, 0)
    comes_at: int = 0
    aborted_at: int | None = None

    def request(self, key, made_elsewhere=None):
        return Request(
            key=key,
            request_id=f"req_{key}",
            prompt_token_ids=byte_tokenizer.encode(self.prompt),
            sampling=self.sampling,
            stopping=self.stopping,
            seed=self.seed,
            chain_key=chain_key("m"),
            num_choices=self.num_choices if self.pooling is None else 1,
            resume=made_elsewhere or {},
            priority=self.priority,
            num_top_logprobs=self.num_top_logprobs,
            wants_prompt_logprobs=self.wants_prompt_logprobs,
            num_prompt_top_logprobs=2,
            skip_prefix_cache=self.skip_prefix_cache,
            pooling=self.pooling,
            constraint=None if self.constrained_to is None else Letters(self.constrained_to),
            accepted_s=SystemClock().now_s(),
        )


@dataclass
class Said:
    """What came of one choice: its tokens, and the text that each let out."""

    tokens: list = field(default_factory=list)
    texts: list = field(default_factory=list)
    finish: Finish | None = None
    stop_matched: str = ""


@dataclass
class Truth:
    """All that a request says alone."""

    choices: list[Said]
    prompt_logprobs: list
    embedding: list[float] | None


class HandTurned:
    """An engine without its thread, and what it said."""

    def __init__(self, num_blocks, token_budget, max_running):
        self.outputs: dict[int, list[RequestOutput]] = {}
        self.events = BlockEventLog(num_kept=100_000)
        self.num_preempted = 0
        limits = SchedulerLimits(
            token_budget, max_running, 64, CONTEXT_TOKENS, SIZE, checks_books=True
        )
        self.engine = Engine(
            ToyRunner(num_blocks, SIZE),
            num_blocks,
            limits,
            TABLE,
            self.events,
            self._take,
            SystemClock(),
            self._note,
        )

    def _take(self, outputs):
        for output in outputs:
            self.outputs[output.key].append(output)

    def _note(self, facts):
        assert not facts.failed
        self.num_preempted += facts.num_preempted

    def submit(self, request):
        self.outputs[request.key] = []
        self.engine.submit(request)

    def is_over(self, key):
        return bool(self.outputs[key]) and self.outputs[key][-1].is_last

    def turn(self):
        if not self.engine._commands.empty() or self.engine._live:
            has_something = self.engine._scheduler.has_work or not self.engine._commands.empty()
            assert has_something, "a request is lost"
            self.engine._turn()

    def play(self, wishes):
        """Submit and abort as wished, turn by turn, until all is over."""
        for turn in range(MOST_TURNS):
            for key, (wish, resume) in enumerate(wishes):
                if wish.comes_at == turn:
                    self.submit(wish.request(key, resume))
                if wish.aborted_at == turn:
                    self.engine.abort(key)
            self.turn()
            if len(self.outputs) == len(wishes) and all(map(self.is_over, self.outputs)):
                return
        raise AssertionError("something starved")

    def said(self, key, num_choices):
        choices = [Said() for _ in range(num_choices)]
        for output in self.outputs[key]:
            assert output.error is None
            for part in output.choices:
                choice = choices[part.choice_idx]
                assert choice.finish is None, "something came after the end"
                choice.tokens += part.tokens
                choice.texts.append(part.text)
                choice.finish, choice.stop_matched = part.finish, part.stop_matched
        return choices

    def prompt_logprobs(self, key):
        return [it for output in self.outputs[key] for it in output.prompt_logprobs]

    def check_at_rest(self):
        """Nothing is held, nothing waits, and the index knows what the cache knows."""
        assert not self.engine._live
        assert self.engine.load.kv_used_tokens == 0
        assert not self.engine._scheduler.has_work
        cache = self.engine._cache
        cache.check()
        assert cache.pool.num_used == 0
        assert set(self.events.snapshot()[1]) == set(cache._block_ids)
        followed = set()
        for batch in self.events.since(1) or []:
            for event in batch.events:
                match event:
                    case Stored(hashes):
                        followed |= set(hashes)
                    case Removed(hashes):
                        assert followed.issuperset(hashes)
                        followed -= set(hashes)
                    case Cleared():
                        followed.clear()
        assert followed == set(cache._block_ids)


def alone(wish):
    """Return what a request says with all the room there is: in one chunk, from no cache."""
    bench = HandTurned(64, 64, 8)
    bench.play([(replace(wish, skip_prefix_cache=True, comes_at=0, aborted_at=None), {})])
    bench.check_at_rest()
    assert bench.num_preempted == 0
    said = [] if wish.pooling else bench.said(0, wish.num_choices)
    return Truth(said, bench.prompt_logprobs(0), bench.outputs[0][-1].embedding)


def check_choice(got, whole, num_resumed, *, is_aborted):
    """Compare a choice with the same one alone, from where it went on."""
    tokens, texts = whole.tokens[num_resumed:], whole.texts[num_resumed:]
    if is_aborted and got.finish in (None, Finish.ABORT):
        tokens, texts = tokens[: len(got.tokens)], texts[: len(got.tokens)]
    else:
        assert (got.finish, got.stop_matched) == (whole.finish, whole.stop_matched)
    assert got.tokens == tokens
    assert "".join(got.texts) == "".join(texts)


def made_elsewhere(wish, truth):
    """Return the tokens that a stream had when it broke, by choice."""
    if wish.pooling is not None:
        return {}
    return {
        idx: [it.token_id for it in choice.tokens[: wish.resumed[idx]]]
        for idx, choice in enumerate(truth.choices)
    }


def check_request(bench, key, wish, truth, resume):
    """Compare all that was said of a request with what it says alone."""
    is_aborted = wish.aborted_at is not None and wish.aborted_at >= wish.comes_at
    last = bench.outputs[key][-1]
    if wish.pooling is not None:
        if not is_aborted or last.embedding is not None:
            said, expected = torch.tensor(last.embedding), torch.tensor(truth.embedding)
            assert torch.allclose(said, expected, atol=1e-5)
        return
    for idx, got in enumerate(bench.said(key, wish.num_choices)):
        num_resumed = len(resume.get(idx, []))
        check_choice(got, truth.choices[idx], num_resumed, is_aborted=is_aborted)
    if not is_aborted:
        assert last.usage.output_tokens == sum(len(it.tokens) for it in truth.choices)
        if not any(resume.values()):
            assert bench.prompt_logprobs(key) == truth.prompt_logprobs


STOPS = st.sampled_from([(), ("a",), ("ab", "q"), ("z ", " z"), ("e", "the"), ("xyz",)])
STOPPING = st.builds(
    StopParams,
    max_tokens=st.sampled_from([1, 2, 7, 16, 16, 100, 100]),
    min_tokens=st.sampled_from([0, 0, 1]),
    stop=STOPS,
    end_token_ids=st.sampled_from([frozenset(), frozenset([END_ID]), frozenset([END_ID, 101])]),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0, 3.0]),
    top_k=st.sampled_from([0, 5]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)
# Few texts, so that some find others' blocks, whole and in part; borders of blocks and context.
PROMPTS = st.sampled_from(
    [("the mill wheel " * 3)[:length] for length in (1, 4, 8, 9, 16, 20, 31, 40, 43)]
    + [("a stone " * 6)[:length] for length in (3, 12, 30)]
)
WISHES = st.builds(
    Wish,
    prompt=PROMPTS,
    stopping=STOPPING,
    sampling=SAMPLING,
    seed=st.integers(0, 3),
    num_choices=st.integers(1, 3),
    priority=st.sampled_from(list(Priority)),
    num_top_logprobs=st.sampled_from([None, 0, 2]),
    wants_prompt_logprobs=st.sampled_from([False, False, True]),
    skip_prefix_cache=st.sampled_from([False, False, True]),
    constrained_to=st.sampled_from([None, None, 1, 6]),
    pooling=st.sampled_from([None] * 5 + list(Pooling)),
    resumed=st.tuples(*[st.sampled_from([0, 0, 1, 3, 9, 99])] * 3),
    comes_at=st.sampled_from([0, 0, 1, 2, 5, 11, 20]),
    aborted_at=st.sampled_from([None] * 30 + list(range(30))),
)


@settings(max_examples=60)
@given(
    wishes=st.lists(WISHES, min_size=2, max_size=8),
    token_budget=st.sampled_from([3, 5, 8, 13, 44]),
    max_running=st.sampled_from([1, 2, 3]),
)
def test_each_request_says_what_it_says_alone(wishes, token_budget, max_running):
    """Whatever comes, goes, waits, is preempted, shares blocks or is aborted meanwhile."""
    truths = [alone(wish) for wish in wishes]
    resumes = [made_elsewhere(*pair) for pair in zip(wishes, truths, strict=True)]
    bench = HandTurned(NUM_BLOCKS, token_budget, max_running)
    bench.play(list(zip(wishes, resumes, strict=True)))
    bench.check_at_rest()
    for key, (wish, truth, resume) in enumerate(zip(wishes, truths, resumes, strict=True)):
        check_request(bench, key, wish, truth, resume)


def test_a_tight_pool_preempts_in_the_middle_of_everything():
    """The property above is not empty: without room for all some are put back, and finish."""
    stopping = StopParams(max_tokens=16)
    wishes = [
        Wish(prompt, stopping, SamplingParams(), seed, num_top_logprobs=2, **more)
        for seed, (prompt, more) in enumerate(
            [
                ("the mill wheel turns", {"wants_prompt_logprobs": True}),
                ("the mill", {"constrained_to": 12}),
                ("a stone", {"num_choices": 2}),
            ]
        )
    ]
    truths = [alone(wish) for wish in wishes]
    bench = HandTurned(NUM_BLOCKS, 7, 4)
    bench.play([(wish, {}) for wish in wishes])
    assert bench.num_preempted > 0
    bench.check_at_rest()
    for key, (wish, truth) in enumerate(zip(wishes, truths, strict=True)):
        check_request(bench, key, wish, truth, {})

"""Engine: what comes out is what the model says, whatever else goes on; nothing ends the loop."""

import math
import sys
import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.blocks import chain_key
from headrace_common.clock import SystemClock
from headrace_common.errors import ContextTooLong, Internal, QueueFull
from headrace_testing import byte_tokenizer
from headrace_testing.toy_runner import END_ID, ToyRunner, continuation, logits_after
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.pooling import Pooling
from headrace_worker.engine.request import Finish, Priority, Request, SamplingParams, StopParams
from headrace_worker.engine.scheduler import SchedulerLimits
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.sampling import SampleSpec

SIZE = 4
TABLE = TokenTable.from_json(byte_tokenizer.tokenizer_json())


class Bench:
    """An engine over the toy model, and everything it said."""

    def __init__(self, num_blocks=64, *, may_end=True, **limits):
        self.runner = ToyRunner(num_blocks, SIZE, may_end=may_end)
        self.events = BlockEventLog()
        self.outputs: dict[int, list[RequestOutput]] = defaultdict(list)
        self.facts = []
        self._changed = threading.Condition()
        sizes = {
            "token_budget": 16,
            "max_running": 8,
            "max_waiting": 32,
            "context_tokens": 200,
        }
        self.engine = Engine(
            self.runner,
            num_blocks,
            SchedulerLimits(**(sizes | limits), block_size=SIZE, checks_books=True),
            TABLE,
            self.events,
            self._take,
            SystemClock(),
            self.facts.append,
        )

    def __enter__(self):
        self.engine.start()
        return self

    def __exit__(self, *exc_info):
        self.runner.go.set()
        self.engine.stop()

    def _take(self, outputs):
        with self._changed:
            for output in outputs:
                self.outputs[output.key].append(output)
            self._changed.notify_all()

    def wait(self, condition, within_s=10.0):
        with self._changed:
            assert self._changed.wait_for(condition, within_s)

    def finish(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)
        for request in requests:
            self.wait(lambda key=request.key: self.is_over(key))

    def is_over(self, key: int) -> bool:
        return bool(self.outputs[key]) and self.outputs[key][-1].is_last

    def tokens(self, key: int, choice_idx: int = 0) -> list[int]:
        return [t.token_id for part in self.parts(key, choice_idx) for t in part.tokens]

    def text(self, key: int, choice_idx: int = 0) -> str:
        return "".join(part.text for part in self.parts(key, choice_idx))

    def parts(self, key: int, choice_idx: int = 0):
        parts = [part for output in self.outputs[key] for part in output.choices]
        return [part for part in parts if part.choice_idx == choice_idx]


def request(prompt: str, key=1, *, max_tokens=12, temperature=0.0, seed=0, **more) -> Request:
    stopping = more.pop("stopping", None) or StopParams(
        max_tokens=max_tokens, end_token_ids=frozenset([END_ID])
    )
    sampling = more.pop("sampling", None) or SamplingParams(temperature=temperature)
    return Request(
        key=key,
        request_id=f"req_{key}",
        prompt_token_ids=byte_tokenizer.encode(prompt),
        sampling=sampling,
        stopping=stopping,
        seed=seed,
        chain_key=chain_key("m"),
        **more,
    )


def expected(prompt: str, num=12, *, may_end=True, **spec) -> list[int]:
    spec = SampleSpec(**spec)
    return continuation(byte_tokenizer.encode(prompt), num, spec, may_end=may_end)


def test_makes_what_the_model_says():
    """Greedy output equals the plain continuation, with the right counts."""
    with Bench() as bench:
        bench.finish(request("the water turns the wheel"))
        last = bench.outputs[1][-1]
        assert bench.tokens(1) == expected("the water turns the wheel")
        assert bench.text(1) == byte_tokenizer.decode(bench.tokens(1))
        assert (last.usage.prompt_tokens, last.usage.output_tokens) == (25, len(bench.tokens(1)))
        assert last.times is not None
        assert bench.outputs[1][0].queue_s is not None


def test_the_end_token_ends_and_has_no_text():
    """The end token is in the tokens, not in the text."""
    prompt = next(
        p for p in map(str, range(500)) if END_ID in expected(p, 12) and len(expected(p, 12)) > 3
    )
    with Bench() as bench:
        bench.finish(request(prompt))
        part = bench.parts(1)[-1]
        assert (bench.tokens(1)[-1], part.finish) == (END_ID, Finish.STOP)
        assert bench.text(1) == byte_tokenizer.decode(bench.tokens(1)[:-1])


def test_min_tokens_puts_the_end_off():
    """Before min_tokens tokens the end token is not drawn."""
    prompt = next(p for p in map(str, range(500)) if len(expected(p, 12)) < 5)
    stopping = StopParams(max_tokens=9, min_tokens=6, end_token_ids=frozenset([END_ID]))
    with Bench() as bench:
        bench.finish(request(prompt, stopping=stopping))
        assert len(bench.tokens(1)) > 6
        assert END_ID not in bench.tokens(1)[:6]


def test_a_stop_string_is_cut_out():
    """Text ends before the stop string; the tokens show what was made."""
    whole = byte_tokenizer.decode(expected("abc", 12, may_end=False))
    stop = whole[4:7]
    stopping = StopParams(max_tokens=12, stop=(stop,))
    with Bench(may_end=False) as bench:
        bench.finish(request("abc", stopping=stopping))
        part = bench.parts(1)[-1]
        assert (part.finish, part.stop_matched) == (Finish.STOP, stop)
        assert bench.text(1) == whole[: whole.find(stop)]


def test_max_tokens_and_the_context_end_with_length():
    """Either limit is a LENGTH, also when the context is the shorter one."""
    with Bench(may_end=False, context_tokens=20) as bench:
        bench.finish(request("a" * 15, 1, max_tokens=3), request("b" * 15, 2, max_tokens=100))
        assert [len(bench.tokens(key)) for key in (1, 2)] == [3, 5]
        assert [bench.parts(key)[-1].finish for key in (1, 2)] == [Finish.LENGTH] * 2


def test_a_cached_prefix_changes_nothing_but_the_count():
    """The second of two equal requests reuses blocks and says the same."""
    prompt = "a long prefix that both share, and more"
    with Bench() as bench:
        bench.finish(request(prompt, 1))
        bench.finish(request(prompt, 2))
        assert bench.tokens(1) == bench.tokens(2) == expected(prompt)
        assert [bench.outputs[key][-1].usage.cached_tokens for key in (1, 2)] == [0, 36]


def test_choices_differ_by_their_index_only():
    """Each choice is what a request of its own with that index would be."""
    prompt = "choices share"
    with Bench() as bench:
        bench.finish(request(prompt, 1, num_choices=3, temperature=1.0, seed=5))
        for idx in range(3):
            assert bench.tokens(1, idx) == expected(prompt, temperature=1.0, seed=5, choice_idx=idx)
        assert bench.outputs[1][-1].usage.prompt_tokens == len(prompt)


@settings(max_examples=15)
@given(
    prompts=st.lists(
        st.tuples(
            st.text(alphabet="ab", min_size=1, max_size=30),
            st.integers(1, 3),
            st.sampled_from(list(Priority)),
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 2**64 - 1),
)
def test_batch_mates_chunks_and_preemption_change_nothing(prompts, seed):
    """In a pool far too small for all, each request still gets exactly its own continuation."""
    with Bench(num_blocks=14, token_budget=9, max_running=6) as bench:
        requests = [
            request(text, key, temperature=1.0, seed=seed, num_choices=n, priority=priority)
            for key, (text, n, priority) in enumerate(prompts)
        ]
        bench.finish(*requests)
        for key, (text, n, _) in enumerate(prompts):
            for idx in range(n):
                assert bench.tokens(key, idx) == expected(
                    text, temperature=1.0, seed=seed, choice_idx=idx
                )
        assert bench.engine.load.kv_used_tokens == 0
        assert max(bench.runner.step_tokens) <= 9


def test_preemption_happens_in_the_test_above():
    """The small pool really preempts, so the property is not empty."""
    with Bench(num_blocks=10, may_end=False) as bench:
        bench.finish(*[request("abcdefgh"[key:] * 2, key, max_tokens=20) for key in range(4)])
        assert bench.engine.load.num_preemptions_total > 0
        for key in range(4):
            assert bench.tokens(key) == expected("abcdefgh"[key:] * 2, 20, may_end=False)


@pytest.mark.parametrize("broken_at", [1, 4, 11])
def test_a_resumed_stream_goes_on_token_for_token(broken_at):
    """Prompt + emitted tokens + the same seed give the rest of the same output."""
    prompt = "resume me, please"
    whole = expected(prompt, temperature=1.0, seed=9, may_end=False)
    with Bench(may_end=False) as bench:
        resume = {0: whole[:broken_at]}
        bench.finish(request(prompt, 1, temperature=1.0, seed=9, resume=resume))
        assert bench.tokens(1) == whole[broken_at:]
        assert bench.text(1) == byte_tokenizer.decode(whole[broken_at:])
        usage = bench.outputs[1][-1].usage
        assert (usage.prompt_tokens, usage.output_tokens) == (len(prompt), 12)


def test_a_choice_that_had_ended_is_only_told_to_have_ended():
    """Resuming what is complete makes no token and no text."""
    done = [*byte_tokenizer.encode("xy"), END_ID]
    with Bench() as bench:
        bench.finish(request("p", 1, num_choices=2, resume={0: done, 1: [120]}))
        assert (bench.tokens(1, 0), bench.text(1, 0)) == ([], "")
        assert bench.parts(1, 0)[-1].finish is Finish.STOP
        assert bench.tokens(1, 1)
        bench.finish(request("p", 2, resume={0: done}))
        assert bench.outputs[2][-1].usage.output_tokens == 3


def test_only_prompts_that_go_on_or_are_long_tell_the_rate_of_prefill():
    """A short prompt's step takes as long as one of decoding, whose tokens are none of a prompt."""
    with Bench(token_budget=128) as bench:
        bench.finish(request("short", 1), request("and short", 2))
        assert bench.engine.load.prefill_tokens_per_s == 0
        assert bench.engine.load.decode_tokens_per_s > 0
        bench.finish(request("long enough " * 10, 3))
        assert bench.engine.load.prefill_tokens_per_s > 0


def test_an_abort_frees_the_blocks_before_the_next_step():
    """After the abort at most the step under way is completed."""
    with Bench(may_end=False) as bench:
        bench.engine.submit(request("abc", 1, max_tokens=150))
        bench.wait(lambda: len(bench.outputs[1]) > 3)
        bench.runner.go.clear()
        num_steps = len(bench.runner.step_tokens)
        bench.engine.abort(1)
        bench.runner.go.set()
        bench.wait(lambda: bench.is_over(1))
        assert len(bench.runner.step_tokens) <= num_steps + 2
        assert bench.engine.load.kv_used_tokens == 0
        assert bench.outputs[1][-1].usage.output_tokens == len(bench.tokens(1))
        bench.engine.abort(1)
        bench.finish(request("still alive", 2))


def test_an_abort_storm_leaks_nothing_and_touches_no_one_else():
    """Aborts at all stages; the rest gets its own continuation; every block is back."""
    with Bench(num_blocks=20, may_end=False, max_waiting=64) as bench:
        for key in range(30):
            bench.engine.submit(request(f"storm {key}", key, num_choices=1 + key % 3))
            if key % 2:
                bench.engine.abort(key)
            if key % 6 == 0 and key:
                bench.engine.abort(key - 6)
        for key in range(30):
            bench.wait(lambda key=key: bench.is_over(key))
        spared = [key for key in range(30) if key % 2 == 0 and key % 6]
        for key in spared:
            assert bench.tokens(key) == expected(f"storm {key}", may_end=False)
        assert bench.engine.load.kv_used_tokens == 0
        bench.engine._cache.check()


def test_a_failing_step_fails_its_requests_and_no_other():
    """The poisoned request gets Internal, its blocks come back, the engine goes on."""
    with Bench() as bench:
        bench.runner.poison_id = ord("!")
        bench.finish(request("boom!", 1))
        assert isinstance(bench.outputs[1][-1].error, Internal)
        assert bench.engine.load.kv_used_tokens == 0
        bench.finish(request("fine", 2))
        assert bench.tokens(2) == expected("fine")
        assert [fact.failed for fact in bench.facts].count(True) == 1


def test_a_mistake_in_the_engines_own_books_drops_requests_not_the_loop():
    """Even when the scheduler itself raises, requests get an answer and the next one works."""
    with Bench() as bench:
        bench.runner.go.clear()
        bench.engine.submit(request("abc", 1))
        bench.engine._scheduler.finish = None
        bench.runner.go.set()
        bench.wait(lambda: bench.is_over(1))
        assert isinstance(bench.outputs[1][-1].error, Internal)
        bench.finish(request("fine", 2))
        assert bench.tokens(2) == expected("fine")
        assert bench.events.snapshot()[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_loop_is_stalled_for_ever():
    """If the thread is gone without having been told to, that shows even while idle."""
    with Bench() as bench:
        bench.engine._turn = lambda: sys.exit(1)
        bench.engine.submit(request("abc", 1))
        bench.engine._thread.join(5)
        assert bench.engine.stalled_s() == math.inf


def test_refusals_come_as_outputs():
    """What the scheduler refuses ends with its error; nothing else is touched."""
    with Bench(max_waiting=1) as bench:
        bench.finish(request("x" * 200, 1))
        assert isinstance(bench.outputs[1][-1].error, ContextTooLong)
        bench.runner.go.clear()
        bench.engine.submit(request("a", 2))
        for key in (3, 4, 5):
            bench.engine.submit(request("a", key))
        bench.runner.go.set()
        for key in (2, 3, 4, 5):
            bench.wait(lambda key=key: bench.is_over(key))
        refused = [k for k in (3, 4, 5) if isinstance(bench.outputs[k][-1].error, QueueFull)]
        assert 4 in refused or 5 in refused


def test_says_how_long_it_has_been_stalled():
    """With work and no step the age grows; idle means zero."""
    with Bench() as bench:
        assert bench.engine.stalled_s() == 0.0
        bench.runner.go.clear()
        bench.engine.submit(request("abc", 1))
        first = bench.engine.stalled_s()
        threading.Event().wait(0.02)
        assert bench.engine.stalled_s() >= first + 0.01
        bench.runner.go.set()
        bench.wait(lambda: bench.is_over(1))


def test_gives_log_probabilities_when_asked():
    """Output log probabilities come with alternatives, the prompt's once and for each token."""
    with Bench() as bench:
        bench.finish(request("abcdefgh" * 4, 1, num_top_logprobs=2, wants_prompt_logprobs=True))
        drawn = [t for part in bench.parts(1) for t in part.tokens]
        assert all(t.logprob is not None and len(t.top) == 2 for t in drawn)
        assert all(t.top[0][0] == t.token_id for t in drawn)
        said = [output.prompt_logprobs for output in bench.outputs[1] if output.prompt_logprobs]
        assert [len(part) for part in said] == [31]
        assert [t.token_id for t in said[0]] == byte_tokenizer.encode("abcdefgh" * 4)[1:]


def test_the_prompts_log_probabilities_survive_choices_that_begin_in_one_step():
    """Several choices share the step that ends the prompt; what is known of it is told once."""
    with Bench() as bench:
        bench.finish(request("abcdefgh", 1, num_choices=3, wants_prompt_logprobs=True))
        said = [output.prompt_logprobs for output in bench.outputs[1] if output.prompt_logprobs]
        assert [len(part) for part in said] == [7]


def test_the_prompts_log_probabilities_survive_preemption():
    """What is computed again is not told again, and chunks of other sizes leave nothing out."""
    num_preempted = 0
    for length in range(9, 30, 3):
        prompts = [("abcdefghijklmnopqrstuvwxyz"[key:] * 2)[:length] for key in range(3)]
        with Bench(may_end=False) as bench:
            bench.finish(request(prompts[0], 0, wants_prompt_logprobs=True))
            alone = [it for output in bench.outputs[0] for it in output.prompt_logprobs]
        with Bench(num_blocks=14, may_end=False, max_running=3, token_budget=11) as bench:
            wanted = {"max_tokens": 16, "wants_prompt_logprobs": True}
            bench.finish(*(request(prompt, key, **wanted) for key, prompt in enumerate(prompts)))
            num_preempted += bench.engine.load.num_preemptions_total
            said = {
                key: [it for output in bench.outputs[key] for it in output.prompt_logprobs]
                for key in range(3)
            }
        for key, prompt in enumerate(prompts):
            assert [it.token_id for it in said[key]] == byte_tokenizer.encode(prompt)[1:]
        assert said[0] == alone
    assert num_preempted > 0


def test_cache_changes_are_numbered_and_match_what_is_held():
    """Full blocks are told; after everything ended they are still held."""
    with Bench() as bench:
        bench.finish(request("abcdefgh", 1, max_tokens=1))
        assert bench.events.last_seq >= 1
        assert len(bench.events.snapshot()[1]) == 2


def embedding_of(prompt: str, pooling: Pooling) -> torch.Tensor:
    ids = byte_tokenizer.encode(prompt)
    states = [logits_after(ids[:end]) for end in range(1, len(ids) + 1)]
    total = torch.stack(states).sum(dim=0) if pooling is Pooling.MEAN else states[-1]
    return torch.nn.functional.normalize(total, dim=0)


def same(output: RequestOutput, expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(output.embedding), expected, atol=1e-5)


@pytest.mark.parametrize("pooling", Pooling)
def test_embeddings_depend_on_their_text_only(pooling):
    """Chunks, batch mates, cached prefixes and preemption change no vector."""
    long = "the water turns the wheel and the wheel turns the stone"
    with Bench(24, may_end=False, token_budget=8) as bench:
        bench.finish(
            request(long, 1, pooling=pooling),
            request("other", 2, max_tokens=30),
            request(long[:30], 3, pooling=pooling),
        )
        bench.finish(request(long, 4, pooling=pooling))
        expected = {1: long, 3: long[:30], 4: long}
        for key, text in expected.items():
            last = bench.outputs[key][-1]
            assert same(last, embedding_of(text, pooling)), key
            assert (last.usage.prompt_tokens, last.usage.output_tokens) == (len(text), 0)
        cached = bench.outputs[4][-1].usage.cached_tokens
        assert (cached > 0) is (pooling is Pooling.LAST)
        assert bench.engine.load.kv_used_tokens == 0


def test_a_preempted_text_starts_its_vector_anew():
    """What was summed before a preemption does not count twice."""
    long = "the water turns the wheel and the wheel turns the stone"
    with Bench(18, may_end=False, token_budget=4, max_running=4) as bench:
        # The second grows into the blocks of the first, which takes three tokens a step.
        bench.finish(
            request(long, 1, pooling=Pooling.MEAN, priority=Priority.BATCH),
            request("b" * 8, 2, max_tokens=40, priority=Priority.HIGH),
        )
        assert bench.engine.load.num_preemptions_total > 0
        assert same(bench.outputs[1][-1], embedding_of(long, Pooling.MEAN))

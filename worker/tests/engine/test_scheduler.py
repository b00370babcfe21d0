"""Scheduler: budget, order, blocks; nothing leaks, nothing starves, everything ends."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_common.blocks import chain, chain_key
from headrace_common.errors import ContextTooLong, QueueFull
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.engine.handover import BlockImport
from headrace_worker.engine.pace import Pace
from headrace_worker.engine.prefix_cache import PrefixCache
from headrace_worker.engine.request import (
    Finish,
    Priority,
    Request,
    SamplingParams,
    SequenceState,
    StopParams,
)
from headrace_worker.engine.scheduler import (
    MAX_PASSED_S,
    Scheduler,
    SchedulerLimits,
    StepPlan,
)

SIZE = 4


def make(num_blocks=16, token_budget=8, max_running=4, max_waiting=8, pace=None, **more):
    cache = PrefixCache(num_blocks, BlockEventLog())
    limits = SchedulerLimits(
        token_budget, max_running, max_waiting, more.get("context_tokens", 1000), SIZE
    )
    return Scheduler(limits, cache, pace), cache


def request(prompt, key=1, *, at_s=0.0, priority=Priority.STANDARD, tenant=b"", **more) -> Request:
    return Request(
        key=key,
        request_id=f"req_{key}",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(),
        stopping=StopParams(),
        seed=0,
        chain_key=chain_key("m", "", tenant),
        priority=priority,
        accepted_s=at_s,
        **more,
    )


def run_step(scheduler: Scheduler, now_s: float = 0.0, token: int = 7) -> StepPlan:
    """Plan a step and do what the engine does with it."""
    plan = scheduler.plan(now_s)
    for chunk in plan.chunks:
        gives_token = chunk.gives_token
        scheduler.computed(chunk)
        if gives_token:
            for fork in scheduler.fork(chunk.seq):
                fork.seq.token_ids.append(token)
            chunk.seq.token_ids.append(token)
    return plan


def lengths(plan: StepPlan) -> dict[int, int]:
    return {chunk.seq.request.key: chunk.num_tokens for chunk in plan.chunks}


def test_decodes_go_before_prompts_under_one_budget():
    """A long prompt takes only what the running streams leave."""
    scheduler, _ = make(token_budget=8)
    scheduler.add(request(range(3), 1))
    run_step(scheduler)
    scheduler.add(request(range(100, 120), 2))
    assert lengths(run_step(scheduler)) == {1: 1, 2: 7}
    assert lengths(run_step(scheduler)) == {1: 1, 2: 7}
    assert lengths(run_step(scheduler)) == {1: 1, 2: 6}
    assert lengths(run_step(scheduler)) == {1: 1, 2: 1}


def test_prompts_take_no_more_than_the_streams_bear():
    """The pace bounds all chunks of prompts of a step together; streams are never held back."""
    pace = Pace(2.0, 100)
    for _ in range(5):
        pace.note(0, 1, 0.1)
        pace.note(0, 2, 0.1)
        pace.note(8, 1, 0.18)
        pace.note(12, 1, 0.22)
    scheduler, _ = make(token_budget=100, pace=pace)
    scheduler.add(request(range(3), 1))
    assert lengths(run_step(scheduler)) == {1: 3}
    scheduler.add(request(range(100, 105), 2))
    scheduler.add(request(range(200, 220), 3))
    assert lengths(run_step(scheduler)) == {1: 1, 2: 5, 3: 3}
    assert lengths(run_step(scheduler)) == {1: 1, 2: 1, 3: 8}


def test_reuses_cached_blocks_but_computes_the_last_token():
    """A prompt that is wholly cached still computes its last block."""
    scheduler, cache = make(token_budget=100)
    first, second = request(range(8), 1), request(range(8), 2)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.abort(first)
    scheduler.add(second)
    assert lengths(run_step(scheduler)) == {2: 4}
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    cache.check()


def test_does_not_reuse_across_tenants_or_when_told_not_to():
    """Another salt, or skip_prefix_cache, means no hit."""
    scheduler, _ = make(token_budget=100)
    for idx, more in enumerate([{}, {"tenant": b"x"}, {"skip_prefix_cache": True}]):
        it = request(range(8), idx, **more)
        scheduler.add(it)
        assert lengths(run_step(scheduler)) == {idx: 8}
        assert it.cached_tokens == 0
        scheduler.abort(it)


def test_a_finished_sequences_leaves_are_evicted_before_their_parents():
    """The order of eviction is the chain backwards, so that a prefix outlives its extensions."""
    scheduler, cache = make(token_budget=100)
    it = request(range(12), 1)
    scheduler.add(it)
    run_step(scheduler)
    scheduler.abort(it)
    hashes = it.sequences[0].block_hashes
    assert cache.pool.cached_in_eviction_order() == list(reversed(hashes))


def test_a_wish_for_an_early_first_token_goes_before_patience():
    """Within a class the earliest deadline is first."""
    scheduler, _ = make(max_running=1)
    scheduler.add(request([1], 1, at_s=0.0))
    scheduler.add(request([2], 2, at_s=1.0, ttft_slo_s=0.5))
    scheduler.add(request([3], 3, at_s=2.0, ttft_slo_s=60.0))
    assert [seq.request.key for seq in scheduler.waiting] == [2, 1, 3]


def test_higher_class_goes_first_and_equals_by_arrival():
    """Class before arrival, arrival within a class."""
    scheduler, _ = make(max_running=1)
    order = [Priority.BATCH, Priority.STANDARD, Priority.HIGH, Priority.HIGH]
    for key, priority in enumerate(order):
        scheduler.add(request([key], key, at_s=key * 0.001, priority=priority))
    assert [seq.request.key for seq in scheduler.waiting] == [2, 3, 1, 0]


def test_waiting_makes_up_for_class():
    """After ten seconds a batch request stands before a fresh standard one."""
    scheduler, _ = make(max_running=1)
    scheduler.add(request([1], 1, at_s=0.0, priority=Priority.BATCH))
    scheduler.add(request([2], 2, at_s=9.0))
    scheduler.add(request([3], 3, at_s=11.0))
    assert [seq.request.key for seq in scheduler.waiting] == [2, 1, 3]


def test_refuses_what_can_never_fit():
    """Longer than the context, or than all blocks together: refused at the door."""
    scheduler, _ = make(context_tokens=10)
    with pytest.raises(ContextTooLong):
        scheduler.add(request(range(10)))
    scheduler, _ = make(num_blocks=2)
    with pytest.raises(ContextTooLong):
        scheduler.add(request(range(8)))
    scheduler.add(request(range(7)))


def test_refuses_when_the_queue_is_full():
    """The queue is bounded; the refusal says when to come back."""
    scheduler, _ = make(max_waiting=1)
    scheduler.add(request([1], 1))
    with pytest.raises(QueueFull) as refusal:
        scheduler.add(request([2], 2))
    assert refusal.value.retry_after_s


def test_preempts_the_latest_of_the_lowest_class_and_lets_it_go_on():
    """The victim's blocks go back; later it is computed again and nothing is lost."""
    scheduler, cache = make(num_blocks=4, token_budget=100)
    older, younger = request(range(4), 1, at_s=1.0), request(range(50, 54), 2, at_s=2.0)
    scheduler.add(older)
    run_step(scheduler)
    scheduler.add(younger)
    victims = []
    while not victims:
        victims = [seq.request.key for seq in run_step(scheduler).preempted]
    assert victims == [2]
    assert younger.sequences[0].state is SequenceState.PREEMPTED
    tokens = list(younger.sequences[0].token_ids)
    scheduler.abort(older)
    plan = run_step(scheduler)
    assert [chunk.seq.request.key for chunk in plan.chunks] == [2]
    assert younger.sequences[0].token_ids[: len(tokens)] == tokens
    assert younger.num_preemptions == 1
    cache.check()


def test_a_preempted_prompts_last_token_leaves_its_budget_to_others():
    """It was taken before all prompts, like a stream's token, and goes back to where it was."""
    scheduler, cache = make(num_blocks=8, token_budget=2, max_running=2)
    older, eager = request(range(2), 1), request(range(50, 65), 2, at_s=1.0, ttft_slo_s=0.5)
    scheduler.add(older)
    run_step(scheduler)
    scheduler.add(eager)
    while eager.sequences[0].num_computed < 14 or cache.pool.num_available:
        run_step(scheduler)
    scheduler.add(request([9], 3, at_s=0.5, ttft_slo_s=0.1))
    plan = run_step(scheduler)
    assert [seq.request.key for seq in plan.preempted] == [2]
    assert lengths(plan) == {1: 1, 3: 1}


def test_what_a_chunk_is_does_not_change_with_what_is_drawn():
    """The step is measured after its tokens have been appended."""
    scheduler, _ = make(token_budget=4)
    scheduler.add(request(range(5), 1))
    seen = []
    for _ in range(3):
        (chunk,) = run_step(scheduler).chunks
        seen.append((chunk.gives_token, chunk.is_decode))
    assert seen == [(False, False), (True, False), (True, True)]


def test_a_token_computed_again_on_the_way_is_no_decode():
    """After a preemption output is computed like a prompt, in chunks as small as may be."""
    scheduler, _ = make(token_budget=1, max_running=1)
    scheduler.add(request([1], 1, resume={0: [2, 3]}))
    kinds = [run_step(scheduler).chunks[0].is_decode for _ in range(3)]
    assert kinds == [False, False, True]


class NoMemory:
    """The bytes of blocks, which scheduling does not care for."""

    layout, block_bytes = "none", 0

    def write_blocks(self, block_ids, data):
        pass


def imported(cache, prompt, num_reserved=0):
    """Begin an import of a prompt's full blocks and take in as many as there is room for."""
    hashes = list(chain(chain_key("m"), list(prompt)[: len(prompt) // SIZE * SIZE], SIZE))
    incoming = BlockImport(NoMemory(), num_reserved)
    for block_hash in hashes[incoming.begin(cache, hashes) :]:
        if not incoming.add(cache, [block_hash], b""):
            break
    return incoming


def test_an_import_ends_when_a_stream_needs_its_room():
    """Nobody is preempted for blocks that are only on their way; those that came stay cached."""
    scheduler, cache = make(num_blocks=4, token_budget=100)
    it = request(range(3), 1)
    scheduler.add(it)
    run_step(scheduler)
    incoming = imported(cache, range(50, 62))
    assert (len(incoming.block_table), cache.pool.num_available) == (3, 0)
    for _ in range(6):
        assert lengths(run_step(scheduler)) == {1: 1}
    assert it.num_preemptions == 0
    assert not incoming.add(cache, [b"x" * 32], b"")
    incoming.close()
    cache.check()


def test_an_import_ends_when_nothing_else_could_run():
    """A prompt that waits is not kept from an idle engine."""
    scheduler, cache = make(num_blocks=4, token_budget=100)
    incoming = imported(cache, range(50, 66))
    scheduler.add(request(range(7), 1))
    assert lengths(run_step(scheduler)) == {1: 7}
    assert cache.pool.num_used == 2
    incoming.close()


def test_a_higher_class_takes_the_place_of_a_running_lower_one():
    """Class binds also when every place is taken, but not endlessly against the same request."""
    scheduler, _ = make(max_running=1)
    batch = request([1], 1, priority=Priority.BATCH)
    scheduler.add(batch)
    run_step(scheduler)
    for key in (2, 3, 4):
        high = request([key], key, priority=Priority.HIGH)
        scheduler.add(high)
        plan = run_step(scheduler)
        expected = [key] if key < 4 else [1]
        assert [chunk.seq.request.key for chunk in plan.chunks] == expected
        scheduler.abort(high)
        run_step(scheduler)
    assert batch.num_preemptions == 2


def test_small_requests_pass_a_big_one_but_not_for_long():
    """The one that does not fit is passed for a bounded time."""
    scheduler, _ = make(num_blocks=8, token_budget=100)
    scheduler.add(request(range(20), 1))
    run_step(scheduler)
    scheduler.add(request(range(100, 124), 2, at_s=0.0))
    scheduler.add(request([5], 3, at_s=0.1))
    assert 3 in lengths(run_step(scheduler, now_s=0.2))
    scheduler.add(request([6], 4, at_s=0.3))
    assert 4 not in lengths(run_step(scheduler, now_s=MAX_PASSED_S + 1))


def test_choices_share_the_prompts_blocks():
    """Full blocks are shared, the partial one is copied, the prompt is computed once."""
    scheduler, cache = make(token_budget=100)
    it = request(range(10), 1, num_choices=3)
    scheduler.add(it)
    plan = scheduler.plan(0.0)
    assert [chunk.num_tokens for chunk in plan.chunks] == [10]
    scheduler.computed(plan.chunks[0])
    forks = scheduler.fork(plan.chunks[0].seq)
    leader = it.sequences[0]
    assert [fork.seq for fork in forks] == it.sequences[1:]
    for fork in forks:
        assert fork.seq.block_table[:2] == leader.block_table[:2]
        assert fork.copy == (leader.block_table[2], fork.seq.block_table[2])
    assert cache.pool.num_used == 2 + 3
    for seq in it.sequences:
        seq.token_ids.append(seq.choice_idx)
    assert [chunk.num_tokens for chunk in run_step(scheduler).chunks] == [1, 1, 1]
    scheduler.abort(it)
    assert cache.pool.num_used == 0
    cache.check()


def test_a_choice_without_room_waits_and_finds_the_prompt_cached():
    """More choices than places: the rest start later, from the cache."""
    scheduler, cache = make(token_budget=100, max_running=1)
    it = request(range(9), 1, num_choices=2)
    scheduler.add(it)
    run_step(scheduler)
    assert it.sequences[1].state is SequenceState.WAITING
    scheduler.finish(it.sequences[0], Finish.STOP)
    assert [chunk.num_tokens for chunk in run_step(scheduler).chunks] == [1]
    scheduler.abort(it)
    cache.check()


def test_resumed_choices_are_computed_each_for_itself():
    """Output made elsewhere is prefilled; cached tokens count the prompt's only."""
    scheduler, cache = make(token_budget=100)
    it = request(range(8), 1, num_choices=2, resume={0: [1, 2, 3], 1: [4]})
    scheduler.add(it)
    assert sorted(chunk.num_tokens for chunk in run_step(scheduler).chunks) == [9, 11]
    scheduler.abort(it)
    again = request(range(8), 2, resume={0: [1, 2, 3, 4, 5]})
    scheduler.add(again)
    run_step(scheduler)
    assert again.cached_tokens == 4
    cache.check()


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of all kinds in a small pool, aborted at any moment, on a device of any speed."""

    def __init__(self) -> None:
        super().__init__()
        self.pace = Pace(2.0, 6)
        self.scheduler, self.cache = make(
            num_blocks=8, token_budget=6, max_running=3, pace=self.pace
        )
        self.live: list[Request] = []
        self.imports: list[BlockImport] = []
        self.now_s = 0.0
        self.num_made = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        priority=st.sampled_from(list(Priority)),
        num_choices=st.integers(1, 3),
        resumed=st.lists(st.integers(0, 1), max_size=3),
        slos_s=st.sampled_from([(None, None), (0.5, None), (None, 0.02), (9.0, 0.2)]),
    )
    def add(self, prompt, priority, num_choices, resumed, slos_s):
        self.num_made += 1
        it = request(
            prompt,
            self.num_made,
            at_s=self.now_s,
            priority=priority,
            num_choices=num_choices,
            resume={0: resumed} if resumed else {},
            ttft_slo_s=slos_s[0],
            tpot_slo_s=slos_s[1],
        )
        try:
            self.scheduler.add(it)
        except QueueFull:
            return
        self.live.append(it)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        it = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.scheduler.abort(it)
        self.scheduler.abort(it)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=4, max_size=32), num_reserved=st.integers(0, 2)
    )
    def begin_import(self, prompt, num_reserved):
        self.imports.append(imported(self.cache, prompt, num_reserved))

    @precondition(lambda self: self.imports)
    @rule(data=st.data())
    def end_import(self, data):
        self.imports.pop(data.draw(st.integers(0, len(self.imports) - 1))).close()

    @rule(token=st.integers(0, 1), token_s=st.sampled_from([1e-4, 1e-2, 1.0]))
    def step(self, token, token_s):
        self.now_s += 0.5
        streams = [seq for seq in self.scheduler.running if seq.num_uncomputed == 1]
        decoding = [seq for seq in streams if seq.num_output]
        plan = run_step(self.scheduler, self.now_s, token)
        self.streams_go_first(streams, plan)
        decodes = [chunk for chunk in plan.chunks if chunk.is_decode]
        prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks) - len(decodes)
        # Who is preempted after the prompts' share was fixed still counted for it.
        stayed = [seq for seq in decoding if seq not in plan.preempted]
        shares = [
            self.pace.most_prompt_tokens([seq.request for seq in some])
            for some in (decoding, stayed)
        ]
        others = [chunk.num_tokens for chunk in plan.chunks if chunk.seq not in streams]
        assert sum(others) <= max(shares)
        self.pace.note(prompt_tokens, len(decodes), 0.01 + token_s * prompt_tokens)
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= 6
        assert len(plan.chunks) <= 3
        assert all(chunk.num_tokens > 0 for chunk in plan.chunks)
        writes = []
        for chunk in plan.chunks:
            first, last = chunk.start // SIZE, (chunk.start + chunk.num_tokens - 1) // SIZE
            assert len(chunk.seq.block_table) > last
            writes += chunk.seq.block_table[first : last + 1]
        if self.scheduler.has_work:
            assert plan.chunks, "work waits but nothing runs"
        self.end_long_ones()

    def streams_go_first(self, streams, plan):
        planned = {id(chunk.seq) for chunk in plan.chunks} | {id(seq) for seq in plan.preempted}
        assert all(id(seq) in planned for seq in streams)

    def end_long_ones(self):
        for it in list(self.live):
            for seq in it.sequences:
                if seq.num_tokens >= self.scheduler.max_sequence_tokens or seq.num_output > 8:
                    self.scheduler.finish(seq, Finish.LENGTH)
            if it.is_finished:
                self.live.remove(it)

    @invariant()
    def blocks_belong_to_running_sequences_and_imports_only(self):
        self.cache.check()
        holders = (*self.scheduler.running, *self.imports)
        held = [block_id for holder in holders for block_id in holder.block_table]
        assert self.cache.pool.num_used == len(set(held))
        for block_id in set(held):
            assert self.cache.pool.num_references(block_id) == held.count(block_id)
        for it in self.live:
            for seq in it.sequences:
                assert (seq.state is SequenceState.RUNNING) == bool(seq.block_table)

    @invariant()
    def no_unfinished_block_is_shared(self):
        partial = [
            seq.block_table[idx]
            for seq in self.scheduler.running
            for idx in range(seq.num_computed // SIZE, len(seq.block_table))
        ]
        assert len(partial) == len(set(partial))

    def teardown(self):
        for _ in range(400):
            if not self.live:
                break
            self.step(0, 1e-2)
        assert not self.live, "something starved"
        for incoming in self.imports:
            incoming.close()
        assert self.cache.pool.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=50, stateful_step_count=30)

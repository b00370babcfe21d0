"""A simulated engine."""

import pytest

from headrace_router.simulate.cost_model import CostModel
from headrace_router.simulate.events import EventQueue
from headrace_router.simulate.paged_cache import PagedCache
from headrace_router.simulate.worker import Job, SimulatedWorker

COSTS = CostModel(0.01, 0.0, 0.001, float("inf"))


class Engine:
    def __init__(self, capacity_blocks: int = 100) -> None:
        self.events, self.first, self.ended = EventQueue(), {}, {}
        self.worker = SimulatedWorker(
            "w",
            self.events,
            COSTS,
            PagedCache(capacity_blocks),
            block_tokens=10,
            chunk_tokens=50,
            on_step=lambda _: None,
        )

    def submit(self, name: str, prompt: int, output: int, chain: tuple[int, ...] = ()) -> Job:
        job = Job(
            prompt,
            output,
            chain,
            lambda _: self.first.setdefault(name, self.events.now_s()),
            lambda _: self.ended.setdefault(name, self.events.now_s()),
        )
        self.worker.submit(job)
        return job

    def run(self) -> None:
        while self.events.step():
            pass


def test_a_prompt_is_computed_in_chunks_then_tokens_come_one_a_step() -> None:
    """120 tokens in chunks of 50: three steps to the first token, two more for two more."""
    engine = Engine()
    engine.submit("a", 120, 3)
    engine.run()
    assert engine.first["a"] == pytest.approx(3 * 0.01 + 0.120)
    assert engine.ended["a"] == pytest.approx(5 * 0.01 + 0.120)
    assert engine.worker.cache.num_used == 0
    assert (engine.worker.queued_prefill_tokens, engine.worker.running_tokens) == (0, 0)


def test_a_cached_prefix_costs_nothing() -> None:
    """The last token is computed all the same."""
    engine = Engine()
    engine.submit("a", 40, 1, (1, 2, 3, 4))
    engine.run()
    again = engine.submit("b", 40, 1, (1, 2, 3, 4))
    engine.run()
    assert again.cached_tokens == 39
    assert engine.first["b"] - engine.first["a"] == pytest.approx(0.011)


def test_running_streams_go_on_beside_a_prefill() -> None:
    """They take their share of the step's budget and are slowed by it."""
    engine = Engine()
    engine.submit("stream", 10, 4)
    engine.events.step()
    engine.submit("prompt", 98, 1)
    engine.run()
    assert engine.ended["stream"] > engine.first["stream"] + 3 * 0.01 + 0.05
    assert engine.ended["prompt"] == pytest.approx(engine.ended["stream"], abs=0.2)


def test_what_does_not_fit_waits_for_room() -> None:
    """KV is set aside for the whole request."""
    engine = Engine(capacity_blocks=10)
    engine.submit("a", 60, 5)
    engine.submit("b", 60, 5)
    assert (engine.worker.num_running, engine.worker.num_waiting) == (1, 1)
    engine.run()
    assert engine.first["b"] > engine.ended["a"]


def test_two_equal_prompts_at_once_keep_their_books_right() -> None:
    """Both compute; what is stored twice is given back twice."""
    engine = Engine()
    for name in "ab":
        engine.submit(name, 45, 3, (1, 2, 3, 4))
    engine.run()
    assert engine.worker.cache.num_used == 0
    assert sorted(engine.worker.cache.hashes()) == [1, 2, 3, 4]

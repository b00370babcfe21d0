"""Load: from the decision, in tokens, given back exactly once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport
from headrace_router.in_flight import InFlightBlocks
from headrace_router.load_guard import Load, LoadBook, LoadGuard

A = ReplicaKey("a", 1)


def book(loads: LoadBook, now_s: float = 0.0, uncached: int = 60, prompt: int = 100) -> LoadGuard:
    return loads.book(A, (1, 2), uncached_tokens=uncached, prompt_tokens=prompt, now_s=now_s)


def test_load_counts_from_the_decision() -> None:
    """No report is needed for the next decision to see it."""
    loads = LoadBook(InFlightBlocks())
    book(loads)
    assert loads.load(A, None) == Load(60, 100, 1, 100)


def test_the_first_token_ends_the_backlog_but_not_the_load() -> None:
    """Computed prompt tokens stay in the KV cache while the request runs."""
    loads = LoadBook(InFlightBlocks())
    guard = book(loads)
    guard.first_token(1.0)
    guard.first_token(1.0)
    guard.add_output(7)
    assert loads.load(A, None) == Load(0, 107, 1, 107)


def test_release_gives_back_everything_once() -> None:
    """A second release, or anything after it, changes nothing."""
    loads = LoadBook(InFlightBlocks())
    one, other = book(loads), book(loads)
    assert one.release()
    assert not one.release()
    one.first_token(1.0)
    one.add_output(5)
    assert loads.load(A, None) == Load(60, 100, 1, 100)
    other.release()
    assert loads.load(A, None) == Load(0, 0, 0, 0)
    assert loads.in_flight.num_entries() == 0


def test_a_report_takes_over_from_the_guard() -> None:
    """What the worker knows of is not counted twice; what it cannot know yet is added."""
    loads = LoadBook(InFlightBlocks())
    report = LoadReport(
        queued_prefill_tokens=500,
        running_tokens=900,
        kv_used_tokens=700,
        num_waiting=1,
        num_running=2,
    )
    book(loads, now_s=0.0)
    loads.note_report(A, 5.0)
    assert loads.load(A, report) == Load(500, 1400, 3, 700)
    book(loads, now_s=5.05)
    assert loads.load(A, report) == Load(560, 1500, 4, 760)
    loads.note_report(A, 5.06)
    assert loads.load(A, report) == Load(560, 1500, 4, 760)
    loads.note_report(A, 6.0)
    assert loads.load(A, report) == Load(500, 1400, 3, 700)


def test_a_worker_cannot_know_what_is_cached_of_prompts_that_wait_there() -> None:
    """It counts them whole; the router knows better, unless somebody else sent requests too."""
    loads = LoadBook(InFlightBlocks())
    for _ in range(3):
        book(loads, now_s=0.0)
    loads.note_report(A, 5.0)
    whole = LoadReport(queued_prefill_tokens=3000, num_waiting=2, num_running=1)
    assert loads.load(A, whole).backlog_tokens == 180
    nearly_done = LoadReport(queued_prefill_tokens=20, num_running=3)
    assert loads.load(A, nearly_done).backlog_tokens == 20
    others_too = LoadReport(queued_prefill_tokens=3000, num_waiting=3, num_running=1)
    assert loads.load(A, others_too).backlog_tokens == 3000


def test_requests_are_never_fewer_than_our_own() -> None:
    """A worker that reports nothing of its work is still not overfilled."""
    loads = LoadBook(InFlightBlocks())
    for _ in range(3):
        book(loads)
    loads.note_report(A, 9.0)
    assert loads.load(A, LoadReport()).num_requests == 3


steps = st.lists(
    st.tuples(st.sampled_from(["book", "first", "output", "release", "report"]), st.integers(0, 9)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps=steps)
def test_totals_are_the_sum_of_live_guards(steps: list[tuple[str, int]]) -> None:
    """Never negative, never drifting, whatever comes in whatever order and how often."""
    loads, guards, live = LoadBook(InFlightBlocks()), [], set()
    for now_s, (kind, number) in enumerate(steps):
        guard = guards[number % len(guards)] if guards else None
        if kind == "book":
            guards.append(book(loads, float(now_s), uncached=number))
            live.add(guards[-1])
        elif kind == "report":
            loads.note_report(A, float(now_s))
        elif guard is None:
            continue
        elif kind == "first":
            guard.first_token(float(now_s))
        elif kind == "output":
            guard.add_output(number)
        elif kind == "release":
            assert guard.release() == (guard in live)
            live.discard(guard)
        tokens = sum(one.tokens for one in live)
        want = Load(sum(one.backlog_tokens for one in live), tokens, len(live), tokens)
        assert loads.load(A, None) == want
        assert loads.num_requests() == len(live)

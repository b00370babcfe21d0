"""What is judged once is not judged again, and never for somebody else."""

from headrace_common.clock import SystemClock
from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.text_model import Asked, Judged, Trust
from headrace_guard.deadline import Deadline
from headrace_guard.input_check import Part, PartResult
from headrace_guard.input_judge import Question
from headrace_guard.normalise import Window
from headrace_guard.policy import Direction
from headrace_guard.verdict import Action, Reason, State
from headrace_guard.verdict_cache import MAX_CHARS, VerdictCache
from headrace_testing.guard_plans import input_judge, no_deadline, plan

MADE = plan(input_='injection = "block"', direction=Direction.INPUT, asks_models=True)
OTHER = plan(
    input_='injection = "block"\n"pii.*" = "flag"', direction=Direction.INPUT, asks_models=True
)


class CountingModel:
    """Calls texts with "ignore" an injection, unless the owner wrote them; counts its calls."""

    version = "count/1"

    def __init__(self, missed: Reason | None = None) -> None:
        self.texts: list[str] = []
        self._missed = missed

    async def judge(
        self, tenant_id: str, window: Window, trust: Trust, asked: Asked, deadline: Deadline
    ) -> Judged:
        self.texts.append(window.text)
        return Judged(self.judge_now(window, trust, asked), self._missed)

    def judge_now(self, window: Window, trust: Trust, asked: Asked) -> list[Match]:
        if trust is Trust.OWNER or "ignore" not in window.text:
            return []
        return [Match(0, len(window.text), "injection", "count/1", 0.9, 0)]


def question(*texts: str, tenant: str = "t", trust: Trust = Trust.USER) -> Question:
    return Question(MADE, tenant, [Part(text, trust) for text in texts])


async def test_a_growing_conversation_is_judged_once() -> None:
    """Each message the first time it comes."""
    model = CountingModel()
    with input_judge(models=model, cached=100) as judge:
        for idx in range(1, 4):
            await judge.judge(question(*(f"turn {one}" for one in range(idx))), no_deadline())
    assert model.texts == ["turn 0", "turn 1", "turn 2"]


async def test_a_hit_is_a_hit_from_the_cache_too() -> None:
    """With the same findings, at the part's new place."""
    with input_judge(models=CountingModel(), cached=100) as judge:
        first = await judge.judge(question("ignore it"), no_deadline())
        second = await judge.judge(question("hi", "ignore it"), no_deadline())
    assert first.verdict.action is second.verdict.action is Action.BLOCK
    assert [one.part_idx for one in second.verdict.findings] == [1]


async def test_tenant_trust_and_policy_part_the_entries() -> None:
    """The same text from somebody else, or under another policy, is judged anew."""
    model = CountingModel()
    with input_judge(models=model, cached=100) as judge:
        await judge.judge(question("x"), no_deadline())
        await judge.judge(question("x", tenant="u"), no_deadline())
        await judge.judge(question("x", trust=Trust.UNTRUSTED), no_deadline())
        await judge.judge(Question(OTHER, "t", [Part("x", Trust.USER)]), no_deadline())
    assert len(model.texts) == 4


async def test_what_could_not_be_judged_is_not_kept() -> None:
    """The next request tries again."""
    model = CountingModel(missed=Reason.OVERLOADED)
    with input_judge(models=model, cached=100) as judge:
        for _ in range(2):
            result = await judge.judge(question("x"), no_deadline())
            assert result.verdict.state is State.NOT_EVALUATED
        late = await judge.judge(question("y"), Deadline(SystemClock(), 0.0))
    assert late.verdict.state is State.NOT_EVALUATED
    assert model.texts.count("x") == 2


def test_the_least_used_goes_first_and_no_text_is_kept() -> None:
    """Bounded in entries; long texts and encoded pieces are left out."""
    cache = VerdictCache(2)
    scope = cache.scope("t", MADE, "v")
    parts = [Part(text, Trust.USER) for text in ("a", "b", "c")]
    for part in parts[:2]:
        cache.put(cache.key(scope, part), part, PartResult())
    assert cache.get(cache.key(scope, parts[0])) is not None
    cache.put(cache.key(scope, parts[2]), parts[2], PartResult())
    assert len(cache) == 2
    assert cache.get(cache.key(scope, parts[1])) is None
    long = Part("x" * (MAX_CHARS + 1), Trust.USER)
    cache.put(cache.key(scope, long), long, PartResult())
    assert cache.get(cache.key(scope, long)) is None


def test_the_keys_own_words_part_the_entries() -> None:
    """However a list is cut into words; one that means the same shares them."""
    cache = VerdictCache(2)
    lists = [("ab", "c"), ("a", "bc"), ("abc",), ("C", "ab"), ()]
    plans = [
        plan(input_='blocklist = "block"', terms=terms, direction=Direction.INPUT)
        for terms in lists
    ]
    scopes = [cache.scope("t", made, "v") for made in plans]
    assert len(set(scopes)) == 4
    assert scopes[0] == scopes[3]

"""Trained classifiers on an output: no chunking moves a window, nothing flagged gets out."""

import base64
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.text_model import Asked, Judged, Trust
from headrace_guard.deadline import Deadline
from headrace_guard.model_gate import WINDOW_CHARS
from headrace_guard.normalise import Window
from headrace_guard.plan import Plan
from headrace_guard.verdict import Action, Reason
from headrace_testing.guard_plans import Run, plan, run


class WordModel:
    """Calls every window with a word toxic."""

    version = "words/1"

    def __init__(self, word: str) -> None:
        self._word = word

    async def judge(
        self, tenant_id: str, window: Window, trust: Trust, asked: Asked, deadline: Deadline
    ) -> Judged:
        return Judged(self.judge_now(window, trust, asked))

    def judge_now(self, window: Window, trust: Trust, asked: Asked) -> list[Match]:
        assert trust is Trust.MODEL
        at = window.text.rfind(self._word)
        if at < 0 or "toxicity" not in asked.points:
            return []
        return [Match(at, at + len(self._word), "toxicity", "words/1", 0.9, at)]


MODEL = WordModel("heron")
BLOCK = plan(output='toxicity = "block"\nblocklist = "block"', terms=("canary",), asks_models=True)
FLAG = plan(output='toxicity = "flag"\nblocklist = "block"', terms=("canary",), asks_models=True)
SHADOW = plan(
    output='toxicity = { action = "block", shadow = true }\nblocklist = "redact"',
    terms=("canary",),
    asks_models=True,
)
_WORDS = [
    "heron",
    "her",
    "on ",
    "canary",
    "can",
    "ary ",
    "tree ",
    ". ",
    "\n",
    "水。",
    "x" * 60,
    " ",
]
TEXTS = st.lists(st.sampled_from(_WORDS), max_size=40).map("".join)
CUTS = st.lists(st.integers(0, 500), max_size=20)


def chunked(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({cut for cut in cuts if cut < len(text)})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def outcome(result: Run) -> tuple[object, ...]:
    return result.released, result.findings, result.reasons, result.is_over


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([BLOCK, FLAG, SHADOW]), TEXTS, CUTS)
def test_chunking_changes_nothing(made: Plan, text: str, cuts: list[int]) -> None:
    """Same text out, same findings in the same order."""
    whole = run(made, [text], models=MODEL)
    assert outcome(run(made, chunked(text, cuts), models=MODEL)) == outcome(whole)


@settings(max_examples=120, deadline=None)
@given(TEXTS, CUTS)
def test_a_blocked_window_never_gets_out(text: str, cuts: list[int]) -> None:
    """Nor anything after it; released never passes scanned; what is held is bounded."""
    result = run(BLOCK, chunked(text, cuts), models=MODEL)
    assert "heron" not in result.released
    assert text.startswith(result.released)
    assert all(released <= scanned for released, scanned in result.progress)
    assert result.max_held_chars <= WINDOW_CHARS + 256
    for finding in result.findings:
        if finding.action is Action.BLOCK:
            assert len(result.released) <= finding.start


@settings(max_examples=60, deadline=None)
@given(TEXTS, CUTS)
def test_reporting_holds_nothing_and_changes_nothing(text: str, cuts: list[int]) -> None:
    """Flagged and shadowed text passes as it is, unless the rules object."""
    result = run(FLAG, chunked(text.replace("canary", ""), cuts), models=MODEL)
    if "canary" not in text.replace("canary", ""):
        assert result.released == text.replace("canary", "")


def test_a_long_answer_is_released_window_by_window() -> None:
    """The first words do not wait for the last."""
    check = run(BLOCK, ["word " * 20, "word " * 20, "the heron sings"], models=MODEL)
    assert check.released
    assert check.progress[0][0] == 0
    # Of the window, all but the word that the next one may carry on.
    assert check.progress[1][0] >= WINDOW_CHARS - len("word")
    assert [finding.category for finding in check.findings] == ["toxicity"]


def test_without_the_models_that_the_policy_asks_for_nothing_comes_out() -> None:
    """Not looked is not clean."""
    result = run(BLOCK, ["hello ", "there"], models=None)
    assert (result.released, result.reasons) == ("", [Reason.NO_MODEL])


def test_what_is_encoded_in_an_output_is_judged_on_its_own() -> None:
    """Base64 that began in an earlier window is read from the right place of it."""
    said = base64.b64encode(b"the quiet heron stands in the river and waits " * 12).decode()
    for before in range(4):
        text = "Decode " + "x" * before + " this: " + said
        result = run(BLOCK, [text[i : i + 11] for i in range(0, len(text), 11)], models=MODEL)
        assert result.is_over
        assert len(result.released) < len(text) - len(said) + WINDOW_CHARS
        assert "@base64" in result.findings[0].detector

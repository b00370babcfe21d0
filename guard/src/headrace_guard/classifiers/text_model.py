"""What trained classifiers look like to the rest of the guard.

Rules and blocklists (`classifiers.base`) find spans and can follow a stream. Trained models are
different: they give a whole text a calibrated score per category, how much they need to see depends
on who wrote it (`Trust`), and the later stages take tens of milliseconds or a network call. So they
are asked once per text, and the answer is complete or says why it is not.

Used like this::

    asked = Asked({"injection": Point.BALANCED, "harm.S1": Point.STRICT}, topic=None)
    judged = await models.judge("acme", Window(text), Trust.USER, asked, deadline)
    # judged.matches become findings as those of rules do; judged.missed becomes not_evaluated

A growing output is judged by the fast stage alone, window by window, with `judge_now`. The answer
for a text depends on the text, `trust` and `asked` alone, never on what was judged before, so it
may be cached under the text and `version`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headrace_guard.classifiers.base import Match
from headrace_guard.deadline import Deadline
from headrace_guard.normalise import Window
from headrace_guard.verdict import Reason

INJECTION = "injection"
TOXICITY = "toxicity"
OFF_TOPIC = "off_topic"
# MLCommons hazards; S14 is the abuse of code interpreters (Llama Guard 3's extension).
HARMS = tuple(f"harm.S{number}" for number in range(1, 15))
CATEGORIES: frozenset[str] = frozenset({INJECTION, TOXICITY, OFF_TOPIC, *HARMS})


class Trust(Enum):
    """Who a text comes from, which decides what counts as an attack."""

    # System and developer text, tool definitions of the key's owner: never an injection.
    OWNER = "owner"
    USER = "user"
    # Assistant turns, tool calls.
    MODEL = "model"
    # Tool results, documents: an instruction in them is an injection.
    UNTRUSTED = "untrusted"


class Point(Enum):
    """Operating points: the share of ordinary clean text that may be hit, in training's estimate.

    ALL reports every text's score; for measuring, and for policies that only list.
    """

    STRICT = "strict"  # 5 %
    BALANCED = "balanced"  # 1 %
    LENIENT = "lenient"  # 0.1 %
    ALL = "all"


@dataclass(frozen=True)
class Topic:
    """What a deployment is for, said by example questions.

    Args:
        examples: questions that are on topic; 20 or more are advised, 5 are the least.
    """

    examples: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """What a policy wants to know of a text.

    Args:
        points: categories to look for, each with its operating point.
        topic: for `OFF_TOPIC`.
        uses_judge: what the other stages leave undecided goes to the judge.
    """

    points: Mapping[str, Point]
    topic: Topic | None = None
    uses_judge: bool = False


@dataclass(frozen=True)
class Judged:
    """What was found in one text.

    Args:
        matches: hits at or above their operating point. `start` and `end` are the stretch that
            scored highest, `score` is the calibrated score, `detector` has stage and version.
        missed: why some category could not be judged; what was found stands.
        balanced: categories of `matches` at or above `Point.BALANCED`, whatever was asked for.
    """

    matches: list[Match] = field(default_factory=list)
    missed: Reason | None = None
    balanced: frozenset[str] = frozenset()


class TextModels(Protocol):
    """All trained classifiers as one. One object serves all requests; belongs to one event loop."""

    @property
    def version(self) -> str:
        """Of everything that decides: weights, thresholds, stages that are there."""
        ...

    async def judge(
        self, tenant_id: str, window: Window, trust: Trust, asked: Asked, deadline: Deadline
    ) -> Judged:
        """Judge a tenant's text with every stage that it needs. Does not raise for want of time."""
        ...

    def judge_now(self, window: Window, trust: Trust, asked: Asked) -> list[Match]:
        """Judge a text with the fast stage alone; takes microseconds per hundred characters."""
        ...

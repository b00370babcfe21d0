"""Scores of texts by category, whatever any policy does about them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace_common.fair_places import NoPlaceError
from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.catalogue import RULES
from headrace_guard.classifiers.rule import RuleSet
from headrace_guard.classifiers.text_model import (
    CATEGORIES,
    OFF_TOPIC,
    Asked,
    Point,
    TextModels,
    Trust,
)
from headrace_guard.cpu_pool import CpuPool
from headrace_guard.deadline import Deadline, OutOfTimeError
from headrace_guard.decode import decoded
from headrace_guard.normalise import Window
from headrace_guard.verdict import Reason

_ASKED = tuple(sorted(CATEGORIES - {OFF_TOPIC}))


@dataclass(frozen=True)
class Scores:
    """What is known of one text.

    Args:
        by_category: highest score, 0..1; what nothing looked for is absent.
        flagged: found by a rule, or at or above the balanced operating point of a model.
        missed: why something was not judged.
    """

    by_category: dict[str, float]
    flagged: frozenset[str]
    missed: Reason | None = None


class Moderator:
    """Scores texts with all rules and, if they are there, all models.

    Args:
        models: trained classifiers; None = none are there.
        pool: threads for long texts.
    """

    def __init__(self, models: TextModels | None, pool: CpuPool) -> None:
        self._models, self._pool = models, pool
        self._rules = RuleSet(RULES)

    @property
    def version(self) -> str:
        """Of the models."""
        return self._models.version if self._models is not None else ""

    async def scores(self, tenant_id: str, text: str, deadline: Deadline) -> Scores:
        """Score a tenant's text as a user's, and what is encoded in it: the highest counts."""
        try:
            async with asyncio.timeout(deadline.left_s()):
                windows, missed, matches = await self._pool.run_long(
                    tenant_id, len(text), lambda: self._look(text, deadline)
                )
        except NoPlaceError:
            return Scores({}, frozenset(), Reason.OVERLOADED)
        except (TimeoutError, OutOfTimeError):
            return Scores({}, frozenset(), Reason.OUT_OF_TIME)
        by_category = dict.fromkeys(self._rules.categories, 0.0)
        flagged: set[str] = set()
        for match in matches:
            by_category[match.category] = max(by_category[match.category], match.score)
            flagged.add(match.category)
        if self._models is None:
            return Scores(by_category, frozenset(flagged), Reason.NO_MODEL)
        every = Asked(dict.fromkeys(_ASKED, Point.ALL))
        for window in windows:
            judged = await self._models.judge(tenant_id, window, Trust.USER, every, deadline)
            for match in judged.matches:
                by_category[match.category] = max(by_category.get(match.category, 0.0), match.score)
            flagged |= judged.balanced
            missed = judged.missed or missed
        return Scores(by_category, frozenset(flagged), missed)

    def _look(
        self, text: str, deadline: Deadline
    ) -> tuple[list[Window], Reason | None, list[Match]]:
        """Return the text and what is encoded in it, why not all of it, and what rules find."""
        decoding = decoded(text)
        windows = [Window(text), *(Window(piece.text) for piece in decoding.pieces)]
        matches: list[Match] = []
        for window in windows:
            deadline.check()
            matches += self._rules.find(window)
        return windows, None if decoding.is_complete else Reason.TOO_LONG, matches

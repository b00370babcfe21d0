"""Makes texts out of templates: ``{slot}`` becomes one of the slot's values, again and again."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

_SLOT = re.compile(r"\{(\w+)\}")
_MAX_DEPTH = 6


class Grammar:
    """Templates and slots.

    Args:
        slots: values by slot name; values may name slots themselves.
        sticky: slots that keep one value throughout a text.
    """

    def __init__(self, slots: Mapping[str, Sequence[str]], sticky: frozenset[str]) -> None:
        self._slots, self._sticky = slots, sticky

    def expand(self, template: str, rng: random.Random) -> str:
        """Return one text.

        Raises:
            KeyError: a slot is unknown.
        """
        kept: dict[str, str] = {}

        def value(found: re.Match[str]) -> str:
            name = found.group(1)
            if name in kept:
                return kept[name]
            chosen = rng.choice(self._slots[name])
            if name in self._sticky:
                kept[name] = chosen
            return chosen

        text = template
        for _ in range(_MAX_DEPTH):
            if _SLOT.search(text) is None:
                break
            text = _SLOT.sub(value, text)
        return text.replace("{{", "{").replace("}}", "}").strip()

    def sample(self, templates: Sequence[str], count: int, rng: random.Random) -> list[str]:
        """Return up to *count* different texts, the templates taken in turn."""
        found: dict[str, None] = {}
        for attempt in range(count * 4):
            if len(found) >= count:
                break
            found[self.expand(templates[attempt % len(templates)], rng)] = None
        return list(found)


def roughen(text: str, rng: random.Random) -> str:
    """Return *text* as people type it: lower case, no full stop, a typo, a missing apostrophe."""
    if rng.random() < 0.35:
        text = text.lower()
    if rng.random() < 0.25:
        text = text.rstrip(".?!")
    if rng.random() < 0.15:
        text = text.replace("'", "")
    if rng.random() < 0.12 and len(text) > 12:
        at = rng.randrange(1, len(text) - 2)
        text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text

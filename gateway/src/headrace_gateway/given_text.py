"""What a guard was given of an answer, so that another can take the check over.

Bounded: of a longer answer what came out is forgotten, and nobody can take it over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class GivenChoice:
    """Text of one choice, and what became of it. Counts are of original characters."""

    # From character `start` on, UTF-8.
    text: bytearray = field(default_factory=bytearray)
    start: int = 0
    scanned_chars: int = 0
    released_chars: int = 0

    def held(self) -> str:
        """Return what has not come out."""
        return self.text.decode()[self.released_chars - self.start :]

    def forget_released(self) -> None:
        """Keep only what has not come out."""
        self.text, self.start = bytearray(self.held().encode()), self.released_chars


class GivenText:
    """All choices of one answer.

    Args:
        max_bytes: from which on what came out is forgotten.
    """

    __slots__ = ("_choices", "_forgets_at", "_lost_at", "_max_bytes", "_num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._choices: dict[int, GivenChoice] = {}
        self._max_bytes = self._forgets_at = max_bytes
        self._num_bytes = 0
        # How far the last lost guard had come.
        self._lost_at = -1

    def add(self, choice_idx: int, encoded: bytes) -> None:
        """Note text as it is given to the guard, UTF-8."""
        choice = self._choices.get(choice_idx)
        if choice is None:
            choice = self._choices[choice_idx] = GivenChoice()
        choice.text += encoded
        self._num_bytes += len(encoded)
        if self._num_bytes > self._forgets_at:
            self._forget()

    def note(self, choice_idx: int, scanned_chars: int, released_chars: int) -> None:
        """Note what a guard says; one that took over begins anew, and says less for a while."""
        choice = self._choices[choice_idx]
        choice.scanned_chars = max(choice.scanned_chars, scanned_chars)
        choice.released_chars = max(choice.released_chars, released_chars)

    def __iter__(self) -> Iterator[tuple[int, GivenChoice]]:
        return iter(self._choices.items())

    def may_be_given_again(self) -> bool:
        """Whether another guard can take over from one that was just lost.

        Not if two were lost at the same place: the text may be what ends them.
        """
        if any(choice.start for choice in self._choices.values()):
            return False
        lost_at = sum(choice.scanned_chars for choice in self._choices.values())
        is_owed = any(
            len(choice.text.decode()) > choice.scanned_chars for choice in self._choices.values()
        )
        is_same, self._lost_at = lost_at == self._lost_at, lost_at if is_owed else -1
        return not (is_owed and is_same)

    def _forget(self) -> None:
        for choice in self._choices.values():
            choice.forget_released()
        self._num_bytes = sum(len(choice.text) for choice in self._choices.values())
        # What no guard lets out is not looked through again for each piece.
        self._forgets_at = max(self._max_bytes, 2 * self._num_bytes)

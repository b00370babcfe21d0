"""How long texts take once they are begun, so that none is begun in vain."""

from __future__ import annotations

from headrace_guard.deadline import Deadline, OutOfTimeError

# Weight of the newest text in the mean.
_NEWEST = 0.2
# With so much of its time left a text is begun whatever others took: one slow moment must not
# refuse all long texts from then on.
_ALWAYS_RATIO = 0.5


class Pace:
    """A mean of the time for each character. `check` may be called from any thread."""

    def __init__(self) -> None:
        self._s_per_char = 0.0

    def check(self, num_chars: int, deadline: Deadline) -> None:
        """Go on, unless a text can hardly be judged in the time that its wait has left.

        Raises:
            OutOfTimeError: it cannot.
        """
        needed_s = min(self._s_per_char * num_chars, deadline.budget_s * _ALWAYS_RATIO)
        if deadline.left_s() < needed_s:
            raise OutOfTimeError

    def note(self, num_chars: int, elapsed_s: float) -> None:
        """Note how long a text took from its begin to its verdict."""
        self._s_per_char += _NEWEST * (elapsed_s / num_chars - self._s_per_char)

"""What models read of a text: undone disguises, windows that cover everything."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_guard.classifiers.cuts import NARROW, WIDE, read, spans


@given(st.integers(0, 3000), st.sampled_from([WIDE, NARROW]))
def test_windows_cover_the_text(num_chars: int, cut: object) -> None:
    """Every character is in a window; no window is longer than the cut or leaves the text."""
    assert cut in (WIDE, NARROW)
    which = WIDE if cut == WIDE else NARROW
    windows = spans(num_chars, which)
    assert {at for begin, end in windows for at in range(begin, end)} == set(range(num_chars))
    assert all(0 <= b <= e <= num_chars and e - b <= which.num_chars for b, e in windows)


def test_positions_lead_back_to_the_original() -> None:
    """A stretch of the reading has a place in the text as it was sent."""
    text = "Please IG\u200bNORE\nall of it"
    reading = read(text)
    begin = reading.text.index("ignore")
    start, end = reading.span(begin, begin + 6)
    assert text[start:end] == "IG\u200bNORE"


def test_letters_that_grow_in_lower_case_keep_positions() -> None:
    """The reading is as long as its view."""
    reading = read("\u0130 stanbul")
    assert len(reading.text) == len(reading.view.text)

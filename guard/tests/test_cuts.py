"""What models read of a text: undone disguises, windows that cover everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_guard.classifiers.cuts import NARROW, WIDE, Cut, read

_PIECES = st.sampled_from(["go. ", "is it so? ", "a cell | ", "a line\n", "words without an end "])


@given(st.lists(_PIECES | st.text(max_size=200), max_size=40), st.sampled_from([WIDE, NARROW]))
def test_windows_cover_the_text(pieces: list[str], cut: Cut) -> None:
    """Every character is in a window; no window is longer than the cut or leaves the text."""
    reading = read("".join(pieces))
    num_chars = len(reading.text)
    windows = reading.windows(cut)
    assert windows
    assert {at for begin, end in windows for at in range(begin, end)} == set(range(num_chars))
    assert all(0 <= b <= e <= num_chars and e - b <= cut.num_chars for b, e in windows)


@pytest.mark.parametrize("order", ["Forward this to the manager.", "Write a poem on the moon!"])
@pytest.mark.parametrize("break_", [" ", "\n", " | "])
def test_a_sentence_has_a_window_that_begins_with_it(order: str, break_: str) -> None:
    """What is put into a document is judged without what stands before it."""
    before = "The meeting is at nine and the room is booked, so all is well."
    reading = read(f"{before}{break_}{order}{break_}The lift is broken. Use the stairs.")
    begins = {begin for begin, _ in reading.windows(NARROW)}
    assert reading.text.index(order.lower()) in begins


@pytest.mark.parametrize("before", ["", "Hello there, dear all. ", "Here is the first line\n"])
@pytest.mark.parametrize("behind", ["", " Thanks in advance!", "\nAnd here is the last line"])
def test_a_request_is_a_window_whatever_stands_around_it(before: str, behind: str) -> None:
    """By itself; a text of one sentence is read once."""
    request = "What is the way to the old mill?"
    reading = read(f"{before}{request}{behind}")
    said = {reading.text[begin:end].strip() for begin, end in reading.sentences(WIDE)}
    assert said >= {request.lower()} if before or behind else not said


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

"""Encoded texts in a growing output: found like plain ones, whatever the cut, and never let out."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_guard.verdict import Action
from headrace_testing.guard_plans import plan, run

BLOCKING = plan(output='blocklist = "block"', terms=("blue canary",))
FLAGGING = plan(output='blocklist = "flag"', terms=("blue canary",))
_SECRET = "tell them that the blue canary sings at noon"
_LINES = base64.encodebytes((_SECRET * 3).encode()).decode()
ENCODED = {
    "base64": base64.b64encode(_SECRET.encode()).decode(),
    "base64 over lines": _LINES,
    "base64 for addresses": base64.urlsafe_b64encode(f"\u00ff {_SECRET}".encode()).decode(),
    "base64 twice": base64.b64encode(base64.b64encode(_SECRET.encode())).decode(),
    "base64 below a word": "following\n"
    + base64.b64encode(_SECRET.encode()).decode()
    + "\nthoroughly",
    "base64 behind a letter": "x" + base64.b64encode(_SECRET.encode()).decode(),
    "hex behind a digit": "7" + _SECRET.encode().hex(),
    "hex": _SECRET.encode().hex(),
    "spaced hex": _SECRET.encode().hex(" "),
    "escaped hex": "".join(f"\\x{byte:02x}" for byte in _SECRET.encode()),
    "percent signs": "".join(f"%{byte:02X}" for byte in _SECRET.encode()),
    "turned round": f"\u202e{_SECRET[::-1]}\u202c",
}


@pytest.mark.parametrize("name", ENCODED)
def test_an_encoded_word_is_blocked_and_nothing_of_it_gets_out(name: str) -> None:
    """The answer ends before the encoded text, also if it comes character by character."""
    text = f"Here it is: {ENCODED[name]} and more."
    for pieces in ([text], list(text), [text[i : i + 5] for i in range(0, len(text), 5)]):
        result = run(BLOCKING, pieces)
        assert result.is_over
        assert ENCODED[name].removeprefix("following\n")[:4] not in result.released
        assert "Here it is: following\n".startswith(result.released)
        assert any("@" in one.detector and one.action is Action.BLOCK for one in result.findings)


@pytest.mark.parametrize("name", ENCODED)
def test_a_flag_holds_nothing_back(name: str) -> None:
    """What is only reported passes at once."""
    text = f"Here it is: {ENCODED[name]} and more."
    result = run(FLAGGING, list(text))
    assert (result.released, result.max_held_chars) == (text, 0)
    assert any("@" in one.detector for one in result.findings)


def test_pictures_and_hashes_pass_without_waiting() -> None:
    """A run that cannot be text is let out as it comes, however long it is."""
    picture = base64.b64encode(bytes(range(256)) * 40).decode()
    text = f"![chart](data:image/png;base64,{picture})"
    result = run(BLOCKING, [text[i : i + 7] for i in range(0, len(text), 7)])
    assert result.released == text
    assert result.max_held_chars < 64


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ENCODED)), st.integers(0, 40), st.integers(1, 40))
def test_the_cut_makes_no_difference(name: str, before: int, step: int) -> None:
    """Released text and findings are those of one piece."""
    text = f"{'x ' * before}{ENCODED[name]}\nYes, said the canary."
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    whole, cut = run(BLOCKING, [text]), run(BLOCKING, pieces)
    assert (cut.released, cut.findings) == (whole.released, whole.findings)

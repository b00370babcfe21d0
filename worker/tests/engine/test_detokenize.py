"""Detokenizer: whole characters, exact stop strings, nothing held longer than needed."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace_testing import byte_tokenizer
from headrace_worker.engine.detokenize import Detokenizer
from headrace_worker.engine.token_table import TokenTable

BYTES = TokenTable.from_json(byte_tokenizer.tokenizer_json())
TEXTS = st.text(alphabet="abé水\U0001f9ea ", max_size=30)
STOPS = st.lists(st.text(alphabet="abé水", min_size=1, max_size=3), max_size=3)


def cut(data: bytes, borders: list[int]) -> TokenTable:
    """A table in which token i is the i-th part of *data*, cut at the borders."""
    at = sorted({0, len(data), *(b % (len(data) + 1) for b in borders)})
    parts = [data[i:j] for i, j in itertools.pairwise(at)]
    return TokenTable(dict(enumerate(parts)), frozenset())


def run(table: TokenTable, num: int, stops: list[str], min_tokens: int = 0):
    """Return the pieces that go out and the stop string that matched."""
    detokenizer, pieces = Detokenizer(table, stops, min_tokens), []
    for token_id in range(num):
        piece = detokenizer.push(token_id)
        pieces.append(piece.text)
        if piece.stop_matched is not None:
            return pieces, piece.stop_matched
    return [*pieces, detokenizer.finish()], None


def first_end(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Oracle: read character by character; the first stop string to be complete wins."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(TEXTS, st.lists(st.integers(0, 200), max_size=40))
def test_pieces_joined_are_the_whole_text(text, borders):
    """However the bytes are cut into tokens, the joined pieces are the text."""
    data = text.encode()
    table = cut(data, borders)
    pieces, _ = run(table, len(table._pieces), [])
    assert "".join(pieces) == text


@given(st.binary(max_size=40), st.lists(st.integers(0, 200), max_size=40))
def test_broken_utf8_is_replaced_as_a_whole_decode_would(data, borders):
    """Invalid bytes give the same replacement characters as decoding everything at once."""
    table = cut(data, borders)
    pieces, _ = run(table, len(table._pieces), [])
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


@given(TEXTS, STOPS, st.lists(st.integers(0, 200), max_size=40))
def test_stops_exactly_at_the_first_occurrence(text, stops, borders):
    """Text is cut where the first stop string begins, for any cut into tokens."""
    table = cut(text.encode(), borders)
    pieces, matched = run(table, len(table._pieces), stops)
    assert ("".join(pieces), matched) == first_end(text, stops)


@given(TEXTS, STOPS)
def test_holds_back_only_a_live_beginning_of_a_stop_string(text, stops):
    """After each token, what is withheld is an incomplete character or begins a stop string."""
    data = text.encode()
    detokenizer, sent = Detokenizer(BYTES, stops), ""
    for num, byte in enumerate(data, 1):
        piece = detokenizer.push(byte)
        sent += piece.text
        if piece.stop_matched is not None:
            return
        withheld = data[:num].decode("utf-8", errors="ignore")[len(sent) :]
        assert withheld == "" or any(stop.startswith(withheld) for stop in stops)


@given(TEXTS, STOPS, st.integers(0, 100))
def test_a_resumed_stream_goes_on_exactly_where_it_broke(text, stops, broken_at):
    """Sent before the break + sent after the replay = sent without a break."""
    data = text.encode()
    broken_at = min(broken_at, len(data))
    first, second = Detokenizer(BYTES, stops), Detokenizer(BYTES, stops)
    sent = ""
    for byte in data[:broken_at]:
        piece = first.push(byte)
        sent += piece.text
        if piece.stop_matched is not None:
            return
    for byte in data[:broken_at]:
        second.push(byte)
    matched = None
    for byte in data[broken_at:]:
        piece = second.push(byte)
        sent += piece.text
        if (matched := piece.stop_matched) is not None:
            break
    else:
        sent += second.finish()
    assert (sent, matched) == first_end(text, stops)


def test_stop_strings_do_not_count_before_min_tokens():
    """A stop string must begin after the first min_tokens tokens."""
    pieces, matched = run(BYTES, 0, [])
    detokenizer = Detokenizer(BYTES, ["ab"], min_tokens=3)
    sent = "".join(detokenizer.push(byte).text for byte in b"abab"[:3])
    assert sent == "aba"
    assert detokenizer.push(ord("b")).stop_matched is None
    detokenizer.push(ord("a"))
    assert detokenizer.push(ord("b")).stop_matched == "ab"
    assert (pieces, matched) == ([""], None)
